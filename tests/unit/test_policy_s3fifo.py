"""S3-FIFO step by step, and against a reference without pins."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import compare, ghosts_of, hit, long_trace

from kvtier.core.policies.s3fifo import S3FIFO
from kvtier.testing.engine import key_of


class TestS3FIFO:
    def test_used_once_is_not_enough_to_leave_the_small_queue(self) -> None:
        policy = S3FIFO(10)
        a, b, c, d = (key_of(i) for i in range(4))
        for key in (a, b, c, d):
            policy.add(key)
        hit(policy, a, b, b)
        assert [policy.victim() for _ in range(4)] == [a, c, b, d]

    def test_a_ghost_comes_back_to_the_main_queue(self) -> None:
        policy = S3FIFO(10)
        a, b, c = (key_of(i) for i in range(3))
        policy.add(a)
        assert policy.victim() == a
        policy.add(a)
        policy.add(b)
        policy.add(c)
        assert [policy.victim() for _ in range(3)] == [b, a, c]

    def test_a_use_buys_one_more_round_in_the_main_queue(self) -> None:
        policy = S3FIFO(10)
        main = [key_of(i) for i in range(3)]
        for key in main:
            policy.add(key)
        for key in main:
            assert policy.victim() == key
        for key in main:
            policy.add(key)
        hit(policy, main[0], main[0], main[1])
        assert [policy.victim() for _ in main] == [main[2], main[1], main[0]]

    def test_a_pin_keeps_the_place(self) -> None:
        policy = S3FIFO(10)
        keys = [key_of(i) for i in range(3)]
        for key in keys:
            policy.add(key)
        policy.discard(keys[0])
        policy.add(keys[0])
        assert policy.victim() == keys[0], "one use: its turn comes first still"

    def test_who_is_in_use_when_its_turn_comes_joins_the_main_queue(self) -> None:
        policy = S3FIFO(10)
        a, b, c, d = (key_of(i) for i in range(4))
        for key in (a, b):
            policy.add(key)
        policy.discard(a)
        assert policy.victim() == b
        policy.add(a)
        for key in (c, d):
            policy.add(key)
        assert [policy.victim() for _ in range(3)] == [c, a, d]

    def test_no_victim_of_the_main_queue_is_in_use(self) -> None:
        policy = S3FIFO(10)
        a, b, c = (key_of(i) for i in range(3))
        for key in (a, b):
            policy.add(key)
            assert policy.victim() == key
        for key in (a, b):
            policy.add(key)
        policy.discard(a)
        assert policy.victim() == b
        policy.add(c)
        policy.add(a)
        assert [policy.victim() for _ in range(2)] == [a, c]

    def test_ghosts_are_bounded(self) -> None:
        policy = S3FIFO(20)
        for i in range(200):
            policy.add(key_of(i))
            policy.victim()
        assert ghosts_of(policy) == 18
        assert len(policy) == 0

    @pytest.mark.parametrize("capacity", [1, 2, 9, 10, 25])
    @given(trace=st.lists(st.integers(0, 40), max_size=400))
    @settings(max_examples=100)
    def test_equals_the_reference(self, capacity: int, trace: list[int]) -> None:
        compare(S3FIFO(capacity), capacity, trace, s3fifo_reference(capacity, trace))

    @pytest.mark.parametrize("capacity", [3, 10, 40])
    def test_equals_the_reference_for_long(self, capacity: int) -> None:
        trace = long_trace()
        compare(S3FIFO(capacity), capacity, trace, s3fifo_reference(capacity, trace))


def s3fifo_reference(capacity: int, trace: Iterable[int]) -> list[bool]:
    """The paper's algorithm over plain lists: newest last."""
    small: list[int] = []
    main: list[int] = []
    ghost: list[int] = []
    freq: dict[int, int] = {}
    small_size = max(1, capacity // 10)
    hits = []
    for x in trace:
        hits.append(x in small + main)
        if hits[-1]:
            freq[x] = min(freq[x] + 1, 3)
            continue
        full = len(small) + len(main) == capacity
        while full:
            if small and (len(small) > small_size or not main):
                y = small.pop(0)
                if freq[y] > 1:
                    main.append(y)
                    freq[y] = 0
                else:
                    ghost = [*ghost, y][-(capacity - small_size) :] if capacity > 1 else []
                    full = False
            else:
                y = main.pop(0)
                if freq[y] > 0:
                    main.append(y)
                    freq[y] -= 1
                else:
                    full = False
        (main if x in ghost else small).append(x)
        ghost = [y for y in ghost if y != x]
        freq[x] = 0
    return hits
