"""How the processes of one engine come to share one region.

The first worker makes it and listens on an abstract socket, named after the engine; the others,
and the scheduler last, connect and receive its descriptor. An abstract name belongs to a process,
not to a file system: it ends with that process, so nothing is left behind by a kill at any moment.
The socket is closed as soon as everyone has come. Anybody may bind or reach an abstract name, so
both sides check that the other one belongs to the same user. A message is one line of JSON.

The scheduler also learns what only workers know: the layout and the facts of the namespace.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.errors import RegionError
from kvtier.region.memory import Geometry, Region

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 16  # facts may be longer than any datagram may be
_NAME_MAX = 64  # a longer name is replaced by its digest: all of it has to count
_CREDENTIALS = struct.Struct("3i")
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker brings. All workers of an engine must bring the same, but for the rank.

    Attributes:
        geometry: shape of the region.
        facts: JSON-able facts for the scheduler.
        rank: of this worker, `0 <= rank < geometry.num_ranks`.
    """

    geometry: Geometry
    facts: Mapping[str, object]
    rank: int

    def agreement(self) -> str:
        """Digest of what has to be equal on all ranks."""
        shape = (self.geometry.num_slots, self.geometry.row_bytes, self.geometry.num_ranks)
        text = json.dumps([shape, self.facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def share(engine_id: str, offer: Offer, timeout_s: float = JOIN_TIMEOUT_S) -> Region:
    """A worker's region: made, if this is the first worker, else joined.

    Returns at once for the first one; a thread of it waits for the others.

    Raises:
        RegionError: no memory, another engine of this name, or workers that disagree.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(engine_id))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise RegionError(f"cannot listen for the workers of {engine_id}: {error}") from error
        return _ask(engine_id, {"rank": offer.rank, "offer": offer.agreement()}, timeout_s)[0]
    try:
        region = Region.create(offer.geometry)
    except RegionError:
        listener.close()
        raise
    listener.listen(offer.geometry.num_ranks + 1)
    host = _Host(engine_id, listener, region, offer)
    threading.Thread(target=host.serve, name="kvtier-rendezvous", daemon=True).start()
    return region


def join(engine_id: str, timeout_s: float = JOIN_TIMEOUT_S) -> tuple[Region, dict[str, object]]:
    """The scheduler's region, and the facts of the workers.

    Raises:
        RegionError: not every worker shares memory with this process within `timeout_s`.
    """
    region, reply = _ask(engine_id, {"scheduler": True}, timeout_s)
    facts = reply["facts"]
    assert isinstance(facts, dict), "the host always sends facts"
    return region, facts


class _Host:
    """The first worker's side. Serves until every rank and the scheduler have the region."""

    def __init__(
        self, engine_id: str, listener: socket.socket, region: Region, offer: Offer
    ) -> None:
        self._engine_id = engine_id
        self._listener = listener
        self._fd = os.dup(region.fd)  # the region may be closed before the last one has come
        self._offer = offer
        self._wanted = offer.geometry.num_ranks
        self._ranks = {offer.rank}
        self._scheduler: socket.socket | None = None

    def serve(self) -> None:
        """Hand out the region; ends by itself."""
        try:
            with self._listener:
                while len(self._ranks) < self._wanted or self._scheduler is None:
                    peer, _ = self._listener.accept()
                    self._welcome(peer)
                    if self._scheduler is not None and len(self._ranks) == self._wanted:
                        _send(self._scheduler, {"facts": self._offer.facts}, self._fd)
                        self._scheduler.close()
        except OSError as error:
            log.warning("Sharing the CPU pool of %s ended early: %s", self._engine_id, error)
        finally:
            os.close(self._fd)

    def _welcome(self, peer: socket.socket) -> None:
        if _user_of(peer) != os.geteuid():
            peer.close()
            return
        peer.settimeout(JOIN_TIMEOUT_S)
        try:
            request = json.loads(_receive(peer)[0])
            if request.get("scheduler"):
                self._scheduler = peer  # answered once every rank is here
                return
            rank = int(request["rank"])
            if rank in self._ranks:
                _send(peer, {"error": f"another engine called {self._engine_id} is starting here"})
            elif request["offer"] != self._offer.agreement() or not 0 <= rank < self._wanted:
                _send(peer, {"error": f"rank {rank} has another KV cache than the first worker"})
            else:
                _send(peer, {"facts": self._offer.facts}, self._fd)
                self._ranks.add(rank)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("A process failed to join the CPU pool: %s", error)
        if peer is not self._scheduler:
            peer.close()


def _ask(
    engine_id: str, request: dict[str, object], timeout_s: float
) -> tuple[Region, dict[str, object]]:
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer.connect(_address(engine_id))
                if (uid := _user_of(peer)) != os.geteuid():
                    raise RegionError(
                        f"user {uid} listens in the name of engine {engine_id}: its memory is not "
                        "trusted; use another engine_id, or stop that process"
                    )
                _send(peer, request)
                data, fds = _receive(peer)
            except (ConnectionError, BlockingIOError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise RegionError(
                        f"not all workers of engine {engine_id} shared their memory within "
                        f"{timeout_s:g} s: all ranks of an engine must run on one host, in one "
                        f"network namespace, as one user ({error})"
                    ) from error
                time.sleep(0.005)  # the first worker has not begun to listen yet
                continue
        if not data:
            raise RegionError(
                f"engine {engine_id} gave this process no memory: its first worker ended, or "
                "runs as another user"
            )
        reply = json.loads(data)
        if "error" in reply:
            raise RegionError(str(reply["error"]))
        if not fds:
            raise RegionError(
                f"the memory of engine {engine_id} did not arrive: too many open files here?"
            )
        return Region.from_fd(fds[0]), reply


def _send(peer: socket.socket, message: Mapping[str, object], fd: int | None = None) -> None:
    data = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(peer, [data], [] if fd is None else [fd])
    if sent < len(data):
        peer.sendall(data[sent:])


def _receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    """One message, empty if the peer ended before all of it came, and its descriptors."""
    data, fds, _, _ = socket.recv_fds(peer, _PIECE_BYTES, 1)
    pieces = [data]
    while pieces[-1] and not pieces[-1].endswith(b"\n"):
        pieces.append(peer.recv(_PIECE_BYTES))
    return (b"".join(pieces) if pieces[-1] else b""), fds


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _address(engine_id: str) -> bytes:
    name = engine_id.encode()
    if len(name) > _NAME_MAX:
        name = hashlib.sha256(name).hexdigest().encode()
    return b"\0kvtier/" + str(os.geteuid()).encode() + b"/" + name
