"""One object per block: `<prefix>/<namespace>/<2 hex>/<key hex>`.

Header and row go to the client as they lie, in two buffers that it sends one after the other; what
it receives is its own memory and is copied into the row once, without the GIL. A put is one
request whatever the size: it publishes all or nothing, which several parts do in three requests
and leave behind if their writer is killed; blocks of a job go side by side anyway. Blocks are
verified by their header, so neither ETags nor checksums of the store are looked at. A put that was
given up may read its buffers for a moment longer: what the store gets then does not verify.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import KVTierError, MissingBlockError, TierError
from kvtier.tiers.object.beliefs import Beliefs
from kvtier.tiers.object.existence import Existence, path_of
from kvtier.tiers.object.faults import CLIENT_ERRORS, status_of
from kvtier.tiers.object.parallel import Parallel
from kvtier.tiers.object.settings import capacity_of
from kvtier.tiers.object.sweeper import Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.object.settings import ObjectSettings
    from kvtier.tiers.object.store import AnyStore, ObjectStore

NAMESPACE_FILE = "namespace.json"

_PUT_ATTEMPTS = 3
"""Servers over a file system remove a directory with its last object; a put at that moment finds
nothing to put into."""


class ObjectTier:
    """Keeps blocks as objects; any number of processes may share the prefix.

    Args:
        store: client and place.
        namespace: hex digest under which the blocks are shared.
        description: written to `namespace.json` unless that exists; must hold no secret.
        settings: for threads and beliefs.
        clock: seconds, monotonic.

    Raises:
        KVTierError: the store cannot be reached, or refuses.
    """

    def __init__(
        self,
        store: ObjectStore,
        namespace: str,
        description: Mapping[str, object],
        settings: ObjectSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._directory = namespace
        self._clock = clock
        self._lock = threading.Lock()  # guards the counts
        self._gets = self._puts = self._deletes = 0
        self._describe(description)
        self._beliefs = Beliefs(settings.present_ttl_s, settings.absent_ttl_s, clock)
        self._lookups = Parallel(settings.lookups_in_flight, "kvtier-object-lookup")
        self._blocks = Parallel(settings.threads, "kvtier-object-block")
        self._existence = Existence(store, namespace, self._beliefs, self._lookups, clock)
        self._evicted: list[BlockKey] = []
        self._sweeper: Sweeper | None = None
        capacity = capacity_of(settings, "object")
        if capacity is not None:
            self._sweeper = Sweeper(store, capacity, self._forget, self._blocks, clock)
            self._sweeper.start()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is there, see `Existence`.

        Raises:
            KVTierError: the store failed; that is not the same as absent.
        """
        return self._existence.exists(keys)

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Get the object and copy it into `into`. An object of another length is deleted.

        Raises:
            MissingBlockError: there is no such object, or it is not exactly as long as `into`.
            KVTierError: the store failed.
        """
        wanted = sum(view.nbytes for view in into)
        asked_at = self._clock()
        with self._lock:
            self._gets += 1
        try:
            path = path_of(self._directory, key)
            # one byte more than the block shows an object that is too long
            got = self._store.ask(
                "reading a block",
                lambda client: obstore.get_range(client, path, start=0, length=wanted + 1),
            )
        except MissingBlockError:
            self._beliefs.learn(key, False, asked_at)
            raise
        if len(got) != wanted:
            with contextlib.suppress(KVTierError):
                self.delete(key)
            raise MissingBlockError(
                f"{self._store.place.url}: the object of {key.hex()} is not a block of {wanted} "
                f"bytes and was removed"
            )
        source = np.frombuffer(memoryview(got), np.uint8)
        start = 0
        for view in into:
            # unlike the assignment of a memoryview slice, this releases the GIL
            np.copyto(np.frombuffer(view, np.uint8), source[start : start + view.nbytes])
            start += view.nbytes

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Put the block as one object.

        Raises:
            KVTierError: the store failed; TierFullError if it has no room.
        """
        buffers = [view for view in data if view.nbytes]
        for _ in range(_PUT_ATTEMPTS - 1):
            with contextlib.suppress(MissingBlockError):
                self._put(key, buffers)
                break
        else:
            with _never_missing():
                self._put(key, buffers)
        self._beliefs.learn(key, True, self._clock())

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """Read several blocks side by side."""
        pairs = list(zip(keys, into, strict=True))
        return self._blocks.run(lambda pair: self.read(*pair), pairs)

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """Write several blocks side by side."""
        pairs = list(zip(keys, data, strict=True))
        return self._blocks.run(lambda pair: self.write(*pair), pairs)

    def delete(self, key: BlockKey) -> None:
        """Delete the object; absent is fine.

        Raises:
            KVTierError: the store failed.
        """
        with self._lock:
            self._deletes += 1
        path = path_of(self._directory, key)
        with contextlib.suppress(MissingBlockError):
            self._store.ask("deleting a block", lambda client: obstore.delete(client, path))
        self._beliefs.learn(key, False, self._clock())

    def take_dropped(self) -> list[BlockKey]:
        """Keys of this namespace that this process evicted since the last call. What another
        process evicts costs a failed read, or is asked for again when its belief ends.
        """
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def figures(self) -> dict[str, float]:
        """Totals since the namespace was opened: requests by kind, keys that lookups asked for, and
        how many of those were answered without a request.
        """
        trips = self._existence.trips
        figures: dict[str, float] = {
            "round_trips": self._gets + self._puts + self._deletes + trips.heads + trips.pages,
            "get_round_trips": self._gets,
            "put_round_trips": self._puts,
            "delete_round_trips": self._deletes,
            "head_round_trips": trips.heads,
            "list_round_trips": trips.pages,
            "surveys": trips.surveys,
            "looked_up_blocks": trips.asked_keys,
            "believed_blocks": trips.believed_keys,
            "beliefs": len(self._beliefs),
        }
        if self._sweeper is not None:
            swept = self._sweeper.swept
            figures["sweeps"] = swept.sweeps
            figures["sweep_failures"] = swept.failures
            figures["sweep_pages"] = swept.pages
            figures["evicted_blocks"] = swept.evicted_blocks
            if swept.holds:
                figures["used_bytes"] = swept.used_bytes
        return figures

    def close(self) -> None:
        """End the threads; objects stay where they are."""
        if self._sweeper is not None:
            self._sweeper.close()
        self._lookups.close()
        self._blocks.close()

    def _forget(self, namespace: str, key: BlockKey) -> None:
        """A block was evicted by this process."""
        if namespace == self._directory:
            self._beliefs.learn(key, False, self._clock())
            with self._lock:
                self._evicted.append(key)

    def _put(self, key: BlockKey, buffers: Buffers) -> None:
        with self._lock:
            self._puts += 1
        path = path_of(self._directory, key)
        self._store.ask(
            "writing a block",
            lambda client: obstore.put(client, path, buffers, use_multipart=False),
        )

    def _describe(self, description: Mapping[str, object]) -> None:
        """Write `namespace.json`, unless somebody has. A server that ignores the condition replaces
        it, by the same content: the namespace is its digest.
        """
        text = json.dumps(dict(description), indent=2, sort_keys=True) + "\n"
        path = f"{self._directory}/{NAMESPACE_FILE}"

        def put_first(client: AnyStore) -> None:
            try:
                obstore.put(client, path, text.encode(), mode="create")
            except AlreadyExistsError:
                return
            except CLIENT_ERRORS as error:
                status = status_of(error)
                if status == HTTPStatus.CONFLICT:  # somebody else writes it at this moment
                    return
                if status != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                obstore.put(client, path, text.encode())

        with _never_missing():
            self._store.ask("describing the namespace", put_first)


@contextlib.contextmanager
def _never_missing() -> Iterator[None]:
    """No object can be missing where one is put: then it is the bucket."""
    try:
        yield
    except MissingBlockError as error:
        message = f"{error}: is the bucket there, and the endpoint a store's?"
        raise TierError(message) from None
