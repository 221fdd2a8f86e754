"""One process and its root: what the sweeper sees, corrects, deletes, and leaves alone."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from capacity_process import QUICK
from capacity_processes import books_of, files_in, until, usage

import kvtier
from kvtier.errors import TierError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs import shared_space
from kvtier.tiers.fs.accounts import PAGE_BYTES
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.eviction import Remover
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.inventory import Inventory, Place, Store, VictimStore
from kvtier.tiers.fs.ledger import COPY_BYTES, LedgerBusyError, LedgerFile
from kvtier.tiers.fs.members import Member, read_members, remove_dead
from kvtier.tiers.fs.shared_space import IDLE_S, LEASE_S, SharedSpace
from kvtier.tiers.fs.temporary import TempNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.core.types import BlockKey

OTHER = "ab" * 32


class Use:
    """A tier, and its capacity."""

    def __init__(
        self, root: Path, blocks: int | None, min_free: int = 0, namespace: str = NAMESPACE
    ) -> None:
        size = None if blocks is None else blocks * BLOCK_BYTES
        self.root = root
        self.capacity = Capacity(root, size, min_free, settings=QUICK)
        self.tier = FilesTier(root, namespace, {}, self.capacity.space, touch_age_s=0)

    def write(self, first: int, count: int) -> int:
        """How many were written."""
        written = 0
        for i in range(first, first + count):
            with contextlib.suppress(TierFullError):
                self.tier.write(key_of(i), (memoryview(block_of(key_of(i))),))
                written += 1
        return written

    def here(self, first: int, count: int) -> set[int]:
        found = self.tier.exists([key_of(i) for i in range(first, first + count)])
        return {first + i for i, there in enumerate(found) if there}

    def file(self, i: int) -> Path:
        name = key_of(i).hex()
        return self.root / NAMESPACE / name[:3] / name

    def figure(self, name: str) -> float:
        return self.capacity.figures().get(name, 0)

    def is_exact(self) -> bool:
        accounts = books_of(self.root)
        spare = sum(entry.spare for entry in accounts.members.values())
        return accounts.known and accounts.granted == usage(self.root) + spare

    def close(self) -> None:
        self.tier.close()
        self.capacity.close()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or exact books would take half a minute of quiet."""
    monkeypatch.setattr(shared_space, "RECENT_S", 0.5)


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Callable[..., Use]]:
    opened: list[Use] = []

    def make(*args: object, **kwargs: object) -> Use:
        opened.append(Use(tmp_path, *args, **kwargs))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        with contextlib.suppress(OSError):
            each.close()


