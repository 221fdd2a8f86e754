"""The test's side of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
CALL_TIMEOUT_S = 240.0

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Scheduler and worker live in the engine's process itself."""
TWO_RANKS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""The workers of TP=2 are processes; the scheduler is in the engine's process."""
SERVER_LIKE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
"""As `vllm serve` has it: the scheduler is in a process of its own."""


class EngineError(Exception):
    """A call failed in the engine's process; the text is its traceback."""


@dataclass(frozen=True)
class Answer:
    """Tokens of each prompt, and where the cached ones of all of them together came from.

    Attributes:
        device, host, disk, remote: vLLM's count of cached prompt tokens; it calls remote tiers
            `external_unspecified`.
        tiers: kvtier's own count, by tier; without those that gave nothing.
    """

    tokens: list[list[int]]
    device: int
    host: int
    disk: int
    tiers: dict[str, int]
    remote: int = 0

    @property
    def cached(self) -> int:
        return self.device + self.host + self.disk + self.remote


def environment() -> dict[str, str]:
    """Of every process that runs an engine."""
    path = os.pathsep.join([str(SOURCES), str(HERE)])
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTEST_"))},
        **ONE_PROCESS,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }


class Forker:
    """A process that has imported vLLM, and forks processes for engines."""

    def __init__(self, log: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("w") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py"), "--forker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(),
                stdout=output,
                stderr=output,
            )
        if self._control.recv(64) != b"ready":
            raise EngineError(log.read_text())

    def fork(self, changes: Mapping[str, str], log: Path) -> Engine:
        """A process for an engine, and the calls to it."""
        ours, theirs = socket.socketpair()
        with log.open("w") as output, theirs:
            message = json.dumps(dict(changes)).encode()
            socket.send_fds(self._control, [message], [theirs.fileno(), output.fileno()])
            pid = int(self._control.recv(64))
        return Engine(ours, pid, log)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def spawn(changes: Mapping[str, str], log: Path) -> Engine:
    """A process for an engine that shares nothing with any other, its hash seed included."""
    ours, theirs = socket.socketpair()
    with log.open("w") as output, theirs:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environment(), **changes},
            stdout=output,
            stderr=output,
        )
    return Engine(ours, process.pid, log, process)


class Engine:
    """Calls to `engine_process.Server`.

    Attributes:
        pid: of the process that serves.
        log: what it and its children print.
    """

    def __init__(
        self, connection: socket.socket, pid: int, log: Path, child: Any | None = None
    ) -> None:
        connection.settimeout(CALL_TIMEOUT_S)
        self.pid = pid
        self.log = log
        self._connection = connection
        self._lines = connection.makefile("rwb")
        self._child = child
        self._pidfd = os.pidfd_open(pid)

    def send(self, call: str, **arguments: Any) -> None:
        """Begin a call."""
        self._lines.write(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")
        self._lines.flush()

    def receive(self) -> Any:
        """End it.

        Raises:
            EngineError: the call raised, or the process ended.
        """
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = b""
        if not line:
            raise EngineError(f"the engine's process ended:\n{self.output()[-8000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n--- output:\n{self.output()[-8000:]}")
        return answer["result"]

    def call(self, call: str, **arguments: Any) -> Any:
        """Call a method of the server."""
        self.send(call, **arguments)
        return self.receive()

    def output(self) -> str:
        """What the process has printed."""
        return self.log.read_text(errors="replace")

    # -- what tests do all the time ----------------------------------------------

    def generate(self, *prompts: list[int], max_tokens: int = 8, salt: str | None = None) -> Answer:
        """Continue prompts. vLLM and kvtier must count the same hits, except in quick engines."""
        result = self.call("generate", prompts=list(prompts), max_tokens=max_tokens, salt=salt)
        hits = {name: int(tokens) for name, tokens in result["hits"].items()}
        tiers = {n.removeprefix("tier:"): v for n, v in hits.items() if n.startswith("tier:") and v}
        source = {n.removeprefix("source:"): v for n, v in hits.items() if n.startswith("source:")}
        assert source.get("p2p", 0) == 0
        return Answer(
            result["tokens"],
            source.get("device", 0),
            source.get("host", 0),
            source.get("disk", 0),
            tiers,
            source.get("external_unspecified", 0),
        )

    def reference(self, *prompts: list[int], max_tokens: int = 8) -> list[list[int]]:
        """Tokens of local prefix-cache hits: prompts are computed, then continued once more."""
        self.generate(*prompts, max_tokens=max_tokens)
        self.quiet()
        hit = self.generate(*prompts, max_tokens=max_tokens)
        assert hit.device > 0, "the reference is a hit of the device's own cache"
        assert hit.host == hit.disk == hit.remote == 0, "the reference comes from the device alone"
        return hit.tokens

    def quiet(self) -> dict[str, float]:
        """Step until all stores have arrived. Nothing of kvtier's may be left in flight then."""
        figures: dict[str, float] = self.call("quiet")
        for name, value in figures.items():
            if name.startswith(("vllm:kvtier_pinned_slots", "vllm:kvtier_jobs_in_flight")):
                assert value == 0, f"{name} = {value} in an engine at rest"
        assert figures.get("vllm:kvtier_internal_errors", 0) == 0
        return figures

    def drop_device(self) -> None:
        """Forget the device's cached blocks."""
        self.quiet()
        assert self.call("reset", connector=False)

    def drop_pool(self) -> None:
        """Forget the device's and the pool's blocks."""
        self.quiet()
        assert self.call("reset", connector=True)
        self.quiet()

    # -- the end ------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait until the process is gone."""
        ended, _, _ = select.select([self._pidfd], [], [], CALL_TIMEOUT_S)
        assert ended, "the engine's process does not end"
        if self._child is not None:
            self._child.wait()

    def stop(self) -> None:
        """Hang up, and wait until the process has ended; once."""
        if self._connection.fileno() < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._connection.close()
        self.wait()
        os.close(self._pidfd)
