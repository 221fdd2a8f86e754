"""What lies in a root, as one process remembers it: some 50 bytes per block.

    Inventory --> Place (a namespace) --> Shelf (one directory of block files): arrays
                                     +--> Store (one directory of segments)

Keys are kept, so that evicting needs no listing. Times are those that were seen last; a reader may
have renewed a file's since, so whoever deletes looks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.tiers.fs.accounts import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

NEVER = -1
"""Time of a directory whose listing cannot be relied on."""


class Shelf:
    """The block files of one directory. Arrays of equal length, one element per file.

    Attributes:
        seen: mtime of the directory before it was listed, ns; `NEVER` if it may have changed in
            the same instant.
        rows: the key's length in one byte, then the key, zero padded. (dtype S)
        mtimes: last uses, ns. (int64)
        pages: sizes in pages. (uint32)
        other_bytes: of temporary files.
    """

    __slots__ = ("mtimes", "other_bytes", "pages", "rows", "seen")

    def __init__(
        self,
        files: Iterable[tuple[bytes, int, int]] = (),
        seen: int = NEVER,
        other_bytes: int = 0,
    ) -> None:
        """Args: files: key, mtime in ns and size in bytes of each."""
        listed = list(files)
        width = 1 + max((len(key) for key, _, _ in listed), default=0)
        self.rows = np.array([bytes((len(key),)) + key for key, _, _ in listed], dtype=f"S{width}")
        self.mtimes = np.array([mtime for _, mtime, _ in listed], dtype=np.int64)
        self.pages = np.array([-(-size // PAGE_BYTES) for _, _, size in listed], dtype=np.uint32)
        self.seen = seen
        self.other_bytes = other_bytes

    def __len__(self) -> int:
        return len(self.mtimes)

    @property
    def nbytes(self) -> int:
        """Bytes on disk, temporary files included."""
        return int(self.pages.sum(dtype=np.int64)) * PAGE_BYTES + self.other_bytes

    def key(self, i: int) -> BlockKey:
        """Key of a file."""
        row: bytes = self.rows[i]
        return BlockKey(row[1 : 1 + row[0]].ljust(row[0], b"\0"))

    def known(self) -> dict[bytes, tuple[int, int]]:
        """Mtime in ns and size in bytes by key."""
        sizes = (self.pages.astype(np.int64) * PAGE_BYTES).tolist()
        pairs = zip(self.mtimes.tolist(), sizes, strict=True)
        return {self.key(i): pair for i, pair in enumerate(pairs)}

    def remove(self, indices: list[int]) -> None:
        """Forget files."""
        self.rows = np.delete(self.rows, indices)
        self.mtimes = np.delete(self.mtimes, indices)
        self.pages = np.delete(self.pages, indices)


@dataclass(slots=True)
class Store:
    """A directory of segments.

    Attributes:
        nbytes: bytes of its segments. Its log is not taken from the capacity.
        last_use: mtime of its log, ns.
        orphaned: nobody held its lock when it was seen.
    """

    nbytes: int
    last_use: int
    orphaned: bool


@dataclass(slots=True)
class Place:
    """One namespace.

    Attributes:
        shelves: by name of the directory, 2 hex digits.
        stores: by id.
        described: mtime of `namespace.json`, ns; 0 if there is none.
        last_held: when somebody was last seen to hold the namespace, ns.
    """

    shelves: dict[str, Shelf] = field(default_factory=dict)
    stores: dict[str, Store] = field(default_factory=dict)
    described: int = 0
    last_held: int = 0

    @property
    def last_use(self) -> int:
        """Time of the last use of anything in it, ns."""
        times = [int(shelf.mtimes.max()) for shelf in self.shelves.values() if len(shelf)]
        times += [store.last_use for store in self.stores.values()]
        return max(self.described, self.last_held, *times)

    @property
    def num_files(self) -> int:
        """Block files in it."""
        return sum(len(shelf) for shelf in self.shelves.values())

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        files = sum(shelf.nbytes for shelf in self.shelves.values())
        return files + sum(store.nbytes for store in self.stores.values())


@dataclass(slots=True)
class Inventory:
    """All of a root.

    Attributes:
        places: by namespace.
        foreign: paths of things that are not kvtier's, as far as they were remembered.
        num_foreign: how many there are.
    """

    places: dict[str, Place] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    num_foreign: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of blocks, stores and temporary files."""
        return sum(place.nbytes for place in self.places.values())

    @property
    def num_files(self) -> int:
        """Block files."""
        return sum(place.num_files for place in self.places.values())


