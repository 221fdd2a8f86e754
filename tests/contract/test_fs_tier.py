"""The fs tier as it is assembled from its settings: both layouts, one root and several."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier.errors import ConfigError, MissingBlockError, TierError, TierUnreachableError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers.base import SupportsBatchBytes, SupportsDropped, SupportsFigures, Tier
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.home import layout_of
from kvtier.tiers.fs.marker import MARKER_FILE, mark, read_marker
from kvtier.tiers.fs.medium import Medium
from kvtier.tiers.fs.settings import FsSettings
from kvtier.tiers.fs.tier_type import FsTierType
from kvtier.tiers.registry import decode_settings

SETTING = "secondary_tiers[0]"


def opened(**options: object) -> Tier:
    tier_type = FsTierType()
    settings = decode_settings(tier_type, {"min_free": 0, **options}, SETTING)
    tier_type.preflight(settings, SETTING)
    return tier_type.open(settings, NAMESPACE, {"model": "tiny"})


class AssembledContract(TierContract):
    options: ClassVar[dict[str, object]] = {}
    num_roots = 1

    @pytest.fixture(autouse=True)
    def _tmp(self, tmp_path: Path) -> None:
        self.roots = [str(tmp_path / f"root{i}") for i in range(self.num_roots)]
        self.made = 0

    def make(self) -> Tier:
        for root in self.roots:
            os.makedirs(root, mode=0o700, exist_ok=True)
        return self.reopen()

    def reopen(self) -> Tier:
        return opened(root_dirs=self.roots, **self.options)


class TestSegments(AssembledContract):
    options: ClassVar[dict[str, object]] = {"layout": "segments"}


class TestFiles(AssembledContract):
    options: ClassVar[dict[str, object]] = {"layout": "files"}


class TestDurableSegments(AssembledContract):
    options: ClassVar[dict[str, object]] = {
        "layout": "segments",
        "durability": "data",
        "capacity": "64MiB",
    }


class TestDurableFilesThroughThePageCache(AssembledContract):
    options: ClassVar[dict[str, object]] = {
        "layout": "files",
        "durability": "data",
        "direct": "off",
        "capacity": "64MiB",
    }


class TestThreeRootsOfSegments(AssembledContract):
    options: ClassVar[dict[str, object]] = {"layout": "segments"}
    num_roots = 3


class TestThreeRootsOfFiles(AssembledContract):
    options: ClassVar[dict[str, object]] = {"layout": "files", "capacity": "64MiB"}
    num_roots = 3


def test_a_local_directory_gets_segments_and_is_marked(tmp_path: Path) -> None:
    tier = opened(root_dir=str(tmp_path))
    TierContract.put(tier, key_of(1))
    tier.close()
    assert read_marker(tmp_path) == "segments"
    assert (tmp_path / MARKER_FILE).stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / NAMESPACE / "stores").iterdir())
    assert json.loads((tmp_path / NAMESPACE / "namespace.json").read_text())["model"] == "tiny"


@pytest.mark.parametrize(("layout", "wanted"), [("files", 2 << 20), ("segments", 0)])
def test_files_on_a_local_medium_want_larger_batches(
    tmp_path: Path, layout: str, wanted: int
) -> None:
    tier = opened(root_dir=str(tmp_path), layout=layout)
    assert isinstance(tier, SupportsBatchBytes)
    assert tier.write_batch_bytes_min == wanted
    tier.close()


def test_auto_follows_the_marker(tmp_path: Path) -> None:
    first = opened(root_dir=str(tmp_path), layout="files")
    TierContract.put(first, key_of(1))
    first.close()
    second = opened(root_dir=str(tmp_path))
    assert list(second.exists([key_of(1)])) == [True]
    second.close()
    assert not (tmp_path / NAMESPACE / "stores").exists()


def test_a_shared_medium_gets_files(tmp_path: Path) -> None:
    medium = Medium("/", "nfs4", "server:/x", "0:1", True, 1 << 30, 1 << 30, 4096, False)
    settings = FsSettings(root_dir=str(tmp_path))
    assert layout_of(tmp_path, settings, medium) == "files"


def test_the_place_of_a_lost_mount_is_not_taken_for_the_root(tmp_path: Path) -> None:
    tier_type = FsTierType()
    settings = decode_settings(tier_type, {"root_dir": str(tmp_path)}, SETTING)
    tier_type.preflight(settings, SETTING)
    (tmp_path / MARKER_FILE).unlink()
    with pytest.raises(TierUnreachableError, match=r"no kvtier\.json"):
        tier_type.open(settings, NAMESPACE, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "layout": "x"}'])
def test_a_marker_of_something_else_is_not_touched(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"kvtier\.json"):
        opened(root_dir=str(tmp_path))
    assert (tmp_path / MARKER_FILE).read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == [MARKER_FILE]


def test_the_first_marker_stays(tmp_path: Path) -> None:
    assert mark(tmp_path, "files") == "files"
    assert mark(tmp_path, "segments") == "files"


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_the_capacity_is_kept_and_told(tmp_path: Path, layout: str) -> None:
    capacity = 4 << 20
    tier = opened(root_dir=str(tmp_path), layout=layout, capacity=capacity)
    kept = 0
    for i in range(120):
        try:
            TierContract.put(tier, key_of(i))
        except TierError:
            continue
        kept += 1
    assert kept >= 20
    used = sum(
        os.path.getsize(os.path.join(place, name))
        for place, _, names in os.walk(tmp_path / NAMESPACE)
        for name in names
        if name not in ("namespace.json", "index.log")  # come on top of the capacity
    )
    assert used <= capacity
    assert isinstance(tier, SupportsFigures)
    figures = tier.figures()
    assert 0 < figures["used_bytes"] <= figures["capacity_bytes"] <= capacity
    assert isinstance(tier, SupportsDropped)
    dropped = set(tier.take_dropped())
    for i in range(120):
        try:
            assert TierContract.get(tier, key_of(i)) == block_of(key_of(i))
            assert key_of(i) not in dropped
        except MissingBlockError:
            pass
    tier.close()


def test_evictions_of_the_layout_and_of_the_sweeper_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(root_dir=str(tmp_path), layout="segments", capacity=4 << 20)
    assert isinstance(tier, SupportsFigures)
    for i in range(120):
        TierContract.put(tier, key_of(i))
    own = tier.figures()["evicted_blocks"]
    assert own > 0
    swept = {"evicted_blocks": 7.0, "free_bytes": 123.0}
    monkeypatch.setattr(Capacity, "figures", lambda _: swept)
    assert tier.figures()["evicted_blocks"] == own + 7
    assert tier.figures()["free_bytes"] == 123, "of the root"
    tier.close()


def test_two_namespaces_share_one_root(tmp_path: Path) -> None:
    other = "ab" * 32
    tier_type = FsTierType()
    settings = decode_settings(tier_type, {"root_dir": str(tmp_path), "min_free": 0}, SETTING)
    tier_type.preflight(settings, SETTING)
    one = tier_type.open(settings, NAMESPACE, {})
    two = tier_type.open(settings, other, {})
    TierContract.put(one, key_of(1))
    assert list(two.exists([key_of(1)])) == [False]
    one.close()
    TierContract.put(two, key_of(2))
    two.close()
    again = tier_type.open(settings, NAMESPACE, {})
    assert list(again.exists([key_of(1), key_of(2)])) == [True, False]
    again.close()
    assert not list((tmp_path / ".kvtier" / "members").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 5000}, r"capacity.*one block"),
        ({"capacity": "100000TiB"}, r"secondary_tiers\[0\]\.capacity.*mount"),
        ({"capacity": "101%"}, r"secondary_tiers\[0\]\.capacity"),
        ({"capacity": "lots"}, r"secondary_tiers\[0\]\.capacity = 'lots'"),
        ({"min_free": "100000TiB"}, r"secondary_tiers\[0\]\.min_free"),
        ({"min_free": "100%"}, r"secondary_tiers\[0\]\.min_free"),
        ({"segment_bytes": "big"}, r"secondary_tiers\[0\]\.segment_bytes"),
        ({"layout": "file"}, "layout"),
        ({"durability": "disk"}, "durability"),
        ({"root_dirs": ["/tmp"]}, "root_dirs"),
    ],
)
def test_wrong_settings(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(root_dir=str(tmp_path), **options)


def test_with_direct_off_it_is_not_even_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    whole, direct = os.open, []

    def noting(path: str, flags: int, *arguments: object, **options: object) -> int:
        if flags & os.O_DIRECT:
            direct.append(path)
        return whole(path, flags, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", noting)
    tier = opened(root_dir=str(tmp_path), direct="off")
    TierContract.put(tier, key_of(1))
    tier.close()
    assert direct == []
    assert "buffered I/O (direct is off)" in caplog.text
    opened(root_dir=str(tmp_path)).close()
    assert direct, "without the setting it is tried"


def test_a_block_larger_than_the_capacity(tmp_path: Path) -> None:
    tier_type = FsTierType()
    options: dict[str, object] = {"root_dir": str(tmp_path), "capacity": "1MiB"}
    settings = decode_settings(tier_type, options, SETTING)
    tier_type.check_block(settings, SETTING, 1 << 20)
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.capacity.*cannot hold one block"):
        tier_type.check_block(settings, SETTING, (1 << 20) + 1)


def test_the_capacity_of_several_roots_is_of_all_together(tmp_path: Path) -> None:
    settings = FsSettings(root_dirs=(str(tmp_path), "/tmp"), capacity="8MiB", min_free=0)
    assert settings.bounds_of(tmp_path).capacity == 4 << 20
    share = FsSettings(root_dirs=(str(tmp_path), "/tmp"), capacity="50%")
    assert share.bounds_of(tmp_path).capacity == Medium.of(tmp_path).total_bytes // 2
