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

from kvtier.errors import TierError
from kvtier.testing.blocks import NAMESPACE
from kvtier.tiers.valkey.settings import ValkeySettings
from kvtier.tiers.valkey.tier_type import ValkeyTierType

if TYPE_CHECKING:
    from kvtier.tiers.valkey.tier import ValkeyTier

PATIENCE_S = 20.0

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
