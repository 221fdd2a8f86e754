"""The ledger of a root: damage, locks, leases, and who is a member."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import capacity_use
import pytest
from capacity_processes import books_of, until, usage
from capacity_use import Use

from kvtier.errors import TierError
from kvtier.testing.blocks import BLOCK_BYTES
from kvtier.tiers.fs.accounts import PAGE_BYTES
from kvtier.tiers.fs.ledger import COPY_BYTES, LedgerBusyError, LedgerFile
from kvtier.tiers.fs.members import Member, read_members, remove_dead
from kvtier.tiers.fs.shared_space import IDLE_S, LEASE_S, SharedSpace

if TYPE_CHECKING:
    from collections.abc import Callable

short_memory = capacity_use.short_memory
use = capacity_use.use


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes(2 * COPY_BYTES)),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(3000)),
        lambda path: path.write_bytes(path.read_bytes()[:30]),
        lambda path: path.unlink(),
    ],
    ids=["zeros", "empty", "garbage", "truncated", "gone"],
)
def test_a_damaged_ledger_is_rebuilt(
    use: Callable[..., Use], damage: Callable[[Path], object]
) -> None:
    first = use(40)
    first.write(0, 30)
    first.close()
    damage(first.root / ".kvtier" / "ledger")
    second = use(40)
    assert second.here(0, 30) == set(range(30)), "reading does not wait"
    assert not books_of(second.root).known or second.is_exact()
    until(second.is_exact)
    assert second.write(100, 8) == 8
    until(lambda: second.write(200, 40) and second.figure("evicted_blocks") > 0)
    assert usage(second.root) <= 40 * BLOCK_BYTES


def test_a_ledger_that_is_damaged_while_members_live(use: Callable[..., Use]) -> None:
    it = use(40)
    it.write(0, 30)
    (it.root / ".kvtier" / "ledger").write_bytes(os.urandom(2 * COPY_BYTES))
    until(it.is_exact)
    until(lambda: it.write(100, 80) and it.figure("evicted_blocks") > 0)
    assert usage(it.root) <= 40 * BLOCK_BYTES


@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_copy_of_the_ledger_costs_nothing(tmp_path: Path, copy: int) -> None:
    ledger = LedgerFile(str(tmp_path / "ledger"))
    for granted in (1, 2, 3, 4):
        with ledger.change(1.0) as accounts:
            accounts.granted = granted
    with (tmp_path / "ledger").open("r+b") as file:
        file.seek(copy * COPY_BYTES)
        file.write(b"\xff" * 40)
    with ledger.change(1.0) as accounts:
        assert accounts.granted == (4 if copy == 1 else 3)
    ledger.close()


def test_a_change_that_raises_is_not_written(tmp_path: Path) -> None:
    ledger = LedgerFile(str(tmp_path / "ledger"))
    with ledger.change(1.0) as accounts:
        accounts.granted = 1
    with contextlib.suppress(KeyError), ledger.change(1.0) as accounts:
        accounts.granted = 2
        raise KeyError
    with ledger.change(1.0) as accounts:
        assert accounts.granted == 1
    ledger.close()


def test_a_ledger_that_somebody_keeps_is_given_up_on(tmp_path: Path) -> None:
    space = SharedSpace(tmp_path, 10**6, 0)
    with open(tmp_path / ".kvtier" / "ledger", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LedgerBusyError), space.ledger.change(0.01):
            pass
        assert not space.take(4096)
        with pytest.raises(TierError, match=r"fuser"):
            SharedSpace(tmp_path, 10**6, 0)
    space.note_room()
    assert space.take(4096)
    space.close()


def test_a_lease_that_ran_out_is_renewed_before_anything_is_spent(tmp_path: Path) -> None:
    now = [0.0]
    space = SharedSpace(tmp_path, 10**9, 0, clock=lambda: now[0])
    assert space.take(4096)
    with space.ledger.change(1.0) as accounts:
        del accounts.members[space.member_id]  # it was taken for dead
        accounts.granted = 10**9
    assert space.take(4096), "spare is good for a while"
    now[0] += LEASE_S
    before = books_of(tmp_path).handed_out
    space.take(4096)
    assert space.member_id in books_of(tmp_path).members
    assert books_of(tmp_path).handed_out > before
    space.close()


def test_idle_members_give_their_spare_back(tmp_path: Path) -> None:
    now = [0.0]
    space = SharedSpace(tmp_path, 10**9, 0, clock=lambda: now[0])
    assert space.take(4096)
    assert books_of(tmp_path).granted > 4096
    now[0] += IDLE_S / 2
    space.report()
    now[0] += IDLE_S / 2 + 1
    space.report()
    assert books_of(tmp_path).granted == 4096
    assert books_of(tmp_path).members[space.member_id].spare == 0
    space.close()


def test_threads_together_get_what_is_there_and_no_more(tmp_path: Path) -> None:
    space = SharedSpace(tmp_path, 1000 * PAGE_BYTES, 0)
    taken: list[int] = []

    def take() -> None:
        count = 0
        for pages in (5, 3, 1):
            for _ in range(100):
                if space.take(pages * PAGE_BYTES):
                    count += pages
                else:
                    space.note_room()
        taken.append(count)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000
    space.give_back(10 * PAGE_BYTES)
    space.report()
    space.note_room()
    assert sum(space.take(PAGE_BYTES) for _ in range(20)) == 10
    space.close()


def test_living_members_are_never_taken_for_dead(tmp_path: Path) -> None:
    control = tmp_path / ".kvtier"
    (control / "members").mkdir(parents=True)
    stop = threading.Event()
    dead: list[str] = []

    def bury() -> None:
        while not stop.is_set():
            dead.extend(remove_dead(str(control), time.time()))

    thread = threading.Thread(target=bury)
    thread.start()
    for _ in range(300):
        member = Member(str(control), "files")
        assert member.is_current()
        member.close()
    stop.set()
    thread.join()
    assert os.listdir(control / "members") == []
    assert dead == []


def test_a_living_member_is_left_alone_and_a_dead_one_is_not(tmp_path: Path) -> None:
    control = tmp_path / ".kvtier"
    (control / "members").mkdir(parents=True)
    member = Member(str(control), "files")
    assert remove_dead(str(control), time.time()) == []
    assert list(read_members(str(control))) == [member.id]
    (control / "members" / ("0" * 16)).write_text("{}")
    assert remove_dead(str(control), time.time()) == ["0" * 16]
    member.close()


def test_whoever_owns_too_much_owes_while_another_waits(tmp_path: Path) -> None:
    total = 100 * PAGE_BYTES
    rich = SharedSpace(tmp_path, total, 0, owning=True)
    poor = SharedSpace(tmp_path, total, 0, owning=True)
    assert rich.take(90 * PAGE_BYTES)
    assert poor.take(10 * PAGE_BYTES)
    rich.measure_owned = lambda: 90 * PAGE_BYTES
    poor.measure_owned = lambda: 10 * PAGE_BYTES
    poor.report()
    rich.report()
    assert rich.owed() == 0, "nobody waits"
    assert not poor.take(20 * PAGE_BYTES)
    rich.report()
    assert rich.owed() == 20 * PAGE_BYTES
    rich.give_back(20 * PAGE_BYTES)
    rich.measure_owned = lambda: 70 * PAGE_BYTES
    assert rich.owed() == 0
    assert not rich.take(5 * PAGE_BYTES), "it is for the one who waits"
    rich.report()
    poor.note_room()
    assert poor.take(20 * PAGE_BYTES)
    rich.close()
    poor.close()


def test_different_capacities_are_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = SharedSpace(tmp_path, 10**9, 0)
    with caplog.at_level(logging.WARNING):
        second = SharedSpace(tmp_path, 10**6, 5)
        second.report()
    assert sum("different capacities" in record.getMessage() for record in caplog.records) == 1
    first.report()
    assert first.figures()["capacity_bytes"] == 10**6
    second.close()
    first.report()
    assert first.figures()["capacity_bytes"] == 10**9
    first.close()