def age(path: Path, seconds: float) -> None:
    """Have a file be used last so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_new_root_can_be_written_at_once(use: Callable[..., Use]) -> None:
    assert use(8).write(0, 1) == 1


def test_files_removed_by_hand_make_room(use: Callable[..., Use]) -> None:
    it = use(40)
    assert it.write(0, 30) == 30
    for i in range(25):
        it.file(i).unlink()
    until(it.is_exact)
    assert it.write(100, 25) == 25
    assert it.here(25, 5) == set(range(25, 30)), "evicted for nothing"


def test_files_that_others_put_there_count(use: Callable[..., Use]) -> None:
    it = use(40)
    it.write(0, 5)
    for i in range(100, 160):
        it.file(i).parent.mkdir(exist_ok=True)
        it.file(i).write_bytes(block_of(key_of(i)))
    until(lambda: usage(it.root) <= 40 * BLOCK_BYTES)
    until(it.is_exact)


def test_what_was_used_last_stays_also_over_a_restart(use: Callable[..., Use]) -> None:
    first = use(40)
    first.write(0, 30)
    for i in range(30):
        age(first.file(i), 1000 - i)
    first.tier.read(key_of(0), (memoryview(bytearray(BLOCK_BYTES)),))
    first.close()
    second = use(10)
    until(lambda: usage(second.root) <= 10 * BLOCK_BYTES)
    until(second.is_exact)
    left = second.here(0, 30)
    assert 0 in left, "it was used just now"
    assert left - {0} == set(range(30 - len(left) + 1, 30)), "the oldest go first"
    assert len(left) >= 8


def test_a_block_that_was_used_since_it_was_seen_stays(use: Callable[..., Use]) -> None:
    it = use(20)
    it.write(0, 12)
    for i in range(12):
        age(it.file(i), 1000 - i)
    until(lambda: it.figure("inventory_blocks") == 12)
    it.tier.read(key_of(0), (memoryview(bytearray(BLOCK_BYTES)),))
    until(lambda: it.write(100, 20) and it.figure("evicted_blocks") >= 5)
    assert 0 in it.here(0, 1)


def test_times_in_the_future_count_as_now(use: Callable[..., Use]) -> None:
    it = use(20)
    it.write(0, 12)
    for i in range(12):
        age(it.file(i), 300 - i if i % 2 else -300)  # two hosts whose clocks differ by minutes
    until(lambda: it.write(100, 20) and it.figure("evicted_blocks") >= 20)
    assert usage(it.root) <= 20 * BLOCK_BYTES
    until(it.is_exact)


def test_a_reader_keeps_what_it_has_open(use: Callable[..., Use]) -> None:
    it = use(8)
    it.write(0, 1)
    age(it.file(0), 1000)
    with it.file(0).open("rb") as file:
        until(lambda: it.write(100, 8) and not it.here(0, 1))
        assert file.read() == block_of(key_of(0))


def test_listeners_are_told_what_was_evicted(use: Callable[..., Use]) -> None:
    it = use(10)
    told: list[BlockKey] = []
    it.capacity.listen(NAMESPACE, lambda namespace, keys: told.extend(keys))
    it.capacity.listen(OTHER, lambda namespace, keys: pytest.fail("of another namespace"))
    until(lambda: it.write(0, 40) and len(told) >= 10)
    it.close()
    assert set(told) <= {key_of(i) for i in range(40)}
    assert len(told) == it.figure("evicted_blocks")


def test_dead_namespaces_go_first_and_living_ones_stay(use: Callable[..., Use]) -> None:
    for namespace, count, seconds in ((OTHER, 10, 7200), (NAMESPACE, 40, 9000)):
        it = use(60, namespace=namespace)
        it.write(0, count)
        it.close()
        for path in (it.root / namespace).rglob("*"):
            if path.is_file():
                age(path, seconds)
    old, it = use(60, namespace=OTHER), use(60)
    until(lambda: it.write(100, 10) and len(it.here(0, 40)) < 40)
    assert len(old.here(0, 10)) == 10, "it is newer, and somebody holds it"
    until(it.is_exact)
    old.close()
    it.close()
    for path in [it.root / OTHER / "namespace.json", *files_in(it.root / OTHER)]:
        age(path, 7200)
    left = len(it.here(0, 200))
    it = use(left + 8)
    until(lambda: usage(it.root / OTHER) < 4 * BLOCK_BYTES)
    until(it.is_exact)
    assert len(it.here(0, 200)) == left, "the dead made enough room"
    for path in files_in(it.root / OTHER):
        path.unlink()
    until(lambda: not (it.root / OTHER).exists())


def test_what_is_not_kvtiers_is_left_alone_and_told_once(
    use: Callable[..., Use],
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    name = key_of(1).hex()
    for path in (outside / "3f0", outside / name):
        path.mkdir()
    innocent = outside / name[:3]
    innocent.mkdir()
    (innocent / name).write_bytes(bytes(BLOCK_BYTES))
    age(innocent / name, 90_000)
    it = use(8)
    it.write(2, 1)
    place = it.root / NAMESPACE
    foreign = [
        it.root / "README",
        place / "notes.txt",
        it.file(2).parent / "x.bin",
        it.file(2).parent / name.replace(name[:3], "zzz"),
        place / "someone.tmp",
    ]
    for path in foreign:
        path.write_bytes(bytes(BLOCK_BYTES))
        age(path, 90_000)
    (place / name[:3]).symlink_to(innocent)
    link = it.file(2).parent / (it.file(2).parent.name + name[3:])
    link.symlink_to(innocent / name)
    (it.root / ("cd" * 32)).symlink_to(outside)
    with caplog.at_level(logging.WARNING):
        until(lambda: it.figure("foreign_files") == len(foreign) + 3)
        until(lambda: it.write(100, 20) and it.figure("evicted_blocks") > 20)
    it.close()
    assert all(path.exists() for path in foreign)
    assert link.is_symlink()
    assert (innocent / name).exists()
    for path in foreign:
        assert sum(str(path) in record.getMessage() for record in caplog.records) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting is for the superuser")
def test_other_mounts_are_not_entered(use: Callable[..., Use], tmp_path: Path) -> None:
    it = use(8)
    name = key_of(1).hex()
    it.file(1).parent.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", it.file(1).parent], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        it.file(1).write_bytes(bytes(BLOCK_BYTES))
        age(it.file(1), 90_000)
        until(lambda: it.write(100, 20) and it.figure("evicted_blocks") > 20)
        assert it.file(1).exists(), name
    finally:
        it.close()
        subprocess.run(["umount", it.file(1).parent], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting is for the superuser")
def test_min_free_is_kept_whoever_fills_the_mount(tmp_path: Path) -> None:
    size = 400 * BLOCK_BYTES
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(tmp_path)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("this container may not mount")
    root = tmp_path / "root"
    root.mkdir()
    it = Use(root, None, min_free=100 * BLOCK_BYTES)
    try:
        written = it.write(0, 350)
        assert written > 250
        found = os.statvfs(tmp_path)
        assert found.f_bavail * found.f_frsize >= 100 * BLOCK_BYTES - PAGE_BYTES
        (tmp_path / "other").write_bytes(bytes(80 * BLOCK_BYTES))
        until(lambda: os.statvfs(tmp_path).f_bavail * found.f_frsize >= 100 * BLOCK_BYTES)
        assert it.here(0, 350)
    finally:
        it.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


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


def test_a_root_that_was_emptied_by_hand_is_joined_anew(use: Callable[..., Use]) -> None:
    it = use(20)
    it.write(0, 10)
    first = it.capacity.space.member_id
    subprocess.run(f"rm -rf {it.root}/* {it.root}/.kvtier", shell=True, check=True)
    until(lambda: it.capacity.space.member_id != first)
    until(lambda: it.write(100, 1))
    until(lambda: it.write(200, 40) and it.figure("evicted_blocks") > 0)
    until(it.is_exact)


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


def test_a_store_that_found_an_owner_meanwhile_stays(tmp_path: Path) -> None:
    store = tmp_path / NAMESPACE / "stores" / ("a" * 16)
    store.mkdir(parents=True)
    (store / "0.segment").write_bytes(bytes(PAGE_BYTES))
    root = os.open(tmp_path, os.O_RDONLY)
    victim = VictimStore(NAMESPACE, "a" * 16)
    inventory = Inventory({NAMESPACE: Place(stores={"a" * 16: Store(PAGE_BYTES, 0, True)})})
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (outcome,) = Remover(root, lambda: False).remove(inventory, [victim])
        assert (outcome.kept, outcome.nbytes) == (1, 0)
        assert (store / "0.segment").exists()
    (outcome,) = Remover(root, lambda: False).remove(inventory, [victim])
    os.close(root)
    assert outcome.nbytes == PAGE_BYTES
    assert not store.exists()
    assert inventory.places[NAMESPACE].stores == {}


def test_a_store_of_nobody_goes_when_space_is_needed(use: Callable[..., Use]) -> None:
    it = use(20)
    stores = it.root / NAMESPACE / "stores"
    for store in ("a" * 16, "b" * 16):
        (stores / store).mkdir(parents=True)
        (stores / store / "lock").touch()
        (stores / store / "index.log").write_bytes(b"log")
        (stores / store / "0.segment").write_bytes(bytes(5 * BLOCK_BYTES))
        for path in [*(stores / store).iterdir(), stores / store]:
            age(path, 9000)
    with (stores / ("a" * 16) / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        until(lambda: it.figure("inventory_bytes") >= 10 * BLOCK_BYTES)
        until(lambda: it.write(0, 30) and it.figure("evicted_stores") == 1)
        until(lambda: it.write(100, 30) and it.figure("evicted_blocks") > 10)
        assert [path.name for path in stores.iterdir()] == ["a" * 16], "it has an owner"
    until(it.is_exact)


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(
    use: Callable[..., Use],
) -> None:
    it = use(20)
    it.write(0, 1)
    directory = it.file(0).parent
    program = (
        "import sys; from kvtier.tiers.fs.temporary import TempNames; print(TempNames().new())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(kvtier.__file__).parents[1])},
    )
    dead = directory / found.stdout.strip()
    living = directory / TempNames().new()
    for path in (dead, living):
        path.write_bytes(bytes(BLOCK_BYTES))
    until(lambda: not dead.exists())
    assert living.exists()
    assert it.figure("stale_temps_removed") == 1


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
