"""Beside the calls: which blocks the server removes, how full it is, and what ails it now.

A server publishes the removal of a key if `notify-keyspace-events` says so, each node of a cluster
its own, and only to those who listen then. What is missed costs a failed read.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.errors import KVTierError
from kvtier.tiers.valkey.server import figures_in, nodes_of
from kvtier.tiers.valkey.wire import Wire, command

if TYPE_CHECKING:
    from kvtier.core.types import BlockKey
    from kvtier.tiers.valkey.address import Node
    from kvtier.tiers.valkey.keys import Names
    from kvtier.tiers.valkey.settings import Endpoint

logger = logging.getLogger(__name__)

ROUND_S = 2.0
"""How often figures are asked for, and lost connections made again."""

LOOK_S = 0.5
"""What a connection may take that is made to learn why a call failed."""

DROPPED_MAX = 100_000
"""Removals that wait to be taken; of more, the oldest are forgotten."""

_EVENTS = ("evicted", "expired", "del")

_FIGURES = {
    "used_bytes": "used_memory",
    "capacity_bytes": "maxmemory",
    "evicted_keys": "evicted_keys",
    "expired_keys": "expired_keys",
}


class Watch:
    """See the module. Starts threads that end with `close`.

    Args:
        endpoint: of the server.
        names: of the namespace's keys.
        cluster: whether the server is part of a cluster.
        listen: whether to listen for removals.
    """

    def __init__(self, endpoint: Endpoint, names: Names, *, cluster: bool, listen: bool) -> None:
        self._endpoint = endpoint
        self._names = names
        self._cluster = cluster
        self._listen = listen
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._dropped: dict[BlockKey, None] = {}
        self._figures: dict[str, float] = {}
        self._wires: dict[Node, Wire] = {}
        self._listening: set[Node] = set()
        self._looking = threading.Lock()  # guards what follows, while a look is taken
        self._trouble: KVTierError | None = None
        self._looked_at = float("-inf")
        self._thread = threading.Thread(target=self._rounds, name="kvtier-valkey", daemon=True)
        self._thread.start()

    def take(self) -> list[BlockKey]:
        """Blocks that were removed since the last call, each once."""
        with self._lock:
            taken = list(self._dropped)
            self._dropped.clear()
        return taken

    def figures(self) -> dict[str, float]:
        """What the servers last said, summed up over a cluster."""
        with self._lock:
            return dict(self._figures)

    def trouble(self) -> KVTierError | None:
        """Why a call has just failed: an error of the caller's own; None if the server is well.

        What was known before may not hold any more, so connections are made to see. One look serves
        all calls that failed before it began.
        """
        failed_at = time.monotonic()
        with self._looking:
            if self._looked_at < failed_at:
                self._looked_at = time.monotonic()
                self._trouble = self._look()
            trouble = self._trouble
        return type(trouble)(*trouble.args) if trouble is not None else None

    def listening(self) -> int:
        """How many servers tell of their removals now."""
        with self._lock:
            return len(self._listening)

    def close(self) -> None:
        """End the threads and connections; waits for none of them."""
        self._closing.set()
        with self._lock:
            wires = list(self._wires.values())
        for wire in wires:
            wire.hang_up()

    def _rounds(self) -> None:
        """Body of the first thread."""
        asking: dict[Node, Wire] = {}
        while not self._closing.is_set():
            if not self._try_round(asking):  # over connections that may be older than the server
                self._try_round(asking)
            self._closing.wait(ROUND_S)
        for wire in asking.values():
            wire.close()

    def _look(self) -> KVTierError | None:
        """Log in to every server anew. Returns what the first says that is not well."""
        endpoint = replace(self._endpoint, timeout_s=min(LOOK_S, self._endpoint.timeout_s))
        try:
            first = Wire(endpoint, endpoint.address.node)
            try:
                nodes = nodes_of(first) if self._cluster else []
            finally:
                first.close()
            for node in nodes:
                Wire(endpoint, node).close()
        except KVTierError as error:
            return error.with_traceback(None)
        return None

    def _try_round(self, asking: dict[Node, Wire]) -> bool:
        try:
            self._round(asking)
        except KVTierError as error:
            logger.debug("The valkey tier learns nothing of its server: %s", error)
            for wire in asking.values():
                wire.close()
            asking.clear()
            return False
        return True

    def _round(self, asking: dict[Node, Wire]) -> None:
        """Ask every server once, over connections that are kept.

        Raises:
            KVTierError: one of them does not answer.
        """
        nodes = [self._endpoint.address.node]
        if self._cluster:
            nodes = nodes_of(self._to(nodes[0], asking))
        if self._listen:
            for node in nodes:
                self._begin_listening(node)
        totals: dict[str, float] = {}
        for node in nodes:
            reply = self._to(node, asking).ask("INFO")
            said = figures_in(reply.decode(errors="replace") if isinstance(reply, bytes) else "")
            for name, source in _FIGURES.items():
                if source in said:
                    totals[name] = totals.get(name, 0.0) + said[source]
        with self._lock:
            self._figures = totals

    def _to(self, node: Node, asking: dict[Node, Wire]) -> Wire:
        if node not in asking:
            asking[node] = Wire(self._endpoint, node)
        return asking[node]

    def _begin_listening(self, node: Node) -> None:
        with self._lock:
            if node in self._wires or self._closing.is_set():
                return
        wire = Wire(self._endpoint, node)
        with self._lock:
            if self._closing.is_set():
                wire.close()
                return
            self._wires[node] = wire
        threading.Thread(
            target=self._hear, args=(node, wire), name="kvtier-valkey-events", daemon=True
        ).start()

    def _hear(self, node: Node, wire: Wire) -> None:
        """Body of the thread of one server: until its connection ends."""
        database = self._endpoint.address.database
        channels = [f"__keyevent@{database}__:{event}" for event in _EVENTS]
        try:
            wire.socket.sendall(command("SUBSCRIBE", *channels))
            wire.socket.settimeout(None)
            while True:
                for reply in wire.receive():
                    match reply:
                        case [b"subscribe", _, int(count)] if count == len(_EVENTS):
                            with self._lock:
                                self._listening.add(node)
                        case [b"message", bytes(), bytes(name)]:
                            self._heard(name)
                        case _:
                            pass
        except (OSError, KVTierError) as error:
            logger.debug("Connection for removals ended: %s", error)
        finally:
            with self._lock:
                self._listening.discard(node)
                self._wires.pop(node, None)
            wire.close()

    def _heard(self, name: bytes) -> None:
        key = self._names.block_of(name)
        if key is None:
            return
        with self._lock:
            self._dropped[key] = None
            while len(self._dropped) > DROPPED_MAX:
                del self._dropped[next(iter(self._dropped))]
