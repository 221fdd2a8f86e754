"""Eviction policies: one suite over all of them, and what each is for."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import Key, access, compare, ghosts_of, hit

from kvtier.core.policies import POLICIES, MakePolicy
from kvtier.core.policies.arc import ARC
from kvtier.core.policies.lru import LRU
from kvtier.core.policies.s3fifo import S3FIFO
from kvtier.core.pool import Block, BlockPool, Policy
from kvtier.testing.engine import key_of

ALL = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)

FILL = object()


def remembered(policy: Policy) -> int:
    """Keys in all its containers, each as often as it is there."""
    return sum(len(held) for held in vars(policy).values() if hasattr(held, "__len__"))


class TestEveryPolicy:
    @ALL
    def test_is_a_policy(self, make: MakePolicy) -> None:
        assert isinstance(make(3), Policy)

    @ALL
    def test_gives_every_key_once(self, make: MakePolicy) -> None:
        policy = make(9)
        keys = [key_of(i) for i in range(9)]
        for key in keys:
            policy.add(key)
        hit(policy, *keys[:4])
        for key in keys[3:6]:
            policy.use(key)
            policy.touch(key)
        assert sorted(policy.victim() for _ in keys) == keys
        assert len(policy) == 0
        assert not any(key in policy for key in keys)

    @ALL
    def test_the_head_of_what_was_stored_outlives_its_tail(self, make: MakePolicy) -> None:
        policy = make(20)
        prompt = [key_of(i) for i in range(4)]
        for key in reversed(prompt):
            policy.add(key)
        for key in reversed(prompt):
            policy.touch(key)
        assert [policy.victim() for _ in prompt] == prompt[::-1]

    @ALL
    def test_a_pinned_key_is_no_victim_and_no_member(self, make: MakePolicy) -> None:
        policy = make(2)
        a, b = key_of(0), key_of(1)
        policy.add(a)
        policy.add(b)
        policy.discard(a)
        policy.touch(a)
        policy.use(a)
        assert (len(policy), a in policy, b in policy) == (1, False, True)
        assert policy.victim() == b
        policy.add(a)
        assert (len(policy), a in policy) == (1, True)
        assert policy.victim() == a

    @ALL
    def test_touch_and_use_of_a_stranger_do_nothing(self, make: MakePolicy) -> None:
        policy = make(2)
        policy.touch(key_of(0))
        policy.use(key_of(0))
        policy.forget(key_of(0))
        assert len(policy) == 0
        assert remembered(policy) == 0

    @ALL
    def test_nothing_is_known_of_a_forgotten_key(self, make: MakePolicy) -> None:
        policy = make(4)
        idle, pinned, ghost = (key_of(i) for i in range(3))
        for key in (ghost, idle, pinned):
            policy.add(key)
        assert policy.victim() == ghost
        policy.discard(pinned)
        for key in (idle, pinned, ghost):
            policy.forget(key)
        assert remembered(policy) == 0
        policy.add(pinned)  # a new block of the same content
        assert (len(policy), policy.victim()) == (1, pinned)

    @ALL
    @given(data=st.data(), capacity=st.integers(1, 12))
    @settings(max_examples=150)
    def test_holds_exactly_the_evictable(
        self, make: MakePolicy, data: st.DataObject, capacity: int
    ) -> None:
        """Against a model that knows the state of every slot and nothing of the order."""
        policy = make(capacity)
        filling: set[Key] = set()
        idle: set[Key] = set()
        pinned: set[Key] = set()
        verbs = st.sampled_from(
            ["allocate", "publish", "fail", "pin", "unpin", "hit", "forget", "touch", "use"]
        )
        for verb, n in data.draw(st.lists(st.tuples(verbs, st.integers(0, 17)), max_size=120)):
            key = key_of(n)
            if verb == "allocate" and key not in filling | idle | pinned:
                if len(filling) + len(idle) + len(pinned) == capacity:
                    if not idle:
                        continue
                    victim = policy.victim()
                    assert victim in idle, "the victim is in use, or not here"
                    idle.remove(victim)
                filling.add(key)
            elif verb == "publish" and key in filling:
                filling.remove(key)
                idle.add(key)
                policy.add(key)
            elif verb == "fail" and key in filling:
                filling.remove(key)
                policy.forget(key)
            elif verb == "pin" and key in idle:
                idle.remove(key)
                pinned.add(key)
                policy.discard(key)
            elif verb == "unpin" and key in pinned:
                pinned.remove(key)
                idle.add(key)
                policy.add(key)
            elif verb == "hit" and key in idle:
                hit(policy, key)
            elif verb == "forget" and key in idle | pinned:
                idle.discard(key)
                pinned.discard(key)
                policy.forget(key)
            elif verb == "touch":
                policy.touch(key)
            elif verb == "use":
                policy.use(key)
            assert len(policy) == len(idle)
            assert {key_of(i) for i in range(18) if key_of(i) in policy} == idle
            resident = len(filling) + len(idle) + len(pinned)
            assert ghosts_of(policy) + len(idle) + len(pinned) <= 2 * capacity
            if resident == capacity and not filling:
                assert ghosts_of(policy) <= capacity, "more ghosts than slots"
        gone = {policy.victim() for _ in range(len(policy))}
        assert gone == idle

    @ALL
    def test_the_pool_and_the_policy_agree(self, make: MakePolicy) -> None:
        """The pool's own check over a churn that pins, forgets and evicts."""
        pool = BlockPool(8, make(8))
        blocks: dict[Key, Block] = {}
        for i in range(400):
            key = key_of(i * 7 % 23)
            if key in blocks:
                pool.pin(blocks[key])
                if i % 5 == 0:
                    pool.forget(blocks.pop(key))
                    pool.check()
                    continue
                pool.unpin(blocks[key])
                pool.use([key])
            elif pool.available:
                (block,), evicted = pool.allocate([key], FILL)
                for gone in evicted:
                    del blocks[gone]
                blocks[key] = block
                pool.publish(block)
                pool.unpin(block)
            pool.touch(list(blocks)[::3])
            pool.check()

    @ALL
    @pytest.mark.parametrize("pinned_share", [0.0, 0.9])
    def test_work_per_call_does_not_grow(self, make: MakePolicy, pinned_share: float) -> None:
        """Lines run and keys hashed or compared, counted: as many per call in any pool."""
        small, large = (work_per_call(make, n, pinned_share) for n in (60, 3000))
        assert large < 1.3 * small


