"""A capacity that holds, kept by one of several processes."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

from object_tiers import get, open_tier, put, settings_for

from kvtier.core.types import BlockKey
from kvtier.errors import ConfigError, MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.tiers.object import sweeper as module
from kvtier.tiers.object.lease import LEASE_FILE, Lease
from kvtier.tiers.object.parallel import Parallel
from kvtier.tiers.object.settings import ObjectSettings
from kvtier.tiers.object.store import open_store
from kvtier.tiers.object.sweeper import Sweeper
from kvtier.tiers.object.tier_type import ObjectTierType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.store import ObjectStore

OTHER = hashlib.sha256(b"another").hexdigest()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["seaweed", "juice"])
def settings(request, s3_credentials) -> ObjectSettings:
    return settings_for(request.getfixturevalue(request.param))


@pytest.fixture
def store(settings: ObjectSettings) -> ObjectStore:
    return open_store(settings)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    parallel = Parallel(8, "test")
    yield parallel
    parallel.close()


def next_second() -> None:
    """Wait until the clock, by which servers tell ages, shows another second."""
    before = int(time.time())
    while int(time.time()) == before:
        time.sleep(0.01)


def keys_left(settings: ObjectSettings, namespace: str = NAMESPACE) -> set[BlockKey]:
    tier = open_tier(settings, namespace)
    found = set(tier._existence.list_part())
    tier.close()
    return found


# --- the lease


def test_one_of_two_holds_it(store, clock) -> None:
    first, second = Lease(store, 60.0, clock), Lease(store, 60.0, clock)
    assert [first.hold(), second.hold(), first.hold(), second.hold()] == [True, False] * 2
    assert (first.is_held(), second.is_held()) == (True, False)


def test_a_silent_holder_loses_it_after_the_lease(store, clock) -> None:
    first, second = Lease(store, 60.0, clock), Lease(store, 60.0, clock)
    assert first.hold()
    assert not second.hold()
    clock.now += 59.0
    assert not second.hold()
    assert first.is_held()
    clock.now += 1.0
    assert not first.is_held(), "it cannot know whether somebody took it"
    assert second.hold()
    assert not first.hold()
    assert second.is_held()


def test_a_renewal_starts_the_wait_anew(store, clock) -> None:
    first, second = Lease(store, 60.0, clock), Lease(store, 60.0, clock)
    assert first.hold()
    for _ in range(5):
        assert not second.hold()
        clock.now += 40.0
        assert first.hold() is True
    assert not second.hold()


def test_who_releases_it_makes_way_at_once(store, clock) -> None:
    first, second = Lease(store, 60.0, clock), Lease(store, 60.0, clock)
    assert first.hold()
    first.release()
    assert not first.is_held()
    assert second.hold()
    second.release()
    assert second.hold(), "its own release too"
    first.release()
    assert second.is_held(), "a release by somebody else is none"
    assert second.hold()


def test_an_object_that_is_no_note_is_replaced_in_the_end(store, clock) -> None:
    import obstore

    obstore.put(store.client, LEASE_FILE, b"junk")
    lease = Lease(store, 60.0, clock)
    assert not lease.hold()
    clock.now += 60.0
    assert lease.hold()


def test_many_at_once_make_one_holder(seaweed: S3Server, s3_credentials, clock) -> None:
    store = open_store(settings_for(seaweed))
    leases = [Lease(store, 60.0, clock) for _ in range(8)]
    start = threading.Barrier(8)
    held: list[bool] = []

    def take(lease: Lease) -> None:
        start.wait(20)
        held.append(lease.hold())

    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held) == [False] * 7 + [True]


# --- the sweep


def test_the_oldest_go_and_what_is_not_ours_stays(settings, store, clock, parallel) -> None:
    import obstore

    tiers = [open_tier(settings), open_tier(settings, OTHER)]
    for i in range(4):
        put(tiers[i % 2], key_of(i))
    foreign = ["README", f"{NAMESPACE}/ab/notes.txt", f"{NAMESPACE}/zz/" + "ab" * 36, "x/ab/ab"]
    for path in foreign:
        obstore.put(store.client, path, bytes(3 * BLOCK_BYTES))
    next_second()
    for i in range(4, 10):
        put(tiers[i % 2], key_of(i))
    dropped: list[tuple[str, BlockKey]] = []
    sweeper = Sweeper(store, 10 * BLOCK_BYTES, lambda *what: dropped.append(what), parallel, clock)
    sweeper.step()
    assert (sweeper.swept.sweeps, sweeper.swept.used_bytes) == (1, 10 * BLOCK_BYTES)
    assert dropped == [], "exactly full is not too full"
    sweeper = Sweeper(store, 7 * BLOCK_BYTES, lambda *what: dropped.append(what), parallel, clock)
    sweeper.sweep()
    assert sweeper.swept.used_bytes == 6 * BLOCK_BYTES, "down to nine tenths, in whole blocks"
    assert sweeper.swept.evicted_blocks == 4
    assert sorted(dropped) == sorted((OTHER if i % 2 else NAMESPACE, key_of(i)) for i in range(4))
    assert keys_left(settings) == {key_of(i) for i in (4, 6, 8)}
    assert keys_left(settings, OTHER) == {key_of(i) for i in (5, 7, 9)}
    left = {entry["path"] for entry in obstore.list(store.client).collect()}
    assert left >= {*foreign, f"{NAMESPACE}/namespace.json", f"{OTHER}/namespace.json", LEASE_FILE}
    for tier in tiers:
        tier.close()


def test_no_more_than_needed_goes_of_one_second(settings, store, clock, parallel) -> None:
    tier = open_tier(settings)
    put(tier, key_of(0))
    for i in range(1, 20):
        tier.write(key_of(i), (memoryview(block_of(key_of(i))),))
    tier.close()
    sweeper = Sweeper(store, 12 * BLOCK_BYTES, lambda *_: None, parallel, clock)
    sweeper.sweep()
    assert len(keys_left(settings)) == 10
    assert sweeper.swept.used_bytes == 10 * BLOCK_BYTES


def test_only_the_holder_sweeps_and_not_too_often(settings, store, clock, parallel) -> None:
    first, second = (Sweeper(store, 10**9, lambda *_: None, parallel, clock) for _ in range(2))
    for _ in range(3):
        first.step()
        second.step()
    assert (first.swept.sweeps, second.swept.sweeps) == (1, 0)
    assert (first.swept.holds, second.swept.holds) == (1, 0)
    clock.now += 59.0
    first.step()
    assert first.swept.sweeps == 1
    clock.now += 1.0
    first.step()
    assert first.swept.sweeps == 2
    clock.now += 60.0
    second.step()
    assert second.swept.sweeps == 0, "it was renewed meanwhile"
    clock.now += 60.0
    second.step()
    assert second.swept.sweeps == 1
    first.step()
    assert first.swept.holds == 0


def test_large_prefixes_are_listed_less_often(settings, store, clock, parallel, monkeypatch):
    monkeypatch.setattr(module, "PAGE_KEYS", 1)
    monkeypatch.setattr(module, "SECONDS_PER_PAGE", 40.0)
    tier = open_tier(settings)
    for i in range(3):
        put(tier, key_of(i))
    tier.close()
    sweeper = Sweeper(store, 10**9, lambda *_: None, parallel, clock)
    sweeper.step()
    assert sweeper.swept.pages >= 5  # the blocks, what describes the namespace, the lease
    clock.now += 40.0 * sweeper.swept.pages - 1
    sweeper.step()
    assert sweeper.swept.sweeps == 1
    clock.now += 2
    sweeper.step()
    assert sweeper.swept.sweeps == 2


def test_a_sweep_ends_when_the_lease_is_lost(settings, store, clock, parallel, monkeypatch):
    monkeypatch.setattr(module, "PAGE_KEYS", 1)
    tier = open_tier(settings)
    for i in range(4):
        put(tier, key_of(i))
    tier.close()
    dropped: list[BlockKey] = []
    thief = Lease(store, 60.0, clock)

    def steal(_: str, key: BlockKey) -> None:
        dropped.append(key)
        if len(dropped) == 1:
            assert not thief.hold()
            clock.now += 60.0
            assert thief.hold()

    sweeper = Sweeper(store, 1, steal, parallel, clock)
    sweeper.step()
    assert len(dropped) == 1
    assert len(keys_left(settings)) == 3
    assert sweeper.swept.sweeps == sweeper.swept.failures == 0


def test_what_a_killed_start_left_goes_after_an_hour(settings, store, clock, parallel, monkeypatch):
    import obstore

    obstore.put(store.client, ".kvtier-try-1", b"x")
    sweeper = Sweeper(store, 10**9, lambda *_: None, parallel, clock)
    sweeper.sweep()
    paths = {entry["path"] for entry in obstore.list(store.client).collect()}
    assert ".kvtier-try-1" in paths
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3601)
    sweeper.sweep()
    paths = {entry["path"] for entry in obstore.list(store.client).collect()}
    assert ".kvtier-try-1" not in paths


def test_failures_are_counted_and_end(proxy: HttpFaultProxy, behind, clock, parallel, caplog):
    store = open_store(behind)
    tier = open_tier(behind)
    put(tier, key_of(1))
    tier.close()
    sweeper = Sweeper(store, 1, lambda *_: None, parallel, clock)
    proxy.rules = [Rule(Answer(403), method="DELETE")]
    for _ in range(3):
        sweeper.step()
    assert sweeper.swept.failures == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    proxy.rules = []
    sweeper.step()
    assert (sweeper.swept.sweeps, sweeper.swept.evicted_blocks) == (1, 1)


def test_a_tier_with_a_capacity(juice: S3Server, s3_credentials) -> None:
    unbounded = settings_for(juice)
    tier = open_tier(unbounded)
    for i in range(6):
        put(tier, key_of(i))
    tier.close()
    import msgspec

    bounded = msgspec.structs.replace(unbounded, capacity="much")
    with pytest.raises(ConfigError, match=r"x\.capacity"):
        ObjectTierType().preflight(bounded, "x")
    bounded = msgspec.structs.replace(unbounded, capacity=4 * BLOCK_BYTES)
    tier = open_tier(bounded)
    deadline = time.monotonic() + 30
    while tier.figures()["sweeps"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = tier.take_dropped()
    assert len(gone) == 3
    assert tier.take_dropped() == []
    assert tier.figures()["evicted_blocks"] == 3
    assert tier.figures()["used_bytes"] == 3 * BLOCK_BYTES
    assert tier.exists([key_of(i) for i in range(6)]) == [key_of(i) not in gone for i in range(6)]
    for i in range(6):
        if key_of(i) in gone:
            with pytest.raises(MissingBlockError):
                get(tier, key_of(i))
        else:
            assert get(tier, key_of(i)) == block_of(key_of(i))
    tier.close()
    second = open_tier(bounded)
    while second.figures()["sweeps"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.close()
