"""The process driver does what every driver does, also over a tier that misbehaves."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_tier import ADDRESS, Remote

from kvtier.core.types import Done, Fault
from kvtier.drivers.base import SecondaryTierManager
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.testing.blocks import Slots, SlotsOfRegion, key_of
from kvtier.testing.contract import DriverContract
from kvtier.testing.driver_contract import until
from kvtier.testing.faults import FaultyTier, Hang
from kvtier.tiers.base import Tier
from kvtier.tiers.registry import decode_settings, load_tier_type


class OverAProcess(DriverContract):
    def options(self) -> dict[str, object]:
        return {}

    kind = "memory"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.root = tmp_path
        self.slots = SlotsOfRegion()
        self.remotes: list[Remote] = []
        monkeypatch.setenv(ADDRESS, str(tmp_path / "remote"))
        yield
        for remote in self.remotes:
            remote.close()
        self.slots.region.close()

    def make_slots(self, num_slots: int) -> Slots:
        return self.slots.take(num_slots)

    def run(self, kind: str, options: dict[str, object]) -> ProcessDriver:
        tier_type = load_tier_type(kind, "type")
        tier_type.preflight(decode_settings(tier_type, options, "test"), "test")
        return ProcessDriver(Launch("test", kind, options), self.slots.region, lambda _: {})

    def make(self) -> SecondaryTierManager:
        return self.run(self.kind, self.options())


class TestOverMemory(OverAProcess):
    def make_over(self, tier: Tier) -> SecondaryTierManager | None:
        if not isinstance(tier, FaultyTier):
            return None
        self.remotes.append(Remote(str(self.root / "remote"), tier))
        return self.run("remote_tier:RemoteTierType", {})

    def test_close_does_not_wait_for_a_hung_block(
        self, faulty: FaultyTier, shaky: SecondaryTierManager
    ) -> None:
        """Unlike threads, a process can be ended."""
        released = threading.Event()
        faulty.script("write", Hang(released))
        keys = [key_of(i) for i in range(200)]
        try:
            shaky.submit_store(self.job(1, keys, self.make_slots(200), readonly=True))
            until(lambda: faulty.calls["write"])
            assert shaky.close(5.0)
            assert shaky.get_finished() == [Done(1, frozenset(), Fault.UNREACHABLE)]
        finally:
            released.set()


class TestOverFiles(OverAProcess):
    kind = "fs"

    def options(self) -> dict[str, object]:
        return {"root_dir": str(self.root / "blocks"), "layout": "files"}

    @pytest.fixture(autouse=True)
    def root_dir(self, tmp_path: Path) -> None:
        (tmp_path / "blocks").mkdir(mode=0o700)

    def test_a_block_under_another_key_is_never_served(self) -> None:
        driver = self.make()
        self.store(driver, 1, [key_of(1), key_of(2)])
        files = {path.name: path for path in self.root.rglob("*") if path.is_file()}
        shutil.copyfile(files[key_of(1).hex()], files[key_of(2).hex()])
        assert self.load(driver, 2, [key_of(1), key_of(2)]) == {key_of(1)}
        assert driver.counters().corrupt_blocks == 1
        assert driver.close()


class TestOverSegments(OverAProcess):
    kind = "fs"

    def options(self) -> dict[str, object]:
        return {"root_dir": str(self.root / "blocks"), "layout": "segments"}

    @pytest.fixture(autouse=True)
    def root_dir(self, tmp_path: Path) -> None:
        (tmp_path / "blocks").mkdir(mode=0o700)


del OverAProcess
