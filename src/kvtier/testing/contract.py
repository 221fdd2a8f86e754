"""What every tier and every driver must do, as tests. Subclass, provide `make`, run pytest.

A tier, in its package's tests:

    class TestMyTier(TierContract):
        def make(self) -> Tier:
            return MyTier(...)           # empty, each time it is called

        def reopen(self) -> Tier:        # if blocks survive: the place of the last `make`, again
            return MyTier(...)

A driver (`SecondaryTierManager`) that moves the bytes itself:

    class TestMyDriver(DriverContract):
        def make(self) -> SecondaryTierManager:
            return MyDriver(...)

Slots are a bytearray's unless `make_slots` makes others, for a driver that needs a real region. One
that runs any `Tier` gives `make_over(tier)` too, and is then tested with tiers that fail, hang,
lie and spoil bytes. What needs an optional ability is skipped where the ability is missing. Add
tests of your own beside these that look at the medium past the tier (read the file, ask the
server): a writer that is only checked with its own reader may be wrong in both.

The bytes of a block are a function of its key, so every load can be checked.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvtier.testing.tier_contract", "kvtier.testing.driver_contract")

from kvtier.testing.driver_contract import DriverContract  # noqa: E402
from kvtier.testing.tier_contract import TierContract  # noqa: E402

__all__ = ["DriverContract", "TierContract"]