@dataclass(frozen=True, slots=True)
class Victims:
    """Files of one directory that are to go, oldest first.

    Attributes:
        namespace: directory of the namespace.
        shelf: directory of the files.
        indices: positions in the shelf.
    """

    namespace: str
    shelf: str
    indices: list[int]


@dataclass(frozen=True, slots=True)
class VictimStore:
    """A store that is to go."""

    namespace: str
    store: str


def choose_victims(
    inventory: Inventory, dead: set[str], need: int, now: int, orphan_grace: int
) -> list[Victims | VictimStore]:
    """What to delete: dead namespaces first, then by last use over all others, until `need` bytes
    are covered. Stores go whole, and only those that nobody owns.

    Args:
        inventory: what there is.
        dead: namespaces that nobody uses any more.
        need: bytes.
        now: ns, by the clock of the file system. A time in the future counts as now.
        orphan_grace: ns during which a store of a living namespace waits for a new owner.

    Returns:
        In the order of deletion, as good as it can be with one entry per directory.
    """
    chosen: list[Victims | VictimStore] = []
    for in_turn in (True, False):
        if need > 0:
            names = [name for name in inventory.places if (name in dead) == in_turn]
            grace = 0 if in_turn else orphan_grace
            need -= _choose(inventory, names, need, now, grace, chosen)
    return chosen


def _choose(
    inventory: Inventory,
    names: list[str],
    need: int,
    now: int,
    orphan_grace: int,
    chosen: list[Victims | VictimStore],
) -> int:
    """Append victims out of some namespaces; the bytes that they cover."""
    shelves = [(name, *item) for name in names for item in inventory.places[name].shelves.items()]
    stores = [
        (name, store, found)
        for name in names
        for store, found in inventory.places[name].stores.items()
        if found.orphaned and now - found.last_use >= orphan_grace
    ]
    times = [np.minimum(shelf.mtimes, now) for _, _, shelf in shelves]
    sizes = [shelf.pages.astype(np.int64) * PAGE_BYTES for _, _, shelf in shelves]
    times.append(np.array([min(found.last_use, now) for _, _, found in stores], dtype=np.int64))
    sizes.append(np.array([found.nbytes for _, _, found in stores], dtype=np.int64))
    picked = oldest(np.concatenate(times), np.concatenate(sizes), need)
    covered = int(np.concatenate(sizes)[picked].sum())
    starts = np.cumsum([0, *(len(part) for part in times)])
    owners = np.searchsorted(starts, picked, side="right") - 1
    groups: dict[int, list[int]] = {}
    for owner, index in zip(owners.tolist(), picked.tolist(), strict=True):
        groups.setdefault(owner, []).append(index - int(starts[owner]))
    for owner, indices in groups.items():
        if owner < len(shelves):
            chosen.append(Victims(shelves[owner][0], shelves[owner][1], indices))
        else:
            chosen += [VictimStore(stores[i][0], stores[i][1]) for i in indices]
    return covered


def oldest(times: NDArray[np.int64], sizes: NDArray[np.int64], need: int) -> NDArray[np.intp]:
    """Positions of the fewest elements, oldest first, whose sizes add up to `need`; all of them if
    they do not. Elements without a size are left out.
    """
    order = np.argsort(times, kind="stable")
    order = order[sizes[order] > 0]
    count = int(np.searchsorted(np.cumsum(sizes[order]), need)) + 1 if need > 0 else 0
    return order[:count]


def unused_namespaces(inventory: Inventory, now: int, age: int) -> set[str]:
    """Namespaces that were not used or seen to be held for `age` ns."""
    return {
        name
        for name, place in inventory.places.items()
        # the last use of files takes long to find
        if now - max(place.described, place.last_held) > age and now - place.last_use > age
    }
