"""A tier in an I/O process that its test scripts: every call asks the test first.

`type` in the settings is `remote_tier:RemoteTierType`; its option is the address of a `Remote`, at
which a `FaultyTier` of the test says what goes wrong. Calls that are asked for beside those of a
tier: `import`, when the module is loaded, `open`, and `report`, before anything is reported.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import msgspec

from kvtier.testing.faults import FaultyTier, Hang
from kvtier.tiers.memory import MemoryTier

ADDRESS = "KVTIER_TEST_REMOTE"


class Remote:
    """The test's side.

    Attributes:
        pids: of the processes that asked something, in order, each once.
    """

    def __init__(self, address: str, script: FaultyTier) -> None:
        self.pids: list[int] = []
        self._script = script
        self._listener = Listener(address, "AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                pid, operation = connection.recv()
                if pid not in self.pids:
                    self.pids.append(pid)
                try:
                    faults = self._script._begin(operation)
                except BaseException as error:
                    connection.send(error)
                else:
                    connection.send([each for each in faults if not isinstance(each, Hang)])
        except (EOFError, OSError):
            return


_connections = threading.local()


def ask(operation: str) -> list[Any]:
    """What the test has in mind for a call."""
    if not hasattr(_connections, "mine"):
        _connections.mine = Client(os.environ[ADDRESS], "AF_UNIX")
    _connections.mine.send((os.getpid(), operation))
    answer = _connections.mine.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


class RemoteTier(FaultyTier):
    def _begin(self, operation: Any) -> list[Any]:
        return ask(operation)


class RemoteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    threads: int = 4
    says: str = ""


class RemoteTierType:
    settings_type = RemoteSettings
    default_name = "remote"
    medium = "STORAGE"
    locality = "LOCAL"

    def __init__(self) -> None:
        self._kept = MemoryTier()  # the same for every namespace

    def num_threads(self, settings: RemoteSettings) -> int:
        return settings.threads

    def preflight(self, settings: RemoteSettings, setting: str) -> None:
        pass

    def open(
        self, settings: RemoteSettings, namespace: str, facts: Mapping[str, object]
    ) -> RemoteTier:
        if settings.says:
            logging.getLogger("of.the.tier").warning("%s: %s", settings.says, facts.get("who"))
            logging.getLogger("of.the.tier").debug("nobody wants to know")
        ask("open")
        return RemoteTier(self._kept)


def _ask_before_reports() -> None:
    server = sys.modules["__main__"].Server
    news_of = server._news_of

    def asked(self: Any, finished: list[Any]) -> Any:
        if finished:
            ask("report")
        return news_of(self, finished)

    server._news_of = asked


if ADDRESS in os.environ and hasattr(sys.modules["__main__"], "Server"):
    ask("import")
    _ask_before_reports()
