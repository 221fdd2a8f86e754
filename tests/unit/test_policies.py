"""Eviction policies: one suite over all of them, what each is for, and references without pins."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import Settings
from kvtier.core import pool as pool_module
from kvtier.core.policies import POLICIES, MakePolicy
from kvtier.core.policies.arc import ARC
from kvtier.core.policies.lru import LRU
from kvtier.core.policies.s3fifo import S3FIFO
from kvtier.core.pool import Block, BlockPool, Policy
from kvtier.errors import ConfigError
from kvtier.offloader import Offloader
from kvtier.policies import METHODS, load_policy
from kvtier.region import Geometry, Region
from kvtier.testing.engine import key_of

ALL = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
FILL = object()
Key = Any


def hit(policy: Policy, *keys: Key) -> None:
    """Each key is loaded once by a request."""
    for key in keys:
        policy.discard(key)
        policy.add(key)


def access(policy: Policy, capacity: int, resident: set[Key], key: Key) -> bool:
    """One access of a cache without pins; True for a hit."""
    if key in resident:
        hit(policy, key)
        return True
    if len(resident) == capacity:
        resident.remove(policy.victim())
    resident.add(key)
    policy.add(key)
    return False


def ghosts_of(policy: Policy) -> int:
    """How many keys it remembers without a slot."""
    if isinstance(policy, S3FIFO):
        return len(policy._ghosts)
    if isinstance(policy, ARC):
        return len(policy._once_ghosts) + len(policy._often_ghosts)
    return 0


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


def test_lru_equals_the_reference() -> None:
    trace = [i * i % 37 for i in range(500)]
    stack: list[int] = []
    hits = []
    for x in trace:
        hits.append(x in stack[-12:])
        stack = [y for y in stack if y != x] + [x]
    compare(LRU(12), 12, trace, hits)


def long_trace() -> list[int]:
    """Some keys more popular than others, phases that differ, and scans."""
    chance = random.Random(1)
    trace: list[int] = []
    for phase in range(12):
        trace += [100 * (phase % 3) + int(120 * chance.random() ** 3) for _ in range(300)]
        trace += range(1000 * phase, 1000 * phase + 30)
    return trace


def compare(policy: Policy, capacity: int, trace: Iterable[int], expected: Sequence[bool]) -> None:
    resident: set[Key] = set()
    assert [access(policy, capacity, resident, key_of(x)) for x in trace] == list(expected)


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


# -- by name ----------------------------------------------------------------


class Newest:
    """A policy of somebody's own: the newest goes first."""

    def __init__(self, capacity: int) -> None:
        self.keys: list[Key] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def add(self, key: Key) -> None:
        self.keys.append(key)

    def discard(self, key: Key) -> None:
        self.keys.remove(key)

    def forget(self, key: Key) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def touch(self, key: Key) -> None:
        pass

    def use(self, key: Key) -> None:
        pass

    def victim(self) -> Key:
        return self.keys.pop()


OWN = """
class Lacking:
    def __init__(self, capacity): pass
    def add(self, key): pass
    def __len__(self): return 0

class Needy:
    def __init__(self, capacity, more): pass

class Outer:
    from kvtier.core.policies.lru import LRU as Inner

THING = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the operator's."""
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("raise AttributeError('no such thing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_policies", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_policies"


class TestByName:
    @pytest.mark.parametrize("name", POLICIES)
    def test_ours(self, name: str) -> None:
        assert load_policy(name) is POLICIES[name]

    def test_of_the_operators_own(self, own: str) -> None:
        assert isinstance(load_policy(f"{own}:Outer.Inner")(4), LRU)

    def test_what_has_to_be_there_is_what_the_protocol_has(self) -> None:
        protocol = vars(pool_module.Policy)
        methods = {name for name in protocol if not name.startswith("_")}
        assert set(METHODS) == methods | {"__len__", "__contains__"}

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("own_absent:Policy", "cannot be imported"),
            (":Policy", "cannot be imported"),
            ("own_broken:Policy", "cannot be imported"),
            ("own_policies:Absent", "has no 'Absent'"),
            ("own_policies:", "has no ''"),
            ("own_policies:THING", "has no 'THING' that can be called"),
            ("own_policies:Needy", "must take the number of slots"),
            ("own_policies:Lacking", "lacks __contains__, discard, forget, touch, use, victim"),
        ],
    )
    def test_refusals(self, own: str, name: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told) as refusal:
            load_policy(name)
        assert str(refusal.value).startswith(f"eviction_policy = {name!r}")

    @pytest.mark.parametrize(
        ("name", "kind"), [*POLICIES.items(), (f"{__name__}:Newest", Newest)], ids=str
    )
    def test_the_offloader_takes_the_one_that_is_set(self, name: str, kind: type) -> None:
        chosen = Settings.decode({"cpu_bytes_to_use": 3 * 4096, "eviction_policy": name})
        offloader = Offloader(chosen, (), Region.create(Geometry(3, 4096, 1)), None)
        try:
            assert type(offloader.core.pool._policy).__name__ == kind.__name__
        finally:
            offloader.close()
