"""Archives: there and back every byte is equal, and what is wrong is refused."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from pathlib import Path

import catalog_world
import pytest
from catalog_world import OTHER, bring, check, export, keys, listed, nothing

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import ArchiveError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.fs_blocks import put_block
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_archive import export_namespace, import_namespace
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.namespace_directory import block_path
from kvtier.tiers.memory import MemoryTier

namespace = catalog_world.namespace
root = catalog_world.root
target = catalog_world.target


def rebuilt(archive: bytes, change) -> bytes:
    """The archive with its members (name, content) passed through `change`, by Python's tarfile."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for info in old:
            for changed, content in change(info, old.extractfile(info).read()):
                new.addfile(changed, io.BytesIO(content))
    return out.getvalue()


class TestArchives:
    def test_there_and_back_every_byte_is_equal(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        for i in range(12):
            put_block(namespace, i)
        done = bring(export(root), target)
        assert (done.blocks, done.skipped, done.refused) == (12, 0, [])
        original = {block.key: namespace / block_path(block.key) for _, _, block in listed(root)}
        assert keys(target) == set(original)
        for key, path in original.items():
            (copy,) = target.rglob(key.hex())
            assert copy.read_bytes() == path.read_bytes()
        (entry,) = Catalog([target]).namespaces()
        assert entry.fact("layout", "row_bytes") == BLOCK_BYTES

    def test_other_tools_read_it(self, root: Path, namespace: Path) -> None:
        for i in range(3):
            put_block(namespace, i, used_s=1000.0 + i)
        with tarfile.open(fileobj=io.BytesIO(export(root))) as archive:
            names = [info.name for info in archive]
            assert names == ["namespace.json", *(key_of(i).hex() for i in (2, 1, 0))]
            member = archive.extractfile(names[1]).read()
        assert member[HEADER_BYTES:] == block_of(key_of(2))

    def test_a_long_key(self, root: Path, namespace: Path, target: Path) -> None:
        from kvtier.envelope import seal

        key = BlockKey(bytes(range(127)))  # longer than the names that a tar header has room for
        row = block_of(key)
        path = namespace / block_path(key)
        path.parent.mkdir()
        path.write_bytes(seal(NAMESPACE, key, memoryview(row), 1) + row)
        assert bring(export(root), target).blocks == 1

    def test_damaged_blocks_are_left_out_and_told(self, root: Path, namespace: Path) -> None:
        put_block(namespace, 1)
        os.truncate(put_block(namespace, 2), 4097)
        (entry,) = Catalog([root]).namespaces()
        out = io.BytesIO()
        done = export_namespace(entry.description, entry.digest, listed(root), out, nothing)
        assert (done.blocks, [name for name, _ in done.refused]) == (1, [key_of(2).hex()])

    def test_what_vanishes_is_skipped(self, root: Path, namespace: Path) -> None:
        path = put_block(namespace, 1)
        stored = listed(root)
        path.unlink()
        done = export_namespace({}, NAMESPACE, stored, io.BytesIO(), nothing)
        assert (done.blocks, done.skipped, done.refused) == (0, 1, [])

    def test_a_second_import_skips_what_is_there(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        for i in range(5):
            put_block(namespace, i)
        archive = export(root)
        bring(archive, target)
        (gone,) = target.rglob(key_of(3).hex())
        gone.unlink()
        done = bring(archive, target)
        assert (done.blocks, done.skipped) == (1, 4)
        assert len(keys(target)) == 5

    def test_a_cut_archive_keeps_what_came_and_goes_on_later(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        for i in range(4):
            put_block(namespace, i)
        archive = export(root)
        member = 512 + HEADER_BYTES + BLOCK_BYTES
        start = len(archive) - 1024 - 4 * member
        for length, blocks in (
            (start + 2 * member + 100, 2),
            (start + 2 * member + 5000, 2),
            (start + 3 * member, 3),
            (start + 4 * member + 512, 4),
        ):
            with pytest.raises(ArchiveError, match=r"again"):
                bring(archive[:length], target)
            assert len(keys(target)) == blocks
        assert bring(archive, target).skipped == 4
        assert check(target).blocks == 4

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("../" + "ab" * 36, "no key"),
            ("/etc/" + "ab" * 36, "no key"),
            ("..", "no key"),
            ("ab/" + "ab" * 36, "no key"),
            ("AB" * 36, "no key"),
            ("ab" * 36 + "a", "no key"),
            ("ab" * 36 + "\n", "no key"),
            ("namespace.json", "no key"),
            ("ab" * 36, "key"),  # a key, but not this block's
            ("ab" * 200, "no key"),
        ],
    )
    def test_a_member_under_a_wrong_name_is_refused(
        self, root: Path, namespace: Path, target: Path, name: str, words: str
    ) -> None:
        for i in range(3):
            put_block(namespace, i, used_s=100.0 - i)

        def change(info, content):
            if info.name == key_of(1).hex():
                info.name = name
            yield info, content

        done = bring(rebuilt(export(root), change), target)
        assert done.blocks == 2
        assert [(refused, words in why) for refused, why in done.refused] == [(name, True)]
        assert keys(target) == {key_of(0), key_of(2)}
        assert [path.name for path in target.iterdir()] == [NAMESPACE]

    @pytest.mark.parametrize(
        "kind",
        [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE],
    )
    def test_links_and_the_like_are_refused(
        self, root: Path, namespace: Path, target: Path, kind: bytes
    ) -> None:
        for i in range(3):
            put_block(namespace, i)

        def change(info, content):
            if info.name == key_of(1).hex():
                info.type, info.linkname, info.size, content = kind, "/etc/passwd", 0, b""
            yield info, content

        done = bring(rebuilt(export(root), change), target)
        assert [why for _, why in done.refused] == ["no plain file"]
        assert keys(target) == {key_of(0), key_of(2)}
        assert not [path for path in target.rglob("*") if path.is_symlink()]

    def test_a_block_of_another_length_is_refused(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        put_block(namespace, 1)
        put_block(namespace, 2, nbytes=BLOCK_BYTES * 2)
        done = bring(export(root), target)
        assert [name for name, _ in done.refused] == [key_of(2).hex()]
        assert keys(target) == {key_of(1)}

    def test_a_block_of_another_namespace_is_refused(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        put_block(namespace, 1)

        def change(info, content):
            if info.name == "namespace.json":
                content = content.replace(NAMESPACE.encode(), OTHER.encode())
            yield info, content

        done = bring(rebuilt(export(root), change), target)
        assert done.blocks == 0
        assert done.refused[0][1].startswith("namespace")
        assert keys(target) == set()

    def test_a_flipped_byte_is_refused(self, root: Path, namespace: Path, target: Path) -> None:
        put_block(namespace, 1)
        put_block(namespace, 2)

        def change(info, content):
            if info.name == key_of(1).hex():
                content = content[:-1] + bytes([content[-1] ^ 1])
            yield info, content

        done = bring(rebuilt(export(root), change), target)
        assert [name for name, _ in done.refused] == [key_of(1).hex()]
        assert keys(target) == {key_of(2)}

    def test_a_huge_size_takes_no_memory_and_loses_nothing(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        put_block(namespace, 1, used_s=100.0)
        put_block(namespace, 2, used_s=99.0)
        archive = bytearray(export(root))
        info = tarfile.TarInfo(key_of(2).hex())
        info.size = 1 << 50
        start = len(archive) - 1024 - (512 + HEADER_BYTES + BLOCK_BYTES)
        archive[start : start + 512] = info.tobuf(tarfile.GNU_FORMAT)
        with pytest.raises(ArchiveError, match="cut off"):
            bring(bytes(archive), target)
        assert keys(target) == {key_of(1)}

    def test_a_huge_name_is_refused(self, target: Path) -> None:
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
        with pytest.raises(ArchiveError, match="name"):
            bring(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096), target)

    @pytest.mark.parametrize(
        "archive",
        [b"", b"no archive at all" * 100, bytes(512), bytes(10_240), b"\xff" * 512],
    )
    def test_what_is_no_archive(self, target: Path, archive: bytes) -> None:
        with pytest.raises(ArchiveError):
            bring(archive, target)
        assert list(target.iterdir()) == []

    @pytest.mark.parametrize(
        "text", [b"", b"{}", b"[]", b'{"digest": "../../x"}', b'{"digest": 3}']
    )
    def test_a_description_without_a_digest(
        self, root: Path, namespace: Path, target: Path, text: bytes
    ) -> None:
        def change(info, content):
            info.size = len(text)
            yield info, text

        with pytest.raises(ArchiveError, match="digest"):
            bring(rebuilt(export(root), change), target)
        assert list(target.iterdir()) == []

    def test_a_full_directory_ends_the_import_without_an_error(
        self, root: Path, namespace: Path
    ) -> None:
        for i in range(5):
            put_block(namespace, i, used_s=100.0 - i)

        class Small(MemoryTier):
            def write(self, key, data):
                if self.exists([key_of(0), key_of(1)]) == [True, True]:
                    raise TierFullError("full")
                super().write(key, data)

            def close(self):
                kept.update({key for key in map(key_of, range(5)) if self.exists([key])[0]})

        kept: set[BlockKey] = set()
        done = import_namespace(
            io.BytesIO(export(root)), lambda *_: Small(), nothing, full_wait_s=0.2
        )
        assert (done.blocks, done.full) == (2, True)
        assert kept == {key_of(0), key_of(1)}  # those that were used last

    def test_from_a_pipe(self, root: Path, namespace: Path, target: Path) -> None:
        for i in range(3):
            put_block(namespace, i)
        archive = export(root)
        receiving, sending = os.pipe()

        def send() -> None:
            with open(sending, "wb") as pipe:
                pipe.write(archive)

        sender = threading.Thread(target=send)
        sender.start()
        with open(receiving, "rb", buffering=0) as source:
            done = import_namespace(
                source, lambda digest, text: FilesTier(target, digest, text), nothing
            )
        sender.join()
        assert done.blocks == 3
