"""The catalog sees directories from outside: what it lists, reads, deletes, and leaves alone."""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import ArchiveError, ConfigError, MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.fs_blocks import make_namespace, put_block
from kvtier.tiers.fs.catalog import Catalog, Summary
from kvtier.tiers.fs.catalog_archive import export_namespace, import_namespace, list_for_export
from kvtier.tiers.fs.catalog_capacity import capacity_of
from kvtier.tiers.fs.catalog_evict import choose_victims, evict
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.catalog_verify import envelope_of, verify_blocks
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.ledger import LedgerFile
from kvtier.tiers.fs.page_buffer import PageBuffer
from kvtier.tiers.memory import MemoryTier

OTHER = "f" * 64


def nothing(_: int) -> None:
    pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


@pytest.fixture
def namespace(root: Path) -> Path:
    return make_namespace(root)


def listed(root: Path, findings: Findings | None = None):
    findings = findings or Findings()
    return [
        (entry, layout, block)
        for entry in Catalog([root]).namespaces(findings)
        for layout, block in entry.blocks(findings)
    ]


def keys(root: Path) -> set[BlockKey]:
    return {block.key for _, _, block in listed(root)}


def check(root: Path, repair: bool = False):
    return verify_blocks(listed(root), repair, 4, nothing)


class TestListing:
    def test_every_block_with_its_size_and_last_use(self, root: Path, namespace: Path) -> None:
        for i in range(20):
            put_block(namespace, i, used_s=1000.0 + i)
        found = {block.key: block for _, _, block in listed(root)}
        assert set(found) == {key_of(i) for i in range(20)}
        for i in range(20):
            assert found[key_of(i)].nbytes == HEADER_BYTES + BLOCK_BYTES
            assert found[key_of(i)].last_use_s == 1000.0 + i

    def test_blocks_of_the_tier_itself(self, root: Path) -> None:
        tier = FilesTier(root, NAMESPACE, {"label": "mine"})
        key = key_of(1)
        row = memoryview(block_of(key))
        from kvtier.envelope import seal

        tier.write(key, (memoryview(seal(NAMESPACE, key, row, 5)), row))
        tier.close()
        assert keys(root) == {key}
        assert check(root).blocks == 1

    def test_what_is_not_ours_is_told_and_counted(self, root: Path, namespace: Path) -> None:
        block = put_block(namespace, 1)
        foreign = [
            root / "notes.txt",
            root / NAMESPACE[:63],
            namespace / "notes.txt",
            block.parent / "notes.txt",
            block.parent / f"{block.name}.bak",
            block.parent / ("0" * 72 if block.name[0] != "0" else "1" * 72),
            namespace / "abcd",
        ]
        for path in foreign:
            path.write_bytes(b"x")
        (block.parent / block.name.replace(block.name[-8:], "ffffffff")).mkdir()
        (block.parent / block.name.replace(block.name[-8:], "eeeeeeee")).symlink_to("/etc/passwd")
        findings = Findings()
        assert {stored[2].key for stored in listed(root, findings)} == {key_of(1)}
        assert findings.num_foreign == len(foreign) + 2
        assert {str(path) for path in foreign} <= set(findings.foreign_paths)

    def test_our_own_control_files_are_not_foreign(self, root: Path, namespace: Path) -> None:
        (root / "kvtier.json").write_text("{}")
        (root / ".kvtier").mkdir()
        (root / "lost+found").mkdir()
        (namespace / "stores").mkdir()
        findings = Findings()
        listed(root, findings)
        assert findings.num_foreign == 0

    def test_files_of_writers_are_neither_blocks_nor_foreign(
        self, root: Path, namespace: Path
    ) -> None:
        block = put_block(namespace, 1)
        temp = block.parent / "123-00ff00ff00ff00ff-7.tmp"
        temp.write_bytes(b"abc")
        findings = Findings()
        assert len(listed(root, findings)) == 1
        assert [(file.path, file.nbytes) for file in findings.temporaries] == [(str(temp), 3)]
        assert findings.num_foreign == 0

    def test_a_namespace_without_description_has_blocks_all_the_same(
        self, root: Path, namespace: Path
    ) -> None:
        put_block(namespace, 1)
        (namespace / "namespace.json").unlink()
        (entry,) = Catalog([root]).namespaces()
        assert dict(entry.description) == {}
        assert entry.label is None
        assert keys(root) == {key_of(1)}

    @pytest.mark.parametrize("text", ["", "[1]", "{", '{"facts": 3, "label": 7}', "[" * 100_000])
    def test_a_spoilt_description_is_survived(self, root: Path, namespace: Path, text: str) -> None:
        (namespace / "namespace.json").write_text(text)
        (entry,) = Catalog([root]).namespaces()
        assert entry.label is None
        assert entry.fact("layout", "row_bytes") is None

    def test_facts_by_path(self, root: Path, namespace: Path) -> None:
        (entry,) = Catalog([root]).namespaces()
        assert entry.fact("layout", "row_bytes") == BLOCK_BYTES
        assert entry.fact("layout", "no", "such") is None

    def test_live_means_that_a_process_holds_the_description(
        self, root: Path, namespace: Path
    ) -> None:
        (entry,) = Catalog([root]).namespaces()
        assert not entry.live
        with open(namespace / "namespace.json", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            (entry,) = Catalog([root]).namespaces()
            assert entry.live
        (entry,) = Catalog([root]).namespaces()
        assert not entry.live

    def test_an_unreadable_directory_is_told(self, root: Path, namespace: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("the superuser may read everything")
        block = put_block(namespace, 1)
        block.parent.chmod(0)
        findings = Findings()
        assert listed(root, findings) == []
        assert [path for path, _ in findings.problems] == [str(block.parent)]

    def test_the_creation_time_comes_from_the_header(self, root: Path, namespace: Path) -> None:
        put_block(namespace, 1, used_s=5.0)
        ((_, layout, block),) = listed(root)
        assert envelope_of(layout, block, PageBuffer()).created_ns == 1_700_000_000 * 10**9

    def test_sums(self, root: Path, namespace: Path) -> None:
        put_block(namespace, 1, used_s=5.0)
        put_block(namespace, 2, used_s=4.0)
        summary = Summary()
        for _, _, block in listed(root):
            summary.add(block)
        assert summary == Summary(2, 2 * (HEADER_BYTES + BLOCK_BYTES), 5.0)


class TestFinding:
    def test_by_a_prefix(self, root: Path, namespace: Path) -> None:
        make_namespace(root, OTHER)
        assert [entry.digest for entry in Catalog([root]).find("ff")] == [OTHER]
        assert [entry.digest for entry in Catalog([root]).find("FF")] == [OTHER]

    def test_one_in_several_roots(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            make_namespace(tmp_path / name)
        found = Catalog([tmp_path / "a", tmp_path / "b"]).find(NAMESPACE[:5])
        assert [entry.root for entry in found] == [str(tmp_path / "a"), str(tmp_path / "b")]

    def test_an_ambiguous_prefix_names_the_candidates(self, root: Path) -> None:
        one, two, three = "ab" + "0" * 62, "ab" + "1" * 62, "cd" + "0" * 62
        for digest in (one, two, three):
            make_namespace(root, digest, label=f"of-{digest[2]}")
        with pytest.raises(ConfigError, match="several") as raised:
            Catalog([root]).find("ab")
        assert one[:16] in str(raised.value)
        assert two[:16] in str(raised.value)
        assert "of-1" in str(raised.value)
        assert three[:16] not in str(raised.value)

    @pytest.mark.parametrize("prefix", ["", "00", "zz", "../"])
    def test_an_unknown_prefix_names_what_there_is(self, root: Path, prefix: str) -> None:
        make_namespace(root, OTHER)
        with pytest.raises(ConfigError, match=OTHER[:16]):
            Catalog([root]).find(prefix)

    def test_a_root_must_be_one(self, root: Path, namespace: Path) -> None:
        (root / "file").write_bytes(b"")
        for path, words in (
            (root / "none", "cannot be listed"),
            (root / "file", "cannot be listed"),
            (namespace, "is a namespace"),
        ):
            with pytest.raises(ConfigError, match=words):
                Catalog([path])
        with pytest.raises(ConfigError, match="twice"):
            Catalog([root, root / ".." / "root"])


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
        used = namespace / key_of(1).hex()[:3] / key_of(1).hex()
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


def export(root: Path) -> bytes:
    out = io.BytesIO()
    (entry,) = Catalog([root]).namespaces()
    stored = list_for_export(listed(root))
    done = export_namespace(entry.description, entry.digest, stored, out, nothing)
    assert done.refused == []
    return out.getvalue()


def bring(archive: bytes, root: Path):
    def open_tier(digest, description):
        return FilesTier(root, digest, description)

    return import_namespace(io.BytesIO(archive), open_tier, nothing)


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


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    return directory


class TestArchives:
    def test_there_and_back_every_byte_is_equal(
        self, root: Path, namespace: Path, target: Path
    ) -> None:
        for i in range(12):
            put_block(namespace, i)
        done = bring(export(root), target)
        assert (done.blocks, done.skipped, done.refused) == (12, 0, [])
        original = {
            block.key: namespace / block.key.hex()[:3] / block.key.hex()
            for _, _, block in listed(root)
        }
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
        path = namespace / key.hex()[:3] / key.hex()
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


def test_a_read_says_missing_for_what_is_no_file(root: Path, namespace: Path) -> None:
    path = put_block(namespace, 1)
    ((_, layout, block),) = listed(root)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(MissingBlockError):
        layout.read(block, PageBuffer())
    path.unlink()
    path.mkdir()
    with pytest.raises(MissingBlockError):
        layout.read(block, PageBuffer())
