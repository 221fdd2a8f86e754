"""What fio reaches on a directory with the shapes of our blocks: the bound of any tier there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtier.errors import TierError
from kvtier.interrupts import interrupts_held

if TYPE_CHECKING:
    from pathlib import Path

_TOTAL_BYTES_MIN = 128 << 20
_TOTAL_BYTES_MAX = 1 << 30
_BLOCKS = 64
_TIMEOUT_S = 120.0
_FILE = "fio.data"

Engine = Literal["libaio", "psync"]


@dataclass(frozen=True, slots=True)
class FioBest:
    """The better of fio's engines, for one block size and queue depth. GB/s.

    Attributes:
        write: into a fresh file, whose room fio allocates before: as a tier's blocks are fresh.
        read: of it.
        write_name: engine and depth of `write`.
        read_name: of `read`.
    """

    write: float = 0.0
    read: float = 0.0
    write_name: str = "fio"
    read_name: str = "fio"

    def better(self, other: FioBest) -> FioBest:
        """The best of two measurements."""
        write = max(self, other, key=lambda best: best.write)
        read = max(self, other, key=lambda best: best.read)
        return FioBest(write.write, read.read, write.write_name, read.read_name)


def find_fio() -> str | None:
    """Path of the program, if it is installed."""
    return shutil.which("fio")


def total_bytes(block_bytes: int) -> int:
    """Length of the file that fio works on."""
    wanted = min(max(_TOTAL_BYTES_MIN, _BLOCKS * block_bytes), _TOTAL_BYTES_MAX)
    return max(block_bytes, wanted // block_bytes * block_bytes)


def measure_fio(fio: str, directory: Path, block_bytes: int, depth: int, direct: bool) -> FioBest:
    """Write and read a file with each engine; the file is removed.

    Raises:
        TierError: fio failed; its message is in it.
    """
    best = FioBest()
    total = total_bytes(block_bytes)
    try:
        for engine in ("libaio", "psync"):
            found = _run(fio, directory, block_bytes, depth, total, direct, engine)
            best = best.better(found)
            (directory / _FILE).unlink(missing_ok=True)
    finally:
        (directory / _FILE).unlink(missing_ok=True)
    return best


def _run(
    fio: str,
    directory: Path,
    block_bytes: int,
    depth: int,
    total: int,
    direct: bool,
    engine: str,
) -> FioBest:
    workers = depth if engine == "psync" else 1
    share = max(block_bytes, total // workers // block_bytes * block_bytes)
    common = [
        f"--filename={directory.absolute() / _FILE}",
        f"--ioengine={engine}",
        f"--iodepth={1 if engine == 'psync' else depth}",
        f"--numjobs={workers}",
        f"--bs={block_bytes}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--direct={int(direct)}",
        "--thread",
        "--group_reporting",
        "--stonewall",
    ]
    command = [
        fio,
        "--output-format=json",
        "--name=write",
        *common,
        "--rw=write",
        "--name=read",
        *common,
        "--rw=read",
    ]
    returncode, stdout, stderr = _output(command)
    if returncode:
        lines = (stderr or stdout).strip().splitlines()
        raise TierError(f"fio failed: {lines[-1] if lines else returncode}")
    report = json.loads(stdout[stdout.index("{") :])
    speeds = {job["jobname"]: job for job in report["jobs"]}
    name = f"fio {engine} depth {depth}"
    return FioBest(
        speeds["write"]["write"]["bw_bytes"] / 1e9,
        speeds["read"]["read"]["bw_bytes"] / 1e9,
        name,
        name,
    )


def _output(command: list[str]) -> tuple[int, str, str]:
    """What a program says, and its exit status; however this ends, it does not run any more."""
    process: subprocess.Popen[str] | None = None
    try:
        with interrupts_held():
            process = subprocess.Popen(  # noqa: S603 - no shell, and nothing comes from outside
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        stdout, stderr = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise TierError(f"fio does not end within {_TIMEOUT_S:g} s") from None
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            process.communicate()
    return process.returncode, stdout, stderr
