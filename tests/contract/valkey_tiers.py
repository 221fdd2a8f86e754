"""The valkey tier over the servers of these tests, and a look past it."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import valkey

from kvtier.core.types import BlockKey, Done, JobId
from kvtier.drivers.base import JobMetadata, SecondaryTierManager
from kvtier.errors import KVTierError, TierError
from kvtier.testing.blocks import NAMESPACE, ArraySlots, Slots, block_of, key_of
from kvtier.tiers.valkey.keys import Names
from kvtier.tiers.valkey.settings import ValkeySettings
from kvtier.tiers.valkey.tier_type import ValkeyTierType

if TYPE_CHECKING:
    from kvtier.tiers.valkey.tier import ValkeyTier

PATIENCE_S = 20.0
SHORT_MS = 1000
"""Timeout of a request that a test has fail, and that is met by all others on a busy machine."""

_numbers = itertools.count()


def open_tier(url: str, namespace: str = NAMESPACE, **options: Any) -> ValkeyTier:
    """A tier as the driver opens it, with short timeouts."""
    given = {"url": url, "request_timeout_ms": 2_000, **options}
    return ValkeyTierType().open(ValkeySettings(**given), namespace, {})


def fresh_prefix() -> str:
    """Keys that no other test uses, so that one server serves many tests."""
    return f"t{next(_numbers)}-{secrets.token_hex(4)}:"


def past(port: int, **options: Any) -> valkey.Valkey:
    """Another client of the server."""
    return valkey.Valkey(port=port, **options)


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something that another thread or process does; a server may refuse to say, as one
    does that loads its data."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()

    def is_so() -> bool:
        with suppress(TierError):
            return bool(true())
        return False

    while not is_so():
        assert time.monotonic() < deadline, f"it does not happen: {what}"
        pause.wait(0.01)


def names_of(prefix: str, i: int, num_parts: int = 2) -> list[bytes]:
    """Under which a block lies."""
    return Names(prefix, NAMESPACE).of(key_of(i), num_parts)


def outcome(call: Callable[[], object]) -> BaseException | None:
    """What a call failed with."""
    try:
        call()
    except KVTierError as error:
        return error
    return None


def move(
    driver: SecondaryTierManager,
    job_id: int,
    kind: str,
    keys: list[BlockKey],
    slots: Slots | None = None,
) -> Done:
    """Do a job; what it loaded is compared."""
    slots = slots or ArraySlots(len(keys))
    for i, key in enumerate(keys):
        if kind == "store":
            slots.fill(i, block_of(key))
    views = slots.views(len(keys), kind == "store")
    job = JobMetadata(JobId(job_id), tuple(keys), views, NAMESPACE)
    (driver.submit_store if kind == "store" else driver.submit_load)(job)
    done: list[Done] = []
    until(
        lambda: (
            done or done.extend(c for c in driver.get_finished() if isinstance(c, Done)) or done
        ),
        "the job ends",
    )
    if kind == "load":
        assert all(slots.content(i) == block_of(k) for i, k in enumerate(keys) if k in done[0].ok)
    return done[0]
