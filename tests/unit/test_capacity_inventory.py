from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.fs.inventory import (
    Inventory,
    Place,
    Shelf,
    Store,
    Victims,
    VictimStore,
    choose_victims,
    oldest,
    unused_namespaces,
)

PAGE = 4096
NOW = 10**18
HOUR = 3600 * 10**9

keys = st.binary(min_size=2, max_size=40)
entries = st.dictionaries(keys, st.tuples(st.integers(0, NOW), st.integers(0, 9 * PAGE)))


@given(entries)
def test_a_shelf_remembers_what_it_is_given(files: dict[bytes, tuple[int, int]]) -> None:
    shelf = Shelf([(key, *rest) for key, rest in files.items()])
    pages = {key: (mtime, -(-size // PAGE) * PAGE) for key, (mtime, size) in files.items()}
    assert shelf.known() == pages
    assert [shelf.key(i) for i in range(len(shelf))] == list(files)
    assert shelf.nbytes == sum(size for _, size in pages.values())


@given(entries, st.data())
def test_a_shelf_forgets(files: dict[bytes, tuple[int, int]], data: st.DataObject) -> None:
    shelf = Shelf([(key, *rest) for key, rest in files.items()])
    gone = data.draw(st.sets(st.sampled_from(range(len(files)))) if files else st.just(set()))
    shelf.remove(sorted(gone))
    assert list(shelf.known()) == [key for i, key in enumerate(files) if i not in gone]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=30), st.integers(0, 99))
def test_the_fewest_of_the_oldest(files: list[tuple[int, int]], need: int) -> None:
    picked = oldest(
        np.array([time for time, _ in files], dtype=np.int64),
        np.array([size for _, size in files], dtype=np.int64),
        need,
    ).tolist()
    naive: list[int] = []
    for i in sorted(range(len(files)), key=lambda i: files[i][0]):
        if files[i][1] and sum(files[j][1] for j in naive) < need:
            naive.append(i)
    assert picked == naive


def place(*mtimes: int, **fields: int) -> Place:
    """A namespace with one page per file, spread over two directories."""
    shelves = {}
    for i in range(2):
        names = [(bytes((i, j)) * 4, mtime, PAGE) for j, mtime in enumerate(mtimes) if j % 2 == i]
        shelves[f"00{i}"] = Shelf(names)
    return Place(shelves=shelves, **fields)


def chosen(inventory: Inventory, dead: set[str], need: int, grace: int = 0) -> list[object]:
    """Mtimes of files and ids of stores, in the order in which they are chosen."""
    found: list[object] = []
    for victim in choose_victims(inventory, dead, need, NOW, grace):
        if isinstance(victim, VictimStore):
            found.append(victim.store)
        else:
            assert isinstance(victim, Victims)
            shelf = inventory.places[victim.namespace].shelves[victim.shelf]
            found += shelf.mtimes[victim.indices].tolist()
    return found


def test_the_dead_go_first_whatever_their_age() -> None:
    inventory = Inventory({"a": place(1, 2, 3, 4), "b": place(5, 6, 7, 8)})
    assert sorted(chosen(inventory, {"b"}, 3 * PAGE)) == [5, 6, 7]
    assert sorted(chosen(inventory, {"b"}, 6 * PAGE)) == [1, 2, 5, 6, 7, 8]
    assert sorted(chosen(inventory, set(), 3 * PAGE)) == [1, 2, 3]


def test_nothing_is_chosen_without_need() -> None:
    assert chosen(Inventory({"a": place(1, 2)}), {"a"}, 0) == []
    assert chosen(Inventory(), set(), PAGE) == []


def test_times_in_the_future_count_as_now() -> None:
    # clocks that differ by minutes must not make blocks immortal
    inventory = Inventory({"a": place(NOW + 300 * 10**9, NOW - 1, NOW + 1, NOW - 2)})
    assert sorted(chosen(inventory, set(), 2 * PAGE)) == [NOW - 2, NOW - 1]
    assert len(chosen(inventory, set(), 4 * PAGE)) == 4


def test_a_store_goes_whole_when_nobody_owns_it_and_nobody_came_for_it() -> None:
    inventory = Inventory({"a": place(5, 6)})
    stores = inventory.places["a"].stores
    stores["owned"] = Store(9 * PAGE, 0, False)
    stores["orphan"] = Store(9 * PAGE, NOW - HOUR, True)
    assert chosen(inventory, set(), 3 * PAGE, grace=HOUR + 1) == [5, 6]
    assert sorted(map(str, chosen(inventory, set(), 3 * PAGE, grace=HOUR))) == ["5", "6", "orphan"]
    assert "owned" not in chosen(inventory, {"a"}, 99 * PAGE)


def test_a_namespace_is_unused_once_nothing_in_it_was_used_for_long() -> None:
    old = NOW - 2 * HOUR
    inventory = Inventory(
        {
            "old": place(old, described=old),
            "described": place(old, described=NOW),
            "held": place(old, last_held=NOW),
            "used": place(old, NOW, described=old),
            "empty": Place(described=old),
        }
    )
    assert unused_namespaces(inventory, NOW, HOUR) == {"old", "empty"}
