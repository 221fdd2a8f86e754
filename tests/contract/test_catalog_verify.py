"""Verifying: damage is found, told, and removed when asked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import catalog_world
import pytest
from catalog_world import OTHER, check, keys, listed, nothing

from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import BLOCK_BYTES, key_of
from kvtier.testing.fs_blocks import make_namespace, put_block
from kvtier.tiers.fs.catalog_verify import verify_blocks

namespace = catalog_world.namespace
root = catalog_world.root


class TestVerifying:
    def test_good_blocks(self, root: Path, namespace: Path) -> None:
        for i in range(10):
            put_block(namespace, i)
        found = check(root)
        assert (found.blocks, found.vanished, found.damages) == (10, 0, [])
        assert found.nbytes == 10 * (HEADER_BYTES + BLOCK_BYTES)

    @pytest.mark.parametrize(
        "place",
        [0, 9, 15, 30, 40, 70, 90, 150, 207, 208, 3000, 4087, 4095, 4096, 40_000, -1],
    )
    def test_a_flipped_bit_at_any_place(self, root: Path, namespace: Path, place: int) -> None:
        put_block(namespace, 1)
        path = put_block(namespace, 2)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        found = check(root)
        assert found.blocks == 1
        assert [damage.entry.key for damage in found.damages] == [key_of(2)]
        assert found.damages[0].readable

    @pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 8192, 40_001, 69_631])
    def test_a_truncated_block(self, root: Path, namespace: Path, length: int) -> None:
        path = put_block(namespace, 1)
        os.truncate(path, length)
        found = check(root)
        assert (found.blocks, len(found.damages)) == (0, 1)

    def test_a_block_that_is_too_long(self, root: Path, namespace: Path) -> None:
        path = put_block(namespace, 1)
        for extra in (1, 4096, 2 << 30):
            os.truncate(path, HEADER_BYTES + BLOCK_BYTES + extra)
            assert len(check(root).damages) == 1
            assert path.exists()

    def test_a_block_under_another_key(self, root: Path, namespace: Path) -> None:
        path = put_block(namespace, 1)
        path.rename(path.with_name(path.name[:-8] + "00000001"))
        (damage,) = check(root).damages
        assert damage.reason.startswith("key")

    def test_a_block_of_another_namespace(self, root: Path, namespace: Path) -> None:
        other = put_block(make_namespace(root, OTHER), 1)
        path = put_block(namespace, 1)
        path.write_bytes(other.read_bytes())
        (damage,) = check(root).damages
        assert damage.reason.startswith("namespace")

    def test_repair_removes_what_is_damaged_and_nothing_else(
        self, root: Path, namespace: Path
    ) -> None:
        put_block(namespace, 1)
        path = put_block(namespace, 2)
        os.truncate(path, 100)
        foreign = path.with_name("notes.txt")
        foreign.write_bytes(b"mine")
        found = check(root, repair=True)
        assert [damage.removed for damage in found.damages] == [True]
        assert keys(root) == {key_of(1)}
        assert foreign.read_bytes() == b"mine"
        assert check(root).damages == []

    def test_without_repair_it_stays(self, root: Path, namespace: Path) -> None:
        os.truncate(put_block(namespace, 1), 100)
        assert [damage.removed for damage in check(root).damages] == [False]
        assert keys(root) == {key_of(1)}

    def test_a_block_that_vanished_is_no_damage(self, root: Path, namespace: Path) -> None:
        path = put_block(namespace, 1)
        stored = listed(root)
        path.unlink()
        found = verify_blocks(stored, True, 2, nothing)
        assert (found.vanished, found.damages) == (1, [])

    def test_a_block_that_is_rewritten_meanwhile_is_no_damage(
        self, root: Path, namespace: Path
    ) -> None:
        path = put_block(namespace, 1)
        good = path.read_bytes()
        os.truncate(path, 100)
        ((entry, layout, block),) = listed(root)

        class Rewritten:
            layout = "files"
            reads = 0

            def read(self, *arguments):
                data = layout.read(*arguments)
                self.reads += 1
                if self.reads == 1:
                    path.write_bytes(good)
                return data

        layout_seen = Rewritten()
        found = verify_blocks([(entry, layout_seen, block)], True, 1, nothing)
        assert (found.blocks, found.damages) == (1, [])
        assert layout_seen.reads == 2

    def test_a_medium_that_fails_is_told_and_nothing_is_removed(
        self, root: Path, namespace: Path
    ) -> None:
        put_block(namespace, 1)
        ((entry, layout, block),) = listed(root)

        class Failing:
            layout = "files"

            def read(self, *arguments):
                raise OSError(5, "Input/output error")

            def delete(self, entries):
                return layout.delete(entries)

        found = verify_blocks([(entry, Failing(), block)], True, 1, nothing)
        assert [(d.readable, d.removed) for d in found.damages] == [(False, False)]
        assert keys(root) == {key_of(1)}

    def test_an_error_of_a_thread_ends_all_and_is_raised(self, root: Path, namespace: Path) -> None:
        for i in range(20):
            put_block(namespace, i)

        def broken(_: int) -> None:
            raise ZeroDivisionError

        before = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            verify_blocks(listed(root), False, 4, broken)
        assert threading.active_count() == before
