"""Beliefs about one tier: shared, bounded, corrected by facts."""

from __future__ import annotations

import pytest

from kvtier.core.presence import Belief, Presence
from kvtier.core.types import JobId
from kvtier.testing.engine import key_of

A, B, C, D = (key_of(i) for i in range(4))


@pytest.fixture
def presence() -> Presence:
    return Presence(known_max=3, absent_ttl_s=10.0)


def test_absence_is_believed_for_a_while(presence: Presence) -> None:
    assert presence.get(A, 0.0) is Belief.UNKNOWN
    presence.set_absent([A], 5.0)
    assert presence.get(A, 14.9) is Belief.ABSENT
    assert presence.get(A, 15.0) is Belief.UNKNOWN


def test_presence_lasts_until_it_is_contradicted(presence: Presence) -> None:
    presence.set_present([A])
    assert presence.get(A, 1e9) is Belief.PRESENT
    assert presence.set_absent([A, B], 0.0) == [A], "only A was believed present"
    assert presence.get(A, 0.0) is Belief.ABSENT


def test_only_news_is_told(presence: Presence) -> None:
    assert presence.set_present([A]) == [A]
    assert presence.set_present([A, B]) == [B]


def test_a_probe_is_known_by_its_number(presence: Presence) -> None:
    presence.set_probing([A], JobId(7))
    assert presence.get(A, 0.0) is Belief.PROBING
    assert presence.probe_of(A) == 7
    presence.set_present([A])
    assert presence.probe_of(A) is None
    assert presence.probe_of(B) is None


def test_a_probe_does_not_hide_what_is_present(presence: Presence) -> None:
    presence.set_present([A])
    presence.set_probing([A], JobId(7))
    assert presence.get(A, 0.0) is Belief.PRESENT


def test_a_probe_that_learnt_less_than_others_is_not_believed(presence: Presence) -> None:
    presence.set_probing([A, B, C], JobId(7))
    presence.set_present([A])
    presence.set_probing([B], JobId(8))
    assert presence.unanswered([A, B, C], JobId(7)) == [C]


def test_the_oldest_beliefs_are_forgotten_first(presence: Presence) -> None:
    presence.set_present([A, B, C])
    presence.set_present([A])
    presence.set_absent([D], 0.0)
    assert presence.get(B, 0.0) is Belief.UNKNOWN
    assert presence.get(A, 0.0) is Belief.PRESENT
    assert len(presence.beliefs) == 3


def test_clear(presence: Presence) -> None:
    presence.set_present([A])
    presence.clear()
    assert presence.get(A, 0.0) is Belief.UNKNOWN
