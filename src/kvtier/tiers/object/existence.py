"""Which of thousands of keys exist, in few round trips.

1. What is believed needs none.
2. A few unknown keys are asked for one by one, `HEAD`s side by side.
3. For many, the namespace is surveyed: the first page of a listing (1,000 keys) is the whole of a
   small namespace, and tells how large any other is, since keys are hashes: if they begin
   with 00 to 0f, there are 16 times as many. If the rest of the listing is cheaper than the
   `HEAD`s it is read in parts side by side; else the estimate is kept for a minute.

Lookups that arrive during a survey wait for it, so a long prompt that comes in many calls makes
one.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore

from kvtier.core.types import BlockKey
from kvtier.errors import MissingBlockError
from kvtier.tiers.object.beliefs import MAX_BELIEFS, Beliefs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tiers.object.parallel import Parallel
    from kvtier.tiers.object.store import AnyStore, ObjectStore

PAGE_KEYS = 1000
"""Keys of one answer to a listing, in every store."""

SURVEY_FROM = 32
"""Fewer unknown keys are not worth the page."""

HEADS_PER_PAGE = 10
"""What a page of a listing may cost: about ten times as much time as a `HEAD`, and on AWS twelve
times as much money."""

_ESTIMATE_TTL_S = 60.0
_PARTS_MAX = 256
_MARGIN = 1.25  # parts are not equally long


@dataclass(slots=True)
class Trips:
    """Requests so far, by kind."""

    heads: int = 0
    pages: int = 0
    surveys: int = 0
    asked_keys: int = 0
    believed_keys: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """A share of a listing: keys with `first <= first byte < end`."""

    first: int
    end: int


class Existence:
    """Answers for the objects below `directory`. Thread safe.

    Args:
        store: client and place.
        directory: of the namespace, in the client's paths.
        beliefs: of the namespace; the tier adds what it writes, reads and deletes.
        parallel: runs the requests.
        clock: seconds, monotonic; the same as that of `beliefs`.

    Attributes:
        trips: may be read at any time.
    """

    def __init__(
        self,
        store: ObjectStore,
        directory: str,
        beliefs: Beliefs,
        parallel: Parallel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trips = Trips()
        self._store = store
        self._directory = directory
        self._beliefs = beliefs
        self._parallel = parallel
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows, and the counts of `trips`
        self._survey_ended: threading.Event | None = None
        self._wanted = 0  # unknown keys of all lookups that a survey may serve
        self._estimate = 0.0
        self._estimated_at = float("-inf")

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is there, in order.

        Raises:
            KVTierError: the store failed.
        """
        answers = self._beliefs.answers(keys)
        unknown = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        with self._lock:
            self.trips.asked_keys += len(keys)
            self.trips.believed_keys += len(keys) - len(unknown)
        if not unknown:
            return [answer is True for answer in answers]
        if len(unknown) >= SURVEY_FROM:
            self._survey_with_others(len(unknown))
            answers = self._beliefs.answers(keys)
            unknown = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        heads = self._parallel.run(self._head, unknown, stop_at_error=True)
        found = dict(zip(unknown, heads, strict=True))
        return [found.get(key, answer) is True for key, answer in zip(keys, answers, strict=True)]

    def list_part(self, first: int = 0, end: int = _PARTS_MAX) -> list[BlockKey]:
        """The keys whose first byte is in `[first, end)`, by listing.

        Raises:
            KVTierError: the store failed.
        """
        return self._list(_Part(first, end))

    def _head(self, key: BlockKey) -> bool:
        asked_at = self._clock()
        with self._lock:
            self.trips.heads += 1
        try:
            path = path_of(self._directory, key)
            self._store.ask("asking for a block", lambda client: obstore.head(client, path))
            there = True
        except MissingBlockError:
            there = False
        self._beliefs.learn(key, there, asked_at)
        return there

    def _survey_with_others(self, wanted: int) -> None:
        """Lead a survey, or wait for the one that runs."""
        with self._lock:
            self._wanted += wanted
            ended = self._survey_ended
            leads = ended is None
            if ended is None:
                ended = self._survey_ended = threading.Event()
        try:
            if leads:
                self._survey()
            else:
                ended.wait()
        finally:
            with self._lock:
                self._wanted -= wanted
                if leads:
                    self._survey_ended = None
            if leads:
                ended.set()

    def _survey(self) -> None:
        """List the namespace if that is cheaper than what is wanted; else learn its size."""
        started_at = self._clock()
        fresh = started_at - self._estimated_at < _ESTIMATE_TTL_S
        if fresh and not self._pays(self._estimate):
            return
        with self._lock:
            self.trips.surveys += 1
        page, is_all = self._first_page()
        if is_all:
            self._estimate, self._estimated_at = float(len(page)), started_at
            self._beliefs.learn_all(page, started_at)
            return
        seen = int.from_bytes(page[-1][:8].ljust(8, b"\0"), "big") + 1
        self._estimate, self._estimated_at = len(page) * 2.0**64 / seen, started_at
        self._beliefs.learn_present(page, started_at)
        if not self._pays(self._estimate):
            return
        parts = self._parts(self._estimate, first=page[-1][0])
        listed = self._parallel.run(self._list, parts, stop_at_error=True)
        keys = [key for part in listed if isinstance(part, list) for key in part]
        self._beliefs.learn_all([*page, *keys], started_at)

    def _pays(self, estimate: float) -> bool:
        pages = max(_MARGIN * estimate / PAGE_KEYS, len(self._parts(estimate)))
        return pages * HEADS_PER_PAGE <= self._wanted and estimate * _MARGIN <= MAX_BELIEFS

    def _parts(self, estimate: float, first: int = 0) -> list[_Part]:
        """Shares of about one page each of the keys that begin with `first` or more; or their
        directories, if the store can only begin a listing at the start of one.
        """
        width = _PARTS_MAX - first
        count = width
        if self._store.place.scheme == "s3":
            share = estimate * width / _PARTS_MAX
            count = min(width, int(_MARGIN * share / PAGE_KEYS) + 1)
        bounds = [first + i * width // count for i in range(count + 1)]
        return [_Part(first, end) for first, end in itertools.pairwise(bounds)]

    def _first_page(self) -> tuple[list[BlockKey], bool]:
        """The keys of the first page, sorted, and whether they are all."""
        with self._lock:
            self.trips.pages += 1
        page = self._store.ask(
            "listing blocks",
            lambda client: next(obstore.list(client, self._directory, chunk_size=PAGE_KEYS), []),
        )
        keys = [key for entry in page if (key := key_of(entry["path"])) is not None]
        return sorted(keys), len(page) < PAGE_KEYS

    def _list(self, part: _Part) -> list[BlockKey]:
        directory, offset = self._directory, None
        if part.end - part.first == 1:
            directory = f"{self._directory}/{part.first:02x}"
        elif part.first:
            # 'g' comes behind all hex digits; a bare directory is no offset to every server
            offset = f"{self._directory}/{part.first - 1:02x}/g"

        def read_pages(client: AnyStore) -> list[BlockKey]:
            keys: list[BlockKey] = []
            for page in obstore.list(client, directory, offset=offset, chunk_size=PAGE_KEYS):
                with self._lock:
                    self.trips.pages += 1
                found = [key for entry in page if (key := key_of(entry["path"])) is not None]
                keys += [key for key in found if part.first <= key[0] < part.end]
                if found and found[-1][0] >= part.end:
                    break
            return keys

        return self._store.ask("listing blocks", read_pages)


def path_of(directory: str, key: BlockKey) -> str:
    """Path of a block."""
    name = key.hex()
    return f"{directory}/{name[:2]}/{name}"


def key_of(path: str) -> BlockKey | None:
    """The key of a block from its path; None if the object is no block."""
    name = path.rpartition("/")[2]
    try:
        key = BlockKey(bytes.fromhex(name))
    except ValueError:
        return None
    is_block = bool(key) and path.endswith(f"/{name[:2]}/{name}") and key.hex() == name
    return key if is_block else None
