"""Caches without pins that a policy serves, and long traces of accesses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.core.policies.arc import ARC
from kvtier.core.policies.s3fifo import S3FIFO
from kvtier.core.pool import Policy
from kvtier.testing.engine import key_of

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
