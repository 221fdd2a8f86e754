from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest
from capacity_processes import UserProcess, books_of, files_in, frozen, until, usage, users

from kvtier.testing.blocks import BLOCK_BYTES
from kvtier.tiers.fs.members import read_members
from kvtier.tiers.fs.temporary import is_temp

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 60 * BLOCK_BYTES


def is_exact(root: Path) -> bool:
    """Whether the books are what lies on disk and what members say that they have left."""
    accounts = books_of(root)
    spare = sum(entry.spare for entry in accounts.members.values())
    return accounts.granted == usage(root) + spare


def sweeper_of(processes: list[UserProcess]) -> UserProcess:
    """The one that sweeps, once there is one."""
    found: list[UserProcess] = []
    until(lambda: found.extend(user for user in processes if user.figures()["is_sweeper"]) or found)
    return found[0]


def test_writers_together_never_pass_the_capacity(tmp_path: Path) -> None:
    with users(tmp_path, 3, CAPACITY) as processes:
        for i, user in enumerate(processes):
            user.tell(f"churn {i}")
        largest = 0
        for _ in range(60):
            time.sleep(0.03)
            with frozen(processes):
                largest = max(largest, usage(tmp_path))
                assert usage(tmp_path) <= CAPACITY
        written = [int(user.ask("")) for user in processes]
    assert min(written) > 0
    assert sum(written) * BLOCK_BYTES > 2 * CAPACITY, "not enough to show anything"
    assert largest > CAPACITY / 2, "room was wasted"


def test_kills_at_any_instant_leave_readable_books_that_become_exact(tmp_path: Path) -> None:
    choice = random.Random(7)
    with users(tmp_path, 2, CAPACITY) as processes:
        for round_number in range(12):
            for i, user in enumerate(processes):
                user.tell(f"churn {10 * round_number + i}")
            time.sleep(choice.uniform(0.02, 0.3))
            victim = choice.randrange(2)
            processes[victim].kill()
            assert books_of(tmp_path).known, "the ledger was damaged"
            with frozen(processes):
                assert usage(tmp_path) <= CAPACITY
            processes[1 - victim].ask("")
            processes[victim].end()
            processes[victim] = UserProcess(tmp_path, CAPACITY)
        until(lambda: not any(is_temp(path.name) for path in files_in(tmp_path)))
        until(lambda: len(os.listdir(tmp_path / ".kvtier" / "members")) == 2)
        # what one that was killed had left counts as granted until a scan after its burial
        until(lambda: len(books_of(tmp_path).members) == 2)
        until(lambda: is_exact(tmp_path))
        assert len(read_members(str(tmp_path / ".kvtier"))) == 2
    assert os.listdir(tmp_path / ".kvtier" / "members") == []
    assert books_of(tmp_path).granted == usage(tmp_path)


def test_when_the_sweeper_is_killed_another_one_goes_on(tmp_path: Path) -> None:
    with users(tmp_path, 2, CAPACITY) as processes:
        first = sweeper_of(processes)
        (second,) = (user for user in processes if user is not first)
        assert not second.figures()["is_sweeper"]
        first.kill()
        second.tell("churn 1")
        until(lambda: usage(tmp_path) > CAPACITY / 2)
        second.ask("")
        assert sweeper_of([second]) is second
        until(lambda: second.ask("write 20000 100") and second.figures()["evicted_blocks"] > 50)


def test_a_sweeper_that_is_stopped_is_replaced_and_stands_down(tmp_path: Path) -> None:
    with users(tmp_path, 2, CAPACITY) as processes:
        first = sweeper_of(processes)
        (second,) = (user for user in processes if user is not first)
        first.signal(signal.SIGSTOP)
        until(lambda: second.figures()["is_sweeper"])
        until(lambda: second.ask("write 0 200") and second.figures()["evicted_blocks"] > 100)
        first.signal(signal.SIGCONT)
        until(lambda: not first.figures()["is_sweeper"])
        assert usage(tmp_path) <= CAPACITY
        until(lambda: is_exact(tmp_path))


def test_a_stopped_process_that_has_the_ledger_costs_writes_and_no_more(tmp_path: Path) -> None:
    with users(tmp_path, 2, CAPACITY) as processes:
        assert processes[0].ask("write 0 1") == "1"
        assert processes[1].ask("lock") == "locked"
        started = time.monotonic()
        assert int(processes[0].ask("write 100 40")) < 40
        assert time.monotonic() - started < 50, "each refusal is bounded, most are remembered"
        assert processes[0].ask("read 0 1") == "1"
        assert processes[1].ask("") == "unlocked"
        until(lambda: processes[0].ask("write 200 1") == "1")


def test_the_smallest_capacity_counts(tmp_path: Path) -> None:
    large, small = UserProcess(tmp_path, CAPACITY), UserProcess(tmp_path, CAPACITY // 2)
    try:
        large.ask("write 0 200")
        assert usage(tmp_path) <= CAPACITY // 2
        small.end()
        until(lambda: large.ask("write 300 50") and usage(tmp_path) > CAPACITY // 2)
    finally:
        small.end()
        large.end()


@pytest.mark.parametrize("capacity", [20, 7, 3])
def test_a_capacity_of_a_few_blocks_is_kept_and_used(tmp_path: Path, capacity: int) -> None:
    with users(tmp_path, 2, capacity * BLOCK_BYTES) as processes:
        for i, user in enumerate(processes):
            user.tell(f"churn {i}")
        largest = 0
        for _ in range(20):
            time.sleep(0.02)
            with frozen(processes):
                largest = max(largest, usage(tmp_path))
        for user in processes:
            user.ask("")
    assert 0 < largest <= capacity * BLOCK_BYTES
