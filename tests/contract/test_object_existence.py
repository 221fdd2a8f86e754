"""How many requests an answer costs, counted by a proxy in front of the server."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

from object_tiers import BUCKET, open_tier, put, settings_for

from kvtier.core.types import BlockKey
from kvtier.errors import TierThrottledError
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.testing.proxy import Behaviour
from kvtier.tiers.object import existence as module
from kvtier.tiers.object.existence import PAGE_KEYS, Existence, path_of
from kvtier.tiers.object.existence import key_of as key_of_path
from kvtier.tiers.object.objects import ObjectTier
from kvtier.tiers.object.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.settings import ObjectSettings

MANY = 1200  # more than a page
PRESENT = [key_of(i) for i in range(MANY)]
ABSENT = [key_of(i) for i in range(10_000, 10_000 + MANY)]


@pytest.fixture(scope="module")
def filled(seaweed: S3Server) -> tuple[S3Server, str]:
    """A server, and a prefix with `MANY` tiny blocks."""
    url = f"s3://{BUCKET}/{secrets.token_hex(6)}"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvtierkey")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "kvtiersecret")
        tier = open_tier(settings_for(seaweed, url=url))
        written = tier.write_batch(PRESENT, [(memoryview(b"tiny"),)] * MANY)
        tier.close()
    assert written == [None] * MANY
    return seaweed, url


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Counted:
    """A tier behind a proxy that counts, with a clock of its own."""

    def __init__(self, proxy: HttpFaultProxy, settings: ObjectSettings) -> None:
        self.proxy = proxy
        self.clock = Clock()
        self.tier = ObjectTier(open_store(settings), NAMESPACE, {}, settings, self.clock)
        self.take()

    def take(self) -> tuple[int, int]:
        """`HEAD`s and listings since the last call; the tier counts the same."""
        taken = self.proxy.requests["HEAD"], self.proxy.requests["GET"]
        self.proxy.requests.clear()
        return taken


@pytest.fixture
def counted(filled: tuple[S3Server, str], s3_credentials: None) -> Iterator[Counted]:
    server, url = filled
    with HttpFaultProxy(server.address) as proxy:
        counted = Counted(proxy, settings_for(proxy, url=url))
        yield counted
        counted.tier.close()


@pytest.fixture
def empty(proxy: HttpFaultProxy, behind: ObjectSettings) -> Iterator[Counted]:
    counted = Counted(proxy, behind)
    yield counted
    counted.tier.close()


def test_an_empty_namespace_costs_one_request(empty: Counted) -> None:
    assert empty.tier.exists(ABSENT) == [False] * MANY
    assert empty.take() == (0, 1)
    assert empty.tier.exists(ABSENT[::-1]) == [False] * MANY
    assert empty.take() == (0, 0)


def test_a_small_namespace_costs_one_request(empty: Counted) -> None:
    for key in PRESENT[:5]:
        put(empty.tier, key)
    empty.clock.now += 1e6
    assert empty.tier.exists(PRESENT[:40]) == [True] * 5 + [False] * 35
    assert empty.take() == (0, 1)


def test_few_keys_are_asked_for_one_by_one(empty: Counted) -> None:
    put(empty.tier, key_of(1))
    empty.clock.now += 1e6
    few = module.SURVEY_FROM - 1
    assert empty.tier.exists([key_of(i) for i in range(few)]) == [i == 1 for i in range(few)]
    assert empty.take() == (few, 0)


def test_many_keys_are_asked_for_by_a_listing(counted: Counted) -> None:
    asked = [key for pair in zip(PRESENT, ABSENT, strict=True) for key in pair]
    assert counted.tier.exists(asked) == [True, False] * MANY
    heads, lists = counted.take()
    assert heads == 0
    assert 2 <= lists <= 1 + 2 * (MANY // PAGE_KEYS + 1), "a first page, then parts"
    figures = counted.tier.figures()
    assert (figures["head_round_trips"], figures["list_round_trips"]) == (heads, lists)
    assert figures["surveys"] == 1
    assert figures["looked_up_blocks"] == 2 * MANY


def test_what_was_listed_is_believed(counted: Counted) -> None:
    counted.tier.exists(PRESENT)
    counted.take()
    assert counted.tier.exists(PRESENT + ABSENT) == [True] * MANY + [False] * MANY
    assert counted.take() == (0, 0)
    counted.clock.now += 6.0  # absence is believed for less
    assert all(counted.tier.exists(PRESENT))
    assert counted.take() == (0, 0)
    assert not any(counted.tier.exists(ABSENT[:10]))
    assert counted.take() == (10, 0)
    counted.clock.now += 600.0
    assert all(counted.tier.exists(PRESENT[:10]))
    assert counted.take() == (10, 0)


def test_a_listing_that_does_not_pay_is_not_read(counted: Counted, monkeypatch) -> None:
    """32 keys of 1,200: one page shows that, and is kept; for a minute nobody asks again."""
    monkeypatch.setattr(module, "HEADS_PER_PAGE", 30)
    last = sorted(PRESENT)[-8:]
    assert counted.tier.exists([*PRESENT[:16], *ABSENT[:16]]) == [True] * 16 + [False] * 16
    heads, lists = counted.take()
    assert lists == 1
    assert 16 <= heads < 32
    assert counted.tier.exists([*last, *ABSENT[16:48]]) == [True] * 8 + [False] * 32
    assert counted.take() == (40, 0)
    counted.clock.now += 61.0
    counted.tier.exists(ABSENT[16:48])
    assert counted.take() == (32, 1)


def test_lookups_at_once_make_one_survey(counted: Counted) -> None:
    """A long prompt arrives as many calls; they wait for the survey of the first."""
    counted.proxy.behaviour = Behaviour(delay_s=0.3)
    answers: dict[int, list[bool]] = {}

    def look_up(i: int) -> None:
        answers[i] = counted.tier.exists(PRESENT[i : i + 100] + ABSENT[i : i + 100])

    starts = range(0, MANY, 100)
    threads = [threading.Thread(target=look_up, args=(i,)) for i in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[i] == [True] * 100 + [False] * 100 for i in starts)
    heads, lists = counted.take()
    assert heads == 0
    assert lists <= 5


def test_a_failed_survey_fails_its_lookup_and_no_later_one(counted: Counted) -> None:
    counted.proxy.rules = [Rule(Answer(503), method="GET", times=3)]
    with pytest.raises(TierThrottledError):
        counted.tier.exists(PRESENT)
    counted.proxy.rules = []
    assert all(counted.tier.exists(PRESENT))


def test_a_failed_head_stops_the_others(counted: Counted) -> None:
    counted.proxy.rules = [Rule(Answer(503), method="HEAD")]
    with pytest.raises(TierThrottledError):
        counted.tier.exists(PRESENT[:30])
    assert counted.take()[0] <= 3 * 16, "16 at once, each with two retries"


@pytest.mark.parametrize("first", [0, 77, 255])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("estimate", [1.0, 999.0, 3000.0, 60_000.0, 5e6])
def test_parts_cover_everything_once(
    counted: Counted, scheme: str, estimate: float, first: int
) -> None:
    """Also those for stores that can only list whole directories."""
    store = open_store(settings_for(counted.proxy, url=counted.tier._store.place.url))
    store = dataclasses.replace(store, place=dataclasses.replace(store.place, scheme=scheme))
    existence = Existence(store, NAMESPACE, None, None)
    parts = existence._parts(estimate, first)
    assert [part.first for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].first, parts[-1].end) == (first, 256)
    if scheme == "gs" or estimate > 5e5:
        assert len(parts) == 256 - first
    if (estimate, first) in ((3000.0, 0), (3000.0, 77), (5e6, 255), (1.0, 255)):
        found = [key for part in parts for key in existence._list(part)]
        assert sorted(found) == sorted(key for key in PRESENT if key[0] >= first)


def test_paths_and_keys() -> None:
    key = BlockKey(bytes.fromhex("abcd") + bytes(4))
    assert path_of("n", key) == "n/ab/abcd00000000"
    assert key_of_path(path_of("n", key)) == key
    for path in ("n/namespace.json", "n/ac/abcd", "n/ab/xy", "n/ab/ab cd", "n/ab/", "abcd"):
        assert key_of_path(path) is None
