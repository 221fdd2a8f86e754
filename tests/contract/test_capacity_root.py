"""One process and its root: what the sweeper sees, corrects, deletes, and leaves alone."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import capacity_use
import pytest
from capacity_processes import files_in, until, usage
from capacity_use import OTHER, Use, age

import kvtier
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.accounts import PAGE_BYTES
from kvtier.tiers.fs.eviction import Remover
from kvtier.tiers.fs.inventory import Inventory, Place, Store, VictimStore
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS
from kvtier.tiers.fs.temporary import TempNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.types import BlockKey

short_memory = capacity_use.short_memory
use = capacity_use.use


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
        temp = it.file(i).with_name(TempNames().new())
        temp.write_bytes(block_of(key_of(i)))
        temp.rename(it.file(i))  # whole at once, as a scan may take it to be
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
    name = key_of(3).hex()  # in another directory than key_of(2)
    for path in (outside / "3f", outside / name):
        path.mkdir()
    innocent = outside / name[:FAN_OUT_DIGITS]
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
        it.file(2).parent / name.replace(name[:FAN_OUT_DIGITS], "zzz"),
        place / "someone.tmp",
    ]
    for path in foreign:
        path.write_bytes(bytes(BLOCK_BYTES))
        age(path, 90_000)
    (place / name[:FAN_OUT_DIGITS]).symlink_to(innocent)
    link = it.file(2).parent / (it.file(2).parent.name + name[FAN_OUT_DIGITS:])
    link.symlink_to(innocent / name)
    (it.root / ("cd" * 32)).symlink_to(outside)
    with caplog.at_level(logging.WARNING):
        until(lambda: it.figure("foreign_files") == len(foreign) + 3)
        until(lambda: it.write(100, 20) and it.figure("evicted_blocks") > 20)
    it.close()
    assert all(path.exists() for path in foreign)
    assert link.is_symlink()
    assert (innocent / name).exists()
    told = [m for m in caplog.messages if "not kvtier's" in m]
    assert 1 <= len(told) <= len(foreign) + 3, "scans that found something new"


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


def test_a_root_that_was_emptied_by_hand_is_joined_anew(use: Callable[..., Use]) -> None:
    it = use(20)
    it.write(0, 10)
    first = it.capacity.space.member_id
    subprocess.run(f"rm -rf {it.root}/* {it.root}/.kvtier", shell=True, check=True)
    until(lambda: it.capacity.space.member_id != first)
    until(lambda: it.write(100, 1))
    until(lambda: it.write(200, 40) and it.figure("evicted_blocks") > 0)
    until(it.is_exact)


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
