"""Evicting and wiping from outside, and what the ledger says after it."""

from __future__ import annotations

import fcntl
import io
import os
from pathlib import Path

import catalog_world
import pytest
from catalog_world import OTHER, export, keys, listed, nothing

from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, key_of
from kvtier.testing.fs_blocks import make_namespace, put_block
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_archive import import_namespace
from kvtier.tiers.fs.catalog_capacity import capacity_of
from kvtier.tiers.fs.catalog_evict import choose_victims, evict
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.ledger import LedgerFile
from kvtier.tiers.fs.namespace_directory import block_path

namespace = catalog_world.namespace
root = catalog_world.root
target = catalog_world.target


class TestEvicting:
    def test_oldest_use_first_until_the_size_is_reached(self, root: Path, namespace: Path) -> None:
        for i in range(10):
            put_block(namespace, i, used_s=1000.0 - i)
        one = HEADER_BYTES + BLOCK_BYTES
        victims = choose_victims(listed(root), None, 7 * one)
        assert [block.key for _, _, block in victims] == [key_of(9), key_of(8), key_of(7)]
        assert choose_victims(listed(root), None, 10 * one) == []
        assert len(choose_victims(listed(root), None, 10 * one - 1)) == 1
        assert len(choose_victims(listed(root), None, 0)) == 10

    def test_by_age(self, root: Path, namespace: Path) -> None:
        for i in range(10):
            put_block(namespace, i, used_s=1000.0 + i)
        victims = choose_victims(listed(root), 1003.0, None)
        assert [block.key for _, _, block in victims] == [key_of(0), key_of(1), key_of(2)]

    def test_by_age_and_size_whatever_ends_first(self, root: Path, namespace: Path) -> None:
        for i in range(10):
            put_block(namespace, i, used_s=1000.0 + i)
        one = HEADER_BYTES + BLOCK_BYTES
        assert len(choose_victims(listed(root), 1003.0, 2 * one)) == 3
        assert len(choose_victims(listed(root), 1003.0, 8 * one)) == 2

    def test_what_was_used_meanwhile_stays(self, root: Path, namespace: Path) -> None:
        for i in range(3):
            put_block(namespace, i, used_s=1000.0 + i)
        victims = choose_victims(listed(root), None, 0)
        used = namespace / block_path(key_of(1))
        os.utime(used, (2000.0, 2000.0))
        deleted = evict(victims, nothing)
        assert (deleted.blocks, deleted.kept, deleted.failures) == (2, 1, [])
        assert deleted.nbytes == 2 * (HEADER_BYTES + BLOCK_BYTES)
        assert keys(root) == {key_of(1)}

    def test_what_is_gone_already_is_no_failure(self, root: Path, namespace: Path) -> None:
        path = put_block(namespace, 1)
        victims = choose_victims(listed(root), None, 0)
        path.unlink()
        deleted = evict(victims, nothing)
        assert (deleted.blocks, deleted.kept, deleted.failures) == (0, 1, [])


class TestWiping:
    def test_an_idle_namespace_is_gone(self, root: Path, namespace: Path) -> None:
        make_namespace(root, OTHER)
        temp = put_block(namespace, 1).with_name("1-00-1.tmp")
        temp.write_bytes(b"")
        deleted = Catalog([root]).find(NAMESPACE)[0].wipe(Findings())
        assert deleted.blocks == 1
        assert [path.name for path in root.iterdir()] == [OTHER]

    def test_a_live_one_is_emptied_and_stays_live(self, root: Path, namespace: Path) -> None:
        block = put_block(namespace, 1)
        temp = block.with_name("1-00-1.tmp")
        temp.write_bytes(b"of a living writer")
        with open(namespace / "namespace.json", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            deleted = Catalog([root]).find(NAMESPACE)[0].wipe(Findings())
            assert (deleted.blocks, keys(root)) == (1, set())
            assert temp.exists()
            (entry,) = Catalog([root]).namespaces()
            assert entry.live

    def test_foreign_files_stay_and_with_them_the_directory(
        self, root: Path, namespace: Path
    ) -> None:
        foreign = put_block(namespace, 1).with_name("notes.txt")
        foreign.write_bytes(b"mine")
        Catalog([root]).find(NAMESPACE)[0].wipe(Findings())
        assert foreign.read_bytes() == b"mine"
        assert keys(root) == set()
        assert (namespace / "namespace.json").exists()


class TestCapacity:
    @pytest.fixture
    def ledger(self, root: Path):
        (root / ".kvtier" / "members").mkdir(parents=True)
        ledger = LedgerFile(str(root / ".kvtier" / "ledger"))
        yield ledger
        ledger.close()

    def test_nothing_is_known_without_a_ledger_and_none_is_made(
        self, root: Path, namespace: Path
    ) -> None:
        put_block(namespace, 1)
        assert capacity_of(str(root)) is None
        evict(choose_victims(listed(root), None, 0), nothing)
        assert not (root / ".kvtier").exists()

    def test_what_is_deleted_is_given_back(self, root: Path, namespace: Path, ledger) -> None:
        for i in range(5):
            put_block(namespace, i, used_s=100.0 + i)
        one = HEADER_BYTES + BLOCK_BYTES
        with ledger.change(1.0) as accounts:
            accounts.known, accounts.granted, accounts.limit = True, 5 * one, 50 * one
        evict(choose_victims(listed(root), 103.0, None), nothing)
        capacity = capacity_of(str(root))
        assert (capacity.granted_bytes, capacity.limit_bytes) == (2 * one, 50 * one)
        with ledger.change(1.0) as accounts:
            assert accounts.returned == 3 * one

    def test_a_ledger_that_is_not_filled_yet_tells_nothing(self, root: Path, ledger) -> None:
        with ledger.change(1.0) as accounts:
            accounts.limit = 7
        assert capacity_of(str(root)) is None

    def test_an_import_takes_no_more_than_there_is_room_for(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        for i in range(5):
            put_block(namespace, i, used_s=100.0 - i)
        one = HEADER_BYTES + BLOCK_BYTES
        done = import_namespace(
            io.BytesIO(export(root)),
            lambda digest, text: FilesTier(target, digest, text),
            nothing,
            room_bytes=3 * one + 5,
        )
        assert (done.blocks, done.full) == (3, True)
        assert keys(target) == {key_of(0), key_of(1), key_of(2)}
