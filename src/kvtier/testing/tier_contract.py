"""What every tier must do, as tests: see `contract`."""

# The names of the tests say what they test.
# ruff: noqa: D102
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, UNTOUCHED, block_of, key_of
from kvtier.tiers.base import SupportsDelete, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator


class TierContract:
    """Tests of a `Tier`. Each makes a new one with `make` and closes it."""

    def make(self) -> Tier:
        """An empty tier in a place of its own."""
        raise NotImplementedError

    def reopen(self) -> Tier | None:
        """Another tier over the place that the last `make` used; None if blocks do not survive."""
        return None

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A tier to test."""
        tier = self.make()
        yield tier
        tier.close()

    @pytest.fixture
    def second(self, tier: Tier) -> Iterator[Tier]:  # noqa: ARG002 - made first, closed last
        """A second tier over the same place."""
        second = self.reopen()
        if second is None:
            pytest.skip("blocks do not survive this tier")
        yield second
        second.close()

    @staticmethod
    def put(tier: Tier, key: BlockKey, content: bytes | None = None) -> None:
        """Write a block in two buffers, as drivers do."""
        content = block_of(key) if content is None else content
        view = memoryview(content)
        tier.write(key, (view[:HEADER_BYTES], view[HEADER_BYTES:]))

    @staticmethod
    def get(tier: Tier, key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytes:
        """Read a block into two buffers."""
        into = memoryview(bytearray([UNTOUCHED]) * block_bytes)
        tier.read(key, (into[:HEADER_BYTES], into[HEADER_BYTES:]))
        return bytes(into)

    def test_starts_empty(self, tier: Tier) -> None:
        assert list(tier.exists([key_of(1), key_of(2)])) == [False, False]

    def test_no_keys_no_answers(self, tier: Tier) -> None:
        assert list(tier.exists([])) == []

    def test_reads_back_what_was_written(self, tier: Tier) -> None:
        self.put(tier, key_of(1))
        assert self.get(tier, key_of(1)) == block_of(key_of(1))

    def test_buffers_may_be_cut_elsewhere(self, tier: Tier) -> None:
        self.put(tier, key_of(1))
        into = memoryview(bytearray(BLOCK_BYTES))
        tier.read(key_of(1), (into[:1], into[1:7000], into[7000:7000], into[7000:]))
        assert bytes(into) == block_of(key_of(1))

    def test_exists_answers_in_order(self, tier: Tier) -> None:
        self.put(tier, key_of(2))
        self.put(tier, key_of(4))
        answers = list(tier.exists([key_of(i) for i in (4, 1, 2, 3, 4)]))
        assert answers == [True, False, True, False, True]

    def test_keys_that_differ_only_in_group_are_two_blocks(self, tier: Tier) -> None:
        other = BlockKey(key_of(1)[:-1] + b"\1")
        self.put(tier, key_of(1))
        assert list(tier.exists([other])) == [False]
        self.put(tier, other)
        assert self.get(tier, key_of(1)) == block_of(key_of(1))
        assert self.get(tier, other) == block_of(other)

    def test_an_absent_key_is_missing(self, tier: Tier) -> None:
        with pytest.raises(MissingBlockError):
            self.get(tier, key_of(9))

    @pytest.mark.parametrize("block_bytes", [HEADER_BYTES, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
    def test_a_block_that_is_too_short_is_missing(self, tier: Tier, block_bytes: int) -> None:
        self.put(tier, key_of(1), block_of(key_of(1), block_bytes))
        with pytest.raises(MissingBlockError):
            self.get(tier, key_of(1))

    @pytest.mark.parametrize("surplus", [1, HEADER_BYTES])
    def test_a_block_that_is_too_long_is_missing(self, tier: Tier, surplus: int) -> None:
        self.put(tier, key_of(1), block_of(key_of(1), BLOCK_BYTES + surplus))
        with pytest.raises(MissingBlockError):
            self.get(tier, key_of(1))

    def test_a_second_write_is_harmless(self, tier: Tier) -> None:
        self.put(tier, key_of(1))
        self.put(tier, key_of(1))
        assert self.get(tier, key_of(1)) == block_of(key_of(1))

    def test_does_not_keep_the_buffer(self, tier: Tier) -> None:
        data = bytearray(block_of(key_of(1)))
        tier.write(key_of(1), (memoryview(data),))
        data[:] = bytes(BLOCK_BYTES)
        assert self.get(tier, key_of(1)) == block_of(key_of(1))

    def test_does_not_change_what_it_writes(self, tier: Tier) -> None:
        data = bytearray(block_of(key_of(1)))
        tier.write(key_of(1), (memoryview(data).toreadonly(),))
        assert data == block_of(key_of(1))

    def test_readers_never_see_a_torn_block(self, tier: Tier) -> None:
        """Threads write, delete and read the same few keys: a read gives the block or misses."""
        can_delete = isinstance(tier, SupportsDelete)

        def work(i: int) -> None:
            key = key_of(i % 3)
            if i % 2:
                self.put(tier, key)
            try:
                assert self.get(tier, key) == block_of(key)
            except MissingBlockError:
                assert can_delete or i < 6
            if i % 7 == 0 and isinstance(tier, SupportsDelete):
                tier.delete(key)

        for i in (1, 3, 5):
            work(i)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(6, 150)))

    def test_a_deleted_block_is_missing(self, tier: Tier) -> None:
        if not isinstance(tier, SupportsDelete):
            pytest.skip("this tier cannot delete")
        self.put(tier, key_of(1))
        self.put(tier, key_of(2))
        tier.delete(key_of(1))
        tier.delete(key_of(3))
        assert list(tier.exists([key_of(1), key_of(2)])) == [False, True]
        with pytest.raises(MissingBlockError):
            self.get(tier, key_of(1))
        self.put(tier, key_of(1))
        assert self.get(tier, key_of(1)) == block_of(key_of(1))

    def test_two_tiers_over_one_place_see_each_other(self, tier: Tier, second: Tier) -> None:
        self.put(tier, key_of(1))
        self.put(second, key_of(2))
        assert list(second.exists([key_of(1), key_of(3)])) == [True, False]
        assert self.get(second, key_of(1)) == block_of(key_of(1))
        assert self.get(tier, key_of(2)) == block_of(key_of(2))

    def test_blocks_survive_a_close(self) -> None:
        first = self.make()
        for i in range(8):
            self.put(first, key_of(i))
        first.close()
        second = self.reopen()
        if second is None:
            pytest.skip("blocks do not survive this tier")
        assert all(second.exists([key_of(i) for i in range(8)]))
        assert all(self.get(second, key_of(i)) == block_of(key_of(i)) for i in range(8))
        second.close()
