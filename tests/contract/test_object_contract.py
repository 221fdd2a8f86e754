from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

pytest.importorskip("obstore")

from object_tiers import open_tier, settings_for

from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.testing.blocks import Slots, SlotsOfRegion
from kvtier.testing.contract import DriverContract, TierContract

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.objects import ObjectTier


class ObjectTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, s3_credentials: None, request: pytest.FixtureRequest) -> None:
        self.server = request.getfixturevalue(self.server_name)

    def make(self) -> ObjectTier:
        self.settings = settings_for(self.server)
        return open_tier(self.settings)

    def reopen(self) -> ObjectTier:
        return open_tier(self.settings)


class TestObjectTierOnJuice(ObjectTierContract):
    server_name = "juice"


class TestObjectTierOnSeaweed(ObjectTierContract):
    server_name = "seaweed"


class ObjectDriverContract(DriverContract):
    @pytest.fixture(autouse=True)
    def place(self, s3_credentials: None, request: pytest.FixtureRequest) -> None:
        self.server = request.getfixturevalue(self.server_name)

    def make(self) -> SecondaryTierManager:
        settings = settings_for(self.server)
        return ThreadedDriver("object", lambda namespace: open_tier(settings, namespace), 8)


class TestObjectDriverOnJuice(ObjectDriverContract):
    server_name = "juice"


class TestObjectDriverOnSeaweed(ObjectDriverContract):
    server_name = "seaweed"


class TestObjectDriverInAProcess(DriverContract):
    """As below an engine."""

    @pytest.fixture(autouse=True)
    def place(self, juice: S3Server, s3_credentials: None) -> Iterator[None]:
        self.server = juice
        self.slots = SlotsOfRegion()
        yield
        self.slots.region.close()

    def make_slots(self, num_slots: int) -> Slots:
        return self.slots.take(num_slots)

    def make(self) -> SecondaryTierManager:
        options = msgspec.to_builtins(settings_for(self.server))
        launch = Launch("object", "object", options)
        return ProcessDriver(launch, self.slots.region, lambda _: {"model": "tiny"})
