"""A process that stands for an engine: it starts an I/O process, says which, and ends somehow.

    engine_life.py HOW [REMOTE]

With REMOTE the tier hangs in a write when the end comes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from remote_tier import ADDRESS

from kvtier.core.types import Done
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.testing.blocks import SlotsOfRegion, key_of
from kvtier.testing.contract import DriverContract


def engine(how: str) -> None:
    slots = SlotsOfRegion(16)
    tier = "remote_tier:RemoteTierType" if ADDRESS in os.environ else "memory"
    driver = ProcessDriver(Launch("x", tier, {}), slots.region, lambda _: {})
    if tier == "memory":
        DriverContract().wait(driver, *submit(driver, slots))
    else:
        submit(driver, slots)
    if how == "forked":
        holder = os.fork()  # holds the socket's other end, and outlives this process
        if holder == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(holder, flush=True)
    print(driver.pid, flush=True)
    sys.stdin.readline()
    if how == "exit":
        sys.exit(0)
    elif how == "exception":
        raise RuntimeError("the engine failed")
    elif how == "_exit":
        os._exit(1)
    elif how == "close":
        driver.close()
        finished = driver.get_finished()
        print([each for each in finished if isinstance(each, Done)], flush=True)
    else:
        time.sleep(60)  # to be killed


def submit(driver: ProcessDriver, slots: SlotsOfRegion) -> list[int]:
    job = DriverContract.job(1, [key_of(1)], slots.take(1), readonly=True)
    driver.submit_store(job)
    driver.get_finished()
    return [1]


if __name__ == "__main__":
    how = sys.argv[1]
    if len(sys.argv) > 2:
        os.environ[ADDRESS] = sys.argv[2]
    if how == "daemonic":  # as vLLM runs its engine
        child = multiprocessing.get_context("spawn").Process(
            target=engine, args=("wait",), daemon=True
        )
        child.start()
        sys.stdin.readline()
        sys.exit(0)  # ends the daemonic child
    engine(how)
