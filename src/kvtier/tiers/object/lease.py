"""One holder among all processes that use a prefix, by one object and conditional puts.

    <prefix>/.kvtier-sweeper      {"owner": random, "turn": n, "free": false}

1. The holder replaces the object every so often, on the condition that it is still its own.
2. Whoever sees the same object for `lease_s` of its own clock may replace it, on the condition that
   it is still that one. Clocks of hosts are never compared.
3. A holder that could not renew for `lease_s` is none any more, whatever the object says.

A server that ignores conditions may let two take the object in the same moment; each looks at it
again before it acts, so at most one goes on. What a holder does must be harmless if done twice.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from kvtier.tiers.object.faults import CLIENT_ERRORS, status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore import PutMode, UpdateVersion

    from kvtier.tiers.object.store import AnyStore, ObjectStore

LEASE_FILE = ".kvtier-sweeper"

_MOVED_ON = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)


class _Note(msgspec.Struct, frozen=True):
    """Content of the object. `turn` makes each one differ, and with it its ETag."""

    owner: str
    turn: int
    free: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """An object as it was read."""

    note: _Note | None  # None if it is not ours to understand
    version: UpdateVersion


class Lease:
    """See the module. Used by one thread.

    Args:
        store: client and place.
        lease_s: how long a holder may be silent.
        clock: seconds, monotonic.
    """

    def __init__(self, store: ObjectStore, lease_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._owner = secrets.token_hex(16)
        self._turn = 0
        self._held_until = float("-inf")
        self._watched: UpdateVersion | None = None
        self._watched_since = 0.0

    def is_held(self) -> bool:
        """Whether it is ours, without asking the store."""
        return self._clock() < self._held_until

    def hold(self) -> bool:
        """Take it or renew it if that is possible now; whether it is ours.

        Raises:
            KVTierError: the store failed.
        """
        asked_at = self._clock()
        seen = self._store.ask("reading the lease", self._read)
        if self._is_ours(seen):
            taken = seen is not None and self._put(seen.version)
        else:
            taken = self._may_take(seen, asked_at) and self._put(seen.version if seen else None)
            # a server that ignores the condition let the last of several have it
            taken = taken and self._is_ours(self._store.ask("reading the lease", self._read))
        self._held_until = asked_at + self._lease_s if taken else float("-inf")
        return taken

    def release(self) -> None:
        """Let somebody else take it at once.

        Raises:
            KVTierError: the store failed; then it runs out by itself.
        """
        if not self.is_held():
            return
        self._held_until = float("-inf")
        seen = self._store.ask("reading the lease", self._read)
        if seen is not None and self._is_ours(seen):
            self._put(seen.version, free=True)

    def _is_ours(self, seen: _Seen | None) -> bool:
        if seen is None or seen.note is None:
            return False
        return seen.note.owner == self._owner and not seen.note.free

    def _may_take(self, seen: _Seen | None, now: float) -> bool:
        """Whether nobody holds it, as far as can be known."""
        if seen is None or (seen.note is not None and seen.note.free):
            return True
        if seen.version != self._watched:
            self._watched, self._watched_since = seen.version, now
        return now - self._watched_since >= self._lease_s

    @staticmethod
    def _read(client: AnyStore) -> _Seen | None:
        try:
            found = obstore.get(client, LEASE_FILE)
        except FileNotFoundError as error:
            if status_of(error) == HTTPStatus.NOT_FOUND and "NoSuchBucket" not in str(error):
                return None
            raise
        version: UpdateVersion = {}
        if e_tag := found.meta["e_tag"]:
            version["e_tag"] = e_tag
        if number := found.meta["version"]:
            version["version"] = number
        try:
            note = msgspec.json.decode(memoryview(found.bytes()), type=_Note)
        except msgspec.MsgspecError:
            note = None
        return _Seen(note, version)

    def _put(self, replaces: UpdateVersion | None, free: bool = False) -> bool:
        """Put a new note in place of what was seen; False if somebody else was faster."""
        self._turn += 1
        content = msgspec.json.encode(_Note(self._owner, self._turn, free))
        mode: PutMode = "create" if replaces is None else replaces

        def put(client: AnyStore) -> bool:
            try:
                obstore.put(client, LEASE_FILE, content, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return False
            except CLIENT_ERRORS as error:
                status = status_of(error)
                if status in _MOVED_ON:
                    return False
                if status != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                obstore.put(client, LEASE_FILE, content)
            return True

        return self._store.ask("taking the lease", put)
