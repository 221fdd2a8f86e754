"""ARC step by step, and against a reference without pins."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import compare, ghosts_of, hit, long_trace

from kvtier.core.policies.arc import ARC
from kvtier.testing.engine import key_of


class TestARC:
    def test_a_ghost_of_once_makes_room_for_once(self) -> None:
        policy = ARC(4)
        a, b, c, d, e = (key_of(i) for i in range(5))
        for key in (a, b, c, d):
            policy.add(key)
        hit(policy, c, d)
        assert policy.victim() == a
        policy.add(e)
        assert policy.target == 0
        assert policy.victim() == b
        policy.add(a)
        assert policy.target == 1

    def test_a_ghost_of_often_makes_room_for_often(self) -> None:
        policy = ARC(4)
        keys = [key_of(i) for i in range(6)]
        for key in keys[:4]:
            policy.add(key)
        hit(policy, *keys[:4])
        assert policy.victim() == keys[0]
        policy.add(keys[4])
        assert policy.victim() == keys[4], "`once` is over its target of 0"
        policy.add(keys[4])
        assert policy.target == 1
        assert policy.victim() == keys[1]
        policy.add(keys[0])
        assert policy.target == 0

    def test_the_rarer_ghost_moves_the_target_further(self) -> None:
        policy = ARC(8)
        keys = [key_of(i) for i in range(8)]
        for key in keys:
            policy.add(key)
        hit(policy, *keys[2:])
        gone = [policy.victim() for _ in range(6)]
        assert gone == keys[:6]
        policy.add(keys[0])
        assert policy.target == 2.0, "4 ghosts of `often` against 2 of `once`"
        policy.add(keys[1])
        assert policy.target == 6.0

    def test_the_target_stays_within_the_pool(self) -> None:
        for used_twice in (False, True):
            policy = ARC(3)
            keys = [key_of(i) for i in range(3)]
            for _ in range(9):
                for key in keys:
                    policy.add(key)
                    if used_twice:
                        policy.use(key)
                for _ in keys:
                    policy.victim()
                assert 0 <= policy.target <= 3

    def test_a_pin_is_a_use(self) -> None:
        policy = ARC(4)
        a, b, c = (key_of(i) for i in range(3))
        for key in (a, b, c):
            policy.add(key)
        policy.discard(a)
        policy.add(a)
        assert [policy.victim() for _ in range(3)] == [b, c, a]

    def test_touch_is_recency_without_promotion(self) -> None:
        policy = ARC(4)
        a, b, c = (key_of(i) for i in range(3))
        for key in (a, b, c):
            policy.add(key)
        policy.use(c)
        policy.touch(a)
        assert [policy.victim() for _ in range(3)] == [b, a, c]

    def test_the_other_list_gives_when_the_first_is_in_use(self) -> None:
        policy = ARC(2)
        a, b = key_of(0), key_of(1)
        policy.add(a)
        policy.add(b)
        policy.use(b)
        policy.discard(b)
        assert policy.victim() == a, "`often` is in use"
        policy.add(a)
        policy.discard(a)
        policy.forget(b)
        c = key_of(2)
        policy.add(c)
        assert policy.target == 1
        assert policy.victim() == c, "`once` is within its target, but `often` is in use"

    def test_ghosts_are_bounded(self) -> None:
        policy = ARC(20)
        for i in range(200):
            if len(policy) == 20:
                policy.victim()
            policy.add(key_of(i))
            assert ghosts_of(policy) <= 20
            if i % 3:
                policy.use(key_of(i))
        assert ghosts_of(policy) == 20

    @pytest.mark.parametrize("capacity", [1, 2, 9, 10, 25])
    @given(trace=st.lists(st.integers(0, 40), max_size=400))
    @settings(max_examples=100)
    def test_equals_the_reference(self, capacity: int, trace: list[int]) -> None:
        compare(ARC(capacity), capacity, trace, arc_reference(capacity, trace))

    @pytest.mark.parametrize("capacity", [3, 10, 40])
    def test_equals_the_reference_for_long(self, capacity: int) -> None:
        trace = long_trace()
        compare(ARC(capacity), capacity, trace, arc_reference(capacity, trace))


def arc_reference(c: int, trace: Iterable[int]) -> list[bool]:
    """Figure 4 of the paper over plain lists, oldest first; REPLACE goes before the adaptation."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0

    def replace() -> None:
        if t1 and (len(t1) > p or not t2):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    hits = []
    for x in trace:
        hits.append(x in t1 + t2)
        if hits[-1]:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # Case II
            replace()
            p = min(c, p + max(1, len(b2) / len(b1)))
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # Case III
            replace()
            p = max(0, p - max(1, len(b1) / len(b2)))
            b2.remove(x)
            t2.append(x)
        else:  # Case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace()
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace()
            t1.append(x)
    return hits
