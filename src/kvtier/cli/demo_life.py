"""The demo's hold on one engine process: start it, give it orders, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvtier.cli.demo_lines import Answer, Done, DropPool, Failed, Generate, Generated, Settle
from kvtier.errors import KVTierError
from kvtier.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvtier.cli.demo_lines import Order, Start

_LOG_LINES: Final = 40
_START_TIMEOUT_S: Final = 300.0
_ORDER_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 30.0
_KILL_AFTER_S: Final = 5.0
_POLL_S: Final = 0.05

_A = TypeVar("_A", bound=Answer)


class DemoError(KVTierError):
    """The demo cannot go on: an engine failed, died or did not answer. Ends with its log."""


@contextmanager
def engine_life(start: Start, log: Path, environment: Mapping[str, str]) -> Iterator[EngineLife]:
    """One engine process, ready when the block begins and gone when it ends.

    It ends in order when the block does, and is killed when the block raises (Ctrl-C included). It
    leads a process group of its own, so that vLLM's processes go with it; and it ends by itself
    when this process is gone.

    Raises:
        DemoError: It did not start, or did not end in order.
    """
    here, there = socket.socketpair()
    life: EngineLife | None = None
    with here:
        try:
            with there, log.open("wb") as output, interrupts_held():
                process = subprocess.Popen(  # noqa: S603  # our own module
                    [sys.executable, "-m", "kvtier.cli.demo_engine", str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[there.fileno()],
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
                life = EngineLife(process, here, log)
            life.start(start)
            yield life
            life.end()
        except BaseException:
            if life is not None:
                life.kill()
            raise


class EngineLife:
    """The engine process as the demo sees it. Every method raises `DemoError` when it fails."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, log: Path
    ) -> None:
        self._process = process
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._log = log

    def start(self, order: Start) -> None:
        """Starts vLLM in the process."""
        self._ask(order, Done, _START_TIMEOUT_S)

    def generate(self, prompt: list[int], tokens: int) -> Generated:
        """Continues a prompt by that many greedy tokens."""
        return self._ask(Generate(prompt, tokens), Generated, _ORDER_TIMEOUT_S)

    def settle(self, timeout_s: float) -> None:
        """Returns when every store and cascade is complete."""
        self._ask(Settle(timeout_s), Done, timeout_s + _ORDER_TIMEOUT_S)

    def drop_pool(self, timeout_s: float) -> None:
        """Empties the device cache and the DRAM pool."""
        self._ask(DropPool(timeout_s), Done, timeout_s + _ORDER_TIMEOUT_S)

    def end(self) -> None:
        """Ends the process in order."""
        self._connection.shutdown(socket.SHUT_WR)
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self._failure(f"the engine did not end within {_END_TIMEOUT_S:.0f} s") from None
        if code:
            raise self._failure(f"the engine process ended with code {code}")

    def kill(self) -> None:
        """Ends the process group: asks first, so that vLLM removes its shared memory."""
        group = self._process.pid
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(group, signal.SIGTERM)
            deadline = time.monotonic() + _KILL_AFTER_S
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(group, 0)
                time.sleep(_POLL_S)
            os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _ask(self, order: Order, expected: type[_A], timeout_s: float) -> _A:
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(msgspec.json.encode(order) + b"\n")
            line = self._answers.readline()
        except TimeoutError:
            raise self._failure(f"the engine did not answer within {timeout_s:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            raise self._failure("the engine process ended")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise self._failure(answer.reason)
        assert isinstance(answer, expected), f"{order} was answered with {answer}"
        return answer

    def _failure(self, reason: str) -> DemoError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return DemoError("\n".join([reason, f"The last lines of {self._log}:", *lines]))
