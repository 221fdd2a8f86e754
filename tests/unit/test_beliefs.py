from __future__ import annotations

import pytest

from kvtier.testing.blocks import key_of
from kvtier.tiers.object import beliefs as module
from kvtier.tiers.object.beliefs import Beliefs

K = [key_of(i) for i in range(8)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def beliefs(clock: Clock) -> Beliefs:
    return Beliefs(100.0, 5.0, clock)


def test_nothing_is_known_at_first(beliefs: Beliefs) -> None:
    assert beliefs.answers(K[:2]) == [None, None]


def test_what_was_seen_is_believed_longer_than_what_was_not(beliefs, clock) -> None:
    beliefs.learn(K[0], True, clock.now)
    beliefs.learn(K[1], False, clock.now)
    assert beliefs.answers(K[:3]) == [True, False, None]
    clock.now += 4.9
    assert beliefs.answers(K[:3]) == [True, False, None]
    clock.now += 0.2
    assert beliefs.answers(K[:3]) == [True, None, None]
    clock.now += 94.8
    assert beliefs.answers(K[:3]) == [True, None, None]
    clock.now += 0.2
    assert beliefs.answers(K[:3]) == [None, None, None]


def test_a_listing_says_of_all_others_that_they_were_absent(beliefs, clock) -> None:
    beliefs.learn_all(K[:2], clock.now)
    assert beliefs.answers(K[:4]) == [True, True, False, False]
    clock.now += 5.1
    assert beliefs.answers(K[:4]) == [True, True, None, None]


def test_what_happened_during_a_listing_is_newer(beliefs, clock) -> None:
    asked_at = clock.now
    clock.now += 1
    beliefs.learn(K[0], False, clock.now)  # we deleted it
    beliefs.learn(K[1], True, clock.now)  # and wrote this
    beliefs.learn_all([K[0]], asked_at)
    assert beliefs.answers(K[:3]) == [False, True, False]


def test_a_newer_answer_replaces_an_older_one(beliefs, clock) -> None:
    beliefs.learn(K[0], True, clock.now)
    clock.now += 1
    beliefs.learn(K[0], False, clock.now)
    assert beliefs.answers(K[:1]) == [False]
    beliefs.learn(K[0], True, clock.now - 1)
    assert beliefs.answers(K[:1]) == [False]


def test_a_belief_that_ended_is_not_an_answer_of_a_listing_before(beliefs, clock) -> None:
    """A block that was seen long ago, and a listing since then without it."""
    beliefs.learn(K[0], True, clock.now)
    clock.now += 200
    beliefs.learn_all([], clock.now)
    assert beliefs.answers(K[:1]) == [False]


def test_a_listing_corrects_what_was_believed_before(beliefs, clock) -> None:
    """Somebody deleted a block: a whole listing later shows it."""
    beliefs.learn(K[0], True, clock.now)
    clock.now += 1
    beliefs.learn_all([K[1]], clock.now)
    assert beliefs.answers(K[:2]) == [False, True]


def test_they_are_bounded(beliefs, clock, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_BELIEFS", 4)
    for key in K[:6]:
        beliefs.learn(key, True, clock.now)
    assert len(beliefs) == 4
    assert beliefs.answers(K[:6]) == [None, None, True, True, True, True]
    beliefs.learn(K[2], True, clock.now)  # renewed: now K[3] is the oldest
    beliefs.learn(K[0], True, clock.now)
    assert beliefs.answers(K[:6]) == [True, None, True, None, True, True]
