"""The catalog over both layouts, filled by the tiers themselves and beside tiers that go on."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import catalog_world
import pytest
from catalog_world import keys, listed, nothing

from kvtier.envelope import HEADER_BYTES, seal
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_archive import export_namespace, import_namespace, list_for_export
from kvtier.tiers.fs.catalog_evict import choose_victims, evict
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.catalog_segments import SegmentBlocks
from kvtier.tiers.fs.catalog_verify import envelope_of, verify_blocks
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.page_buffer import PageBuffer
from kvtier.tiers.fs.segments import SegmentsTier

root = catalog_world.root

LAYOUTS = {"files": FilesTier, "segments": SegmentsTier}
DESCRIPTION = {"label": "both", "facts": {"layout": {"row_bytes": BLOCK_BYTES}}}

TIER_PROCESS = """
import sys
from pathlib import Path
from kvtier.envelope import HEADER_BYTES, seal, verify
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.segments import SegmentsTier

root, layout, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
tier = {"files": FilesTier, "segments": SegmentsTier}[layout](root, NAMESPACE, {"label": "both"})
blocks = {}
for i in range(64):
    row = block_of(key_of(i))
    blocks[i] = (memoryview(seal(NAMESPACE, key_of(i), memoryview(row), i + 1)), memoryview(row))
for i in range(32):
    tier.write(key_of(i), blocks[i])
print("ready", flush=True)
if what == "idle":
    sys.stdin.read()
    tier.close()
    sys.exit()
header, row = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(blocks[0][1].nbytes))
i = 0
while True:
    i = (i + 7) % 64
    tier.delete(key_of(i))
    j = (i + 13) % 64
    tier.write(key_of(j), blocks[j])
    try:
        tier.read(key_of(j), (header, row))
    except MissingBlockError:
        continue
    verify(header, NAMESPACE, key_of(j), row)
"""


class Process:
    """A process with a tier of its own; `churn` writes and deletes the blocks 0 to 63 without end,
    `idle` keeps the blocks 0 to 31."""

    def __init__(self, root: Path, layout: str, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TIER_PROCESS, str(root), layout, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen:
        assert self.process.stdout.readline() == "ready\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.__exit__(None, None, None)


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def fill(root: Path, layout: str, blocks: range) -> None:
    """Blocks that a tier stored, in the order of their numbers; it has closed."""
    tier = LAYOUTS[layout](root, NAMESPACE, DESCRIPTION)
    for i in blocks:
        row = memoryview(block_of(key_of(i)))
        tier.write(key_of(i), (memoryview(seal(NAMESPACE, key_of(i), row, 1000 + i)), row))
    tier.close()


def held(root: Path, layout: str, blocks: range) -> set[int]:
    """Which blocks a new tier reads, with the right bytes."""
    tier = LAYOUTS[layout](root, NAMESPACE, DESCRIPTION)
    found = set()
    header, row = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    for i in blocks:
        try:
            tier.read(key_of(i), (header, row))
        except MissingBlockError:
            continue
        assert row == block_of(key_of(i))
        found.add(i)
    tier.close()
    return found


def check(root: Path, repair: bool = False):
    return verify_blocks(listed(root), repair, 4, nothing)


def payload_file(root: Path, layout: str, content: bytes) -> tuple[Path, int]:
    """The file in which a block's bytes lie, and where: found past the tier and the catalog."""
    for path in root.rglob("*"):
        if path.is_file() and (place := path.read_bytes().find(content)) >= 0:
            return path, place
    raise AssertionError("the bytes lie nowhere")


def test_lists_what_the_tier_stored(root: Path, layout: str) -> None:
    fill(root, layout, range(10))
    findings = Findings()
    found = listed(root, findings)
    assert {block.key for _, _, block in found} == {key_of(i) for i in range(10)}
    assert {block.nbytes for _, _, block in found} == {HEADER_BYTES + BLOCK_BYTES}
    assert {blocks.layout for _, blocks, _ in found} == {layout}
    assert (findings.num_foreign, findings.problems, findings.temporaries) == (0, [], [])
    created = {envelope_of(blocks, block, PageBuffer()).created_ns for _, blocks, block in found}
    assert created == {1000 + i for i in range(10)}


