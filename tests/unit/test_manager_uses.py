"""What counts as a use for the eviction policy."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.core.policies.lru import LRU
from kvtier.core.types import BlockKey
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, World


class UseCounts(LRU):
    """Counts as the policies do that tell one use from many: all but a key's first `add`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.uses: Counter[BlockKey] = Counter()
        self.added: set[BlockKey] = set()

    def add(self, key: BlockKey) -> None:
        super().add(key)
        self.uses[key] += key in self.added
        self.added.add(key)

    def use(self, key: BlockKey) -> None:
        super().use(key)
        self.uses[key] += key in self

    def of(self, *blocks: int) -> list[int]:
        return [self.uses[key_of(i)] for i in blocks]


def finished(world: World, name: str) -> None:
    world.step()
    world.step()
    world.manager.finish_request(name)


def test_a_store_its_cascade_and_the_end_of_its_request_are_no_use() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.open("a", range(3))
    world.store("a", range(3))
    finished(world, "a")
    assert policy.of(0, 1, 2) == [0, 0, 0]
    world.whole()


def test_a_load_is_one_use() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.store("?", range(3))
    finished(world, "?")
    world.open("a", range(2))
    world.load("a", world.until_answered("a"))
    world.loaded("a")
    assert policy.of(0, 1, 2) == [1, 1, 0]


def test_a_promotion_and_its_load_are_no_use_of_it_and_one_of_what_was_there() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.store("?", range(2))
    world.fill(T0, range(4))
    world.step()
    world.open("a", range(4))
    assert world.until_answered("a") == 4
    world.load("a", 4)
    world.loaded("a")
    assert policy.of(0, 1, 2, 3) == [1, 1, 0, 0], "holds count once with their loads"


@pytest.mark.parametrize("writing", [1, 4])
def test_what_is_there_when_a_request_stores_is_used_once(writing: int) -> None:
    """Also where a tier is owed a block, which is offered again, and pinned for that."""
    policy = UseCounts()
    world = World(8, 8, writing=writing, policy=policy)
    world.store("?", range(3))
    finished(world, "?")
    world.open("a", range(4))
    world.store("a", range(4))
    finished(world, "a")
    assert policy.of(0, 1, 2, 3) == [1, 1, 1, 0]
    world.whole()