class CountedKey(bytes):
    """A key that counts how often it is looked at."""

    looks = 0

    def __hash__(self) -> int:
        CountedKey.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedKey.looks += 1
        return super().__eq__(other)


def work_per_call(make: MakePolicy, capacity: int, pinned_share: float) -> float:
    """Lines of Python and looks at keys, per call of a policy under churn and pins."""
    policy = make(capacity)
    keys = [CountedKey(key_of(i)) for i in range(6 * capacity)]
    resident: dict[Key, None] = {}
    calls = lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    for key in keys[:capacity]:
        policy.add(key)
    hit(policy, *keys[:capacity], *keys[:capacity])
    policy.add(policy.victim())  # where use decides the queue, they are in the one for used keys
    for key in keys[: int(pinned_share * capacity)]:
        policy.discard(key)
    for key in keys[int(pinned_share * capacity) : capacity]:
        resident[key] = None
    CountedKey.looks = 0
    before = sys.gettrace()
    try:
        for i in range(5 * capacity):
            new, used = keys[capacity + i * 3 % (5 * capacity)], keys[(i * i) % len(keys)]
            present = new in resident, used in resident
            sys.settrace(count)
            if not present[0]:
                victim = policy.victim()
                policy.add(new)
            if present[1] and (present[0] or used != victim):
                policy.discard(used)
                policy.add(used)
                policy.use(used)
                policy.touch(used)
            sys.settrace(before)
            if not present[0]:
                del resident[victim]
                resident[new] = None
            calls += 1
    finally:
        sys.settrace(before)
    return (lines + CountedKey.looks) / calls


# -- what each is for -------------------------------------------------------


def after_a_scan(make: MakePolicy, capacity: int = 100) -> float:
    """Share of a hot set that is there after twice as many keys as slots came by once."""
    policy = make(capacity)
    resident: set[Key] = set()
    hot = [key_of(i) for i in range(capacity // 2)]
    for _ in range(4):
        for key in hot:
            access(policy, capacity, resident, key)
    for i in range(2 * capacity):
        access(policy, capacity, resident, key_of(1000 + i))
    return len(resident.intersection(hot)) / len(hot)


def test_a_scan_flushes_lru_and_spares_the_hot_set_of_the_others() -> None:
    assert after_a_scan(LRU) == 0.0
    assert after_a_scan(S3FIFO) == 1.0
    assert after_a_scan(ARC) == 1.0


@pytest.mark.parametrize("make", [S3FIFO, ARC])
def test_the_end_of_the_request_that_stored_is_not_a_second_use(make: MakePolicy) -> None:
    """Else whatever passes by once would count as used twice, and a scan would be no scan."""
    policy = make(100)
    hot = [key_of(i) for i in range(50)]
    for key in hot:
        policy.add(key)
    hit(policy, *hot, *hot)
    scan = [key_of(1000 + i) for i in range(50)]
    for key in scan:
        policy.add(key)
        policy.touch(key)
    assert {policy.victim() for _ in scan[10:]} <= set(scan)


def test_lru_equals_the_reference() -> None:
    trace = [i * i % 37 for i in range(500)]
    stack: list[int] = []
    hits = []
    for x in trace:
        hits.append(x in stack[-12:])
        stack = [y for y in stack if y != x] + [x]
    compare(LRU(12), 12, trace, hits)