def test_both_layouts_in_one_namespace(root: Path) -> None:
    fill(root, "files", range(5))
    fill(root, "segments", range(3, 8))
    assert len(listed(root)) == 10
    assert keys(root) == {key_of(i) for i in range(8)}
    assert check(root).blocks == 10


def test_good_blocks_are_good(root: Path, layout: str) -> None:
    fill(root, layout, range(10))
    found = check(root)
    assert (found.blocks, found.damages, found.vanished) == (10, [], 0)


@pytest.mark.parametrize("offset", [0, 1, 40_000, BLOCK_BYTES - 1, -1, -HEADER_BYTES])
def test_a_flipped_bit_is_found_and_removed(root: Path, layout: str, offset: int) -> None:
    """Offsets from the start of the row; those below zero lie in the header."""
    fill(root, layout, range(6))
    path, place = payload_file(root, layout, block_of(key_of(3)))
    with open(path, "r+b") as file:
        file.seek(place + offset)
        (value,) = file.read(1)
        file.seek(place + offset)
        file.write(bytes([value ^ 4]))
    found = check(root)
    assert [damage.entry.key for damage in found.damages] == [key_of(3)]
    assert found.blocks == 5
    found = check(root, repair=True)
    assert [damage.removed for damage in found.damages] == [True]
    assert check(root).damages == []
    assert held(root, layout, range(6)) == {0, 1, 2, 4, 5}


def test_evicts_oldest_use_first_and_the_tier_has_the_rest(root: Path, layout: str) -> None:
    fill(root, layout, range(10))
    stored = listed(root)
    victims = choose_victims(stored, None, 6 * (HEADER_BYTES + BLOCK_BYTES))
    assert [block.key for _, _, block in victims] == [key_of(i) for i in range(4)]
    deleted = evict(victims, nothing)
    assert (deleted.blocks, deleted.kept, deleted.failures) == (4, 0, [])
    assert keys(root) == {key_of(i) for i in range(4, 10)}
    assert held(root, layout, range(10)) == set(range(4, 10))


def test_what_was_used_or_written_anew_meanwhile_is_not_evicted(root: Path) -> None:
    """In segments; over files this is a matter of modification times."""
    fill(root, "segments", range(4))
    stored = listed(root)
    tier = SegmentsTier(root, NAMESPACE, DESCRIPTION, upkeep_s=None)
    header, row = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    tier.read(key_of(0), (header, row))
    tier.read(key_of(1), (header, row))
    tier.delete(key_of(1))
    tier.write(key_of(1), (header, row))
    tier.close()
    deleted = evict(choose_victims(stored, None, 0), nothing)
    assert (deleted.blocks, deleted.kept, deleted.failures) == (2, 2, [])
    assert held(root, "segments", range(4)) == {0, 1}
    ((_, blocks, stale),) = [one for one in stored if one[2].key == key_of(1)]
    assert blocks.delete([stale]).kept == 1


def test_a_block_that_moved_since_it_was_listed_is_never_read_from_its_old_place(
    root: Path,
) -> None:
    fill(root, "segments", range(4))
    ((_, blocks, stale),) = [one for one in listed(root) if one[2].key == key_of(1)]
    tier = SegmentsTier(root, NAMESPACE, DESCRIPTION, upkeep_s=None)
    tier.delete(key_of(1))
    for i in (*range(10, 40), 1):
        row = memoryview(block_of(key_of(i)))
        tier.write(key_of(i), (memoryview(seal(NAMESPACE, key_of(i), row, 1)), row))
    tier.close()
    with pytest.raises(MissingBlockError):
        blocks.read(stale, PageBuffer())
    assert key_of(1) in keys(root)


def test_wipes_what_nobody_uses(root: Path, layout: str) -> None:
    fill(root, layout, range(10))
    findings = Findings()
    (entry,) = Catalog([root]).namespaces()
    assert not entry.live
    assert entry.wipe(findings).blocks == 10
    assert [path for path in root.iterdir() if len(path.name) == 64] == []
    assert held(root, layout, range(10)) == set()


def test_evicts_beside_a_process_that_holds_the_blocks(root: Path, layout: str) -> None:
    with Process(root, layout, "idle") as process:
        stored = listed(root)
        victims = [one for one in stored if one[2].key in {key_of(1), key_of(2)}]
        deleted = evict(victims, nothing)
        assert (deleted.blocks, deleted.failures) == (2, [])
        assert keys(root) == {key_of(i) for i in range(32)} - {key_of(1), key_of(2)}
        process.stdin.close()
        assert process.wait() == 0
    assert held(root, layout, range(32)) == set(range(32)) - {1, 2}


