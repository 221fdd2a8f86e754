"""What the tests of the process driver stand on: a region, a virtual clock, a scripted tier."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote_tier import ADDRESS, Remote

from kvtier.core.types import Completion, Done
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.testing.blocks import SlotsOfRegion, block_of, key_of
from kvtier.testing.contract import DriverContract
from kvtier.testing.driver_contract import PATIENCE_S
from kvtier.testing.faults import FaultyTier
from kvtier.tiers.memory import MemoryTier

drive = DriverContract()


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """Drivers and what they run on.

    Attributes:
        clock: of the drivers.
        script: of the tier in their processes.
    """

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.script = FaultyTier(MemoryTier())
        self.slots = SlotsOfRegion()
        self.drivers: list[ProcessDriver] = []
        self.remote = Remote(str(folder / "remote"), self.script)
        os.environ[ADDRESS] = str(folder / "remote")

    def make(self, hang_s: float = 5.0, executable: str | None = None, **options: Any) -> Any:
        launch = Launch("x", "remote_tier:RemoteTierType", options)
        if executable is not None:
            launch = Launch("x", "remote_tier:RemoteTierType", options, executable=executable)
        self.drivers.append(
            ProcessDriver(launch, self.slots.region, lambda _: {"who": "facts"}, hang_s, self.clock)
        )
        return self.drivers[-1]

    def close(self) -> None:
        self.script.heal()
        for driver in self.drivers:
            assert driver.close(), "a process is left"
        self.remote.close()
        self.slots.region.close()
        del os.environ[ADDRESS]

    def submit(self, driver: ProcessDriver, operation: str, job_id: int, *numbers: int) -> None:
        keys = [key_of(number) for number in numbers]
        slots = self.slots.take(len(keys))
        if operation == "store":
            for i, key in enumerate(keys):
                slots.fill(i, block_of(key))
        job = drive.job(job_id, keys, None if operation == "lookup" else slots)
        getattr(driver, f"submit_{operation}")(job)

    def poll(
        self,
        driver: ProcessDriver,
        until: Callable[[list[Completion]], object],
        pass_s: float = 0.0,
    ) -> list[Completion]:
        """Poll until something holds of all that was finished; `pass_s` pass before each poll."""
        finished: list[Completion] = []
        deadline = time.monotonic() + PATIENCE_S
        while not until(finished):
            assert time.monotonic() < deadline, "it does not come to pass"
            self.clock.now += pass_s
            finished += driver.get_finished()
            time.sleep(0.0005)
        return finished

    def done(self, driver: ProcessDriver, job_id: int, pass_s: float = 0.0) -> Done:
        """The end of a job."""
        finished = self.poll(
            driver, lambda f: any(isinstance(c, Done) and c.job == job_id for c in f), pass_s
        )
        (done,) = [each for each in finished if isinstance(each, Done) and each.job == job_id]
        return done

    def reach(self, driver: ProcessDriver, operation: str, calls: int = 1) -> None:
        """Poll until the process makes so many calls of an operation."""
        self.poll(driver, lambda _: self.script.calls[operation] >= calls)  # type: ignore[index]

    def kill(self, driver: ProcessDriver, number: int = signal.SIGKILL) -> None:
        assert driver.pid is not None
        os.kill(driver.pid, number)
