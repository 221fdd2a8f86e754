"""The catalog sees directories from outside: what it lists and finds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import catalog_world
import pytest
from catalog_world import OTHER, check, keys, listed

from kvtier.envelope import HEADER_BYTES
from kvtier.errors import ConfigError, MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.fs_blocks import make_namespace, put_block
from kvtier.tiers.fs.catalog import Catalog, Summary
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.catalog_verify import envelope_of
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.page_buffer import PageBuffer

namespace = catalog_world.namespace
root = catalog_world.root


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