def test_wipes_beside_a_process_that_goes_on(root: Path, layout: str) -> None:
    with Process(root, layout, "churn") as process:
        for _ in range(3):
            (entry,) = Catalog([root]).namespaces()
            assert entry.live
            entry.wipe(Findings())
            assert process.poll() is None
        (entry,) = Catalog([root]).namespaces()
        assert entry.description
    assert check(root).damages == []


def test_a_wipe_beside_an_idle_process_empties_its_tier(root: Path, layout: str) -> None:
    with Process(root, layout, "idle") as process:
        (entry,) = Catalog([root]).namespaces()
        assert entry.wipe(Findings()).blocks == 32
        assert keys(root) == set()
        assert (root / NAMESPACE / "namespace.json").exists()
        process.stdin.close()
        assert process.wait() == 0
    assert held(root, layout, range(32)) == set()


def test_no_damage_is_seen_beside_a_process_that_writes_and_evicts(root: Path, layout: str) -> None:
    with Process(root, layout, "churn") as process:
        blocks = vanished = 0
        while blocks < 500 or vanished < 10:
            found = check(root, repair=True)
            assert found.damages == []
            blocks += found.blocks
            vanished += found.vanished
            assert process.poll() is None


def test_an_owner_that_is_stopped_is_waited_for_only_so_long(root: Path) -> None:
    with Process(root, "segments", "idle") as process:
        process.send_signal(signal.SIGSTOP)
        blocks = SegmentBlocks(str(root / NAMESPACE), owner_wait_s=0.2)
        entries = list(blocks.blocks(Findings()))
        deleted = blocks.delete(entries[:3])
        assert deleted.blocks == 0
        assert [reason for _, reason in deleted.failures if "was asked" in reason]
        process.send_signal(signal.SIGCONT)
        patient = SegmentBlocks(str(root / NAMESPACE))
        assert patient.delete(entries[:3]).failures == []
        assert len(keys(root)) == 29


@pytest.mark.parametrize("target_layout", list(LAYOUTS))
def test_there_and_back_between_layouts(
    root: Path, tmp_path: Path, layout: str, target_layout: str
) -> None:
    fill(root, layout, range(12))
    (entry,) = Catalog([root]).namespaces()
    archive = io.BytesIO()
    stored = list_for_export(listed(root))
    sent = export_namespace(entry.description, entry.digest, stored, archive, nothing)
    assert (sent.blocks, sent.refused) == (12, [])
    archive.seek(0)
    target = tmp_path / "target"
    target.mkdir()
    got = import_namespace(archive, lambda *names: LAYOUTS[target_layout](target, *names), nothing)
    assert (got.blocks, got.refused) == (12, [])
    assert held(target, target_layout, range(12)) == set(range(12))
    assert check(target).blocks == 12
    (copy,) = Catalog([target]).namespaces()
    assert copy.label == "both"


def test_a_block_that_several_stores_have_is_exported_once(root: Path) -> None:
    fill(root, "segments", range(4))
    fill(root, "files", range(4))
    assert len(list_for_export(listed(root))) == 4


def test_a_damaged_log_is_told_and_the_rest_is_listed(root: Path) -> None:
    fill(root, "segments", range(4))
    fill(root, "files", range(4, 6))
    (log,) = root.rglob("index.log")
    log.write_bytes(b"spoilt" * 100)
    findings = Findings()
    found = {block.key for _, _, block in listed(root, findings)}
    assert found == {key_of(4), key_of(5)}
    assert [path for path, _ in findings.problems] == [str(log.parent)]


def test_foreign_files_among_stores(root: Path) -> None:
    fill(root, "segments", range(4))
    (log,) = root.rglob("index.log")
    foreign = [log.parent / "notes.txt", log.parent.parent / "notes.txt"]
    for path in foreign:
        path.write_bytes(b"mine")
    findings = Findings()
    listed(root, findings)
    assert sorted(findings.foreign_paths) == sorted(map(str, foreign))
    (entry,) = Catalog([root]).namespaces()
    entry.wipe(Findings())
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert keys(root) == set()
