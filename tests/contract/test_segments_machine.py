"""One store against a model: which blocks are there, and in which order they go."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from descriptors import opened_below
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from segments_world import (
    SMALL,
    Capacity,
    buffers,
    content_of,
    get,
    held,
    on_disk,
    open_tier,
    put,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import block_of, key_of
from kvtier.tiers.fs.segments import inspection
from kvtier.tiers.fs.segments.tier import SegmentsTier

NUMBERS = 40
SLOTS = 24

numbers = st.integers(0, NUMBERS - 1)
batches = st.lists(numbers, min_size=1, max_size=6)


class SegmentsMachine(RuleBasedStateMachine):
    """`uses` is the model: the blocks that should be there, the one used longest ago first.
    `durable_uses` is what a killed process leaves of it: uses since the last upkeep are forgotten.
    """

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.now_ns = 10**18
        self.capacity = Capacity(SLOTS * SMALL)
        self.uses: dict[int, int] = {}
        self.durable_uses: dict[int, int] = {}
        self.open()
        self.reader = open_tier(self.root)

    def open(self) -> None:
        self.tier: SegmentsTier = open_tier(
            self.root, self.capacity, wall_clock_ns=self.tick, clock=self.tick
        )

    def tick(self) -> int:
        self.now_ns += 10**10  # each refusal of space is long ago
        return self.now_ns

    def forget(self, gone: set[int]) -> None:
        for i in gone:
            del self.uses[i]
            del self.durable_uses[i]

    def dropped(self) -> set[int]:
        keys = self.tier.take_dropped()
        assert len(set(keys)) == len(keys), "a key was dropped twice"
        return {i for i in range(NUMBERS) if key_of(i) in keys}

    @rule(batch=batches)
    def write(self, batch: list[int]) -> None:
        before = sorted(self.uses, key=self.uses.__getitem__)
        put(self.tier, *batch)
        gone = self.dropped()
        new = set(batch) - self.uses.keys()
        used = set(batch) & self.uses.keys()
        old = [i for i in before if i not in used]
        assert gone <= set(old), "a block that was just used was evicted"
        assert gone == set(old[: len(gone)]), "another block was colder"
        assert len(gone) <= len(new), "more went than was needed"
        self.forget(gone)
        # what was there is used first, then the new ones come in order; one that is in the batch
        # twice is there by then, and is used again
        for i in batch:
            if i not in new:
                self.uses[i] = self.tick()
        for i in dict.fromkeys(i for i in batch if i in new):
            self.uses[i] = self.durable_uses[i] = self.tick()
        for position, i in enumerate(batch):
            if i in new and i in batch[:position]:
                self.uses[i] = self.tick()

    @rule(i=numbers)
    def read(self, i: int) -> None:
        try:
            content = get(self.tier, i)
        except MissingBlockError:
            assert i not in self.uses
        else:
            assert i in self.uses
            assert content == content_of(i)
            self.uses[i] = self.tick()

    @rule(i=numbers)
    def write_another_length(self, i: int) -> None:
        """Like one block that goes, and one that this machine does not count."""
        key = key_of(1000 + i)
        before = sorted(self.uses, key=self.uses.__getitem__)
        self.tier.write(key, buffers(block_of(key, 3 * SMALL)))
        into = bytearray(3 * SMALL)
        try:
            self.tier.read(key, (memoryview(into),))
            assert into == block_of(key, 3 * SMALL)
        except MissingBlockError:
            pass
        gone = self.dropped() & set(before)
        self.forget(gone)

    @rule(i=numbers)
    def delete(self, i: int) -> None:
        self.tier.delete(key_of(i))
        if i in self.uses:
            self.forget({i})
        assert self.dropped() == set()

    @rule()
    def maintain(self) -> None:
        self.tier.maintain()
        self.durable_uses = dict(self.uses)

    @rule(batch=batches)
    def evict_from_outside(self, batch: list[int]) -> None:
        for store in stores_of(self.root):
            outcome = inspection.evict(str(store), [key_of(i) for i in batch])
            assert outcome.requested
        self.tier.maintain()
        self.durable_uses = dict(self.uses)
        gone = self.dropped()
        assert gone == set(batch) & self.uses.keys()
        self.forget(gone)

    @rule(nbytes=st.integers(1, SLOTS * SMALL))
    def owe(self, nbytes: int) -> None:
        self.capacity.debt = nbytes
        self.tier.maintain()
        assert self.capacity.debt == 0 or not segments_of(self.root)
        self.capacity.debt = 0
        self.durable_uses = dict(self.uses)
        self.forget(self.dropped())

    @rule()
    def rewrite_the_log(self) -> None:
        for store in self.tier._owned.stores():
            store.log.rewrite(
                lambda store=store: self.tier._owned.slots.copies(store), store.next_segment
            )
            self.durable_uses = dict(self.uses)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()
        self.durable_uses = dict(self.uses)

    @rule()
    def crash(self) -> None:
        vanish(self.tier)
        self.open()
        self.uses = dict(self.durable_uses)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def lose_a_segment(self, data: st.DataObject) -> None:
        segments = segments_of(self.root)
        if segments:
            path = data.draw(st.sampled_from(segments))
            self.capacity.used -= path.stat().st_size  # as an inventory would notice
            path.unlink()
            self.tier.maintain()
            self.durable_uses = dict(self.uses)
            self.forget(self.dropped())

    @invariant()
    def the_same_blocks(self) -> None:
        keys = [key_of(i) for i in range(NUMBERS)]
        found = {i for i, there in enumerate(self.tier.exists(keys)) if there}
        assert found == self.uses.keys()

    @invariant()
    def a_reader_sees_the_same(self) -> None:
        assert held(self.reader, range(NUMBERS)) == self.uses.keys()

    @invariant()
    def books_are_right(self) -> None:
        self.tier._owned.slots.check()
        assert not self.tier._owned.slots._pins
        there = on_disk(self.root)
        assert self.capacity.used == there <= self.capacity.nbytes
        assert self.tier.owned_bytes() == self.tier.figures()["used_bytes"] == there
        counts = self.tier._owned.slots.counts().values()
        blocks = sum(slots - free for slots, free in counts)
        assert blocks == self.tier.figures()["blocks"], "a slot leaked"
        assert self.tier.figures()["upkeep_failures"] == 0
        assert self.reader.figures()["upkeep_failures"] == 0

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.reader.close()
            self.tier.close()
            assert opened_below(self.root) == []
            shutil.rmtree(self.root)


TestSegmentsMachine = SegmentsMachine.TestCase
TestSegmentsMachine.settings = settings(max_examples=60, stateful_step_count=40)
