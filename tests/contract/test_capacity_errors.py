"""What scans and deletions do when a call fails, and what they say of what is not ours."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs import scan
from kvtier.tiers.fs.accounts import PAGE_BYTES
from kvtier.tiers.fs.eviction import Remover
from kvtier.tiers.fs.inventory import Inventory, Victims
from kvtier.tiers.fs.scan import FOREIGN_NAMED_MAX, Scanner

if TYPE_CHECKING:
    from pathlib import Path

SHELF = "ab"
NOW = 2 * 10**18


def scanned(scanner: Scanner) -> None:
    """One scan, to its end."""
    for _ in scanner.scan(True, lambda: NOW):
        pass


def shelf_of(root: Path, count: int) -> list[bytes]:
    """Keys of files of a page each, in one directory."""
    keys = [bytes.fromhex(SHELF + key_of(i).hex()[len(SHELF) :]) for i in range(count)]
    (root / NAMESPACE / SHELF).mkdir(parents=True)
    for key in keys:
        (root / NAMESPACE / SHELF / key.hex()).write_bytes(bytes(PAGE_BYTES))
    return keys


def test_what_was_deleted_before_a_failure_is_told_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = shelf_of(tmp_path, 6)
    inventory = Inventory()
    scanned(Scanner(str(tmp_path), inventory))
    shelf = inventory.places[NAMESPACE].shelves[SHELF]
    order = [shelf.key(i) for i in range(6)]
    whole, calls = os.unlink, 0

    def unlink(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.EIO, "bad sector")
        whole(*arguments, **options)

    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        victims = [Victims(NAMESPACE, SHELF, list(range(6)))]
        (outcome,) = Remover(root, lambda: False).remove(inventory, victims)
    os.close(root)
    assert outcome.failure is not None
    assert outcome.failure.errno == errno.EIO
    assert outcome.keys == order[:3]
    assert outcome.nbytes == 3 * PAGE_BYTES
    left = {path.name for path in (tmp_path / NAMESPACE / SHELF).iterdir()}
    assert left == {key.hex() for key in order[3:]}
    assert shelf.known().keys() == set(order[3:]) < set(keys)


def test_what_is_not_ours_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf_of(tmp_path, 1)
    for i in range(40):
        (tmp_path / NAMESPACE / SHELF / f"note{i:02}").touch()
    inventory = Inventory()
    scanner = Scanner(str(tmp_path), inventory)
    for _ in range(3):
        scanned(scanner)
    (line,) = caplog.messages
    assert "40 files" in line
    assert f"and {40 - FOREIGN_NAMED_MAX} more" in line
    assert line.count("note") == FOREIGN_NAMED_MAX
    assert inventory.num_foreign == len(inventory.foreign) == 40
    (tmp_path / "README").touch()
    scanned(scanner)
    scanned(scanner)
    assert len(caplog.messages) == 2
    assert "41 files" in caplog.messages[1]
    assert caplog.messages[1].endswith("README")


def test_what_is_not_ours_is_told_though_names_run_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths that are remembered are bounded, and so are the lines."""
    monkeypatch.setattr(scan, "FOREIGN_REMEMBERED_MAX", 5)
    scanner = Scanner(str(tmp_path), Inventory())
    for i in range(20):
        (tmp_path / f"note{i:02}").touch()
        scanned(scanner)
    assert len(caplog.messages) == 5


def test_a_preflight_at_work_is_not_foreign(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"123-{'0' * 16}.probe.tmp").mkdir()
    (tmp_path / f"123-{'0' * 15}.probe.tmp").mkdir()
    inventory = Inventory()
    scanned(Scanner(str(tmp_path), inventory))
    assert inventory.foreign == [f"123-{'0' * 15}.probe.tmp"]
    assert len(caplog.messages) == 1
