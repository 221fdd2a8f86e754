from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvtier.errors import ConfigError
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers import registry
from kvtier.tiers.fs.tier_type import FsSettings
from kvtier.tiers.registry import TierType, decode_settings, load_tier_type, tier_type_names

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING = "secondary_tiers[1].type"
PLACE = "secondary_tiers[1]"


class OwnSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 1


class OwnTierType:
    """What a third party writes."""

    settings_type = OwnSettings
    default_name = "own"
    medium = "STORAGE"
    locality = "REMOTE"

    def num_threads(self, settings: OwnSettings) -> int:
        return 2

    def preflight(self, settings: OwnSettings, setting: str) -> None:
        pass

    def open(self, settings: OwnSettings, namespace: str, facts: Mapping[str, object]) -> object:
        raise NotImplementedError


OWN_INSTANCE = OwnTierType()


class NotATierType:
    medium = "STORAGE"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with entry points: what pip leaves in site-packages."""
    info = tmp_path / "kvtier_stars-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-stars\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvtier.tiers]\n"
        "stars = kvtier_stars:Stars\n"
        "comets = kvtier_stars_absent:Comets [tail]\n"
        "fs = kvtier_stars:Stars\n"
    )
    (tmp_path / "kvtier_stars.py").write_text(
        "from kvtier.tiers.memory import MemoryTierType\n"
        "class Stars(MemoryTierType):\n    default_name = 'stars'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["fs", "memory"])
def test_our_own_kinds(name: str) -> None:
    tier_type = load_tier_type(name, SETTING)
    assert isinstance(tier_type, TierType)
    assert tier_type.default_name == name
    assert (tier_type.medium, tier_type.locality) == ("STORAGE", "LOCAL")
    assert name in tier_type_names()


@pytest.mark.parametrize("attribute", ["OwnTierType", "OWN_INSTANCE"])
def test_a_class_by_its_path(attribute: str) -> None:
    tier_type = load_tier_type(f"{__name__}:{attribute}", SETTING)
    assert isinstance(tier_type, OwnTierType)


def test_an_entry_point(installed: Path) -> None:
    assert load_tier_type("stars", SETTING).default_name == "stars"
    assert "stars" in tier_type_names()


def test_an_entry_point_does_not_replace_one_of_ours(installed: Path) -> None:
    assert load_tier_type("fs", SETTING).settings_type is FsSettings


def test_an_unknown_kind(installed: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tier_type("memmory", SETTING)
    message = str(caught.value)
    assert message.startswith("secondary_tiers[1].type is 'memmory'")
    assert "did you mean 'memory'?" in message
    assert "comets, fs, memory, object, stars, valkey" in message
    with pytest.raises(ConfigError) as caught:
        load_tier_type("zzzzzz", SETTING)
    assert "did you mean" not in str(caught.value)


def test_a_missing_dependency_names_the_extra(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"kvtier_stars_absent.*'kvtier-stars\[tail\]'"):
        load_tier_type("comets", SETTING)
    ours = {"ours": registry.BuiltIn("kvtier_stars_absent:Ours", extra="object")}
    monkeypatch.setattr(registry, "TIER_TYPES", ours)
    with pytest.raises(ConfigError, match=r"type is 'ours'.*pip install 'kvtier\[object\]'"):
        load_tier_type("ours", SETTING)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.mod:Class", "no_such_package"),
        (f"{__name__}:Absent", "no 'Absent'"),
        (f"{__name__}:NotATierType", "TierType"),
        (f"{__name__}:", "no ''"),
        (":Class", "empty module name"),
    ],
)
def test_a_path_that_leads_nowhere(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){message}") as caught:
        load_tier_type(name, SETTING)
    assert SETTING in str(caught.value)
    assert repr(name) in str(caught.value)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys; from kvtier.tiers.registry import tier_type_names; tier_type_names();"
        "assert not {'numpy', 'kvtier.tiers.fs', 'kvtier.tiers.memory'} & set(sys.modules)"
    )
    source = str(Path(registry.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=True)


# --- settings


def fs(**options: object) -> FsSettings:
    settings = decode_settings(load_tier_type("fs", SETTING), options, PLACE)
    assert isinstance(settings, FsSettings)
    return settings


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({"threads": 3}, 3),
        ({"n_read_threads": 6, "n_write_threads": 5}, 11),
        ({"n_read_threads": 6}, 7),
        ({"n_write_threads": 1}, 2),
    ],
)
def test_fs_threads(options: dict[str, object], threads: int) -> None:
    assert load_tier_type("fs", SETTING).num_threads(fs(root_dir="/x", **options)) == threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"secondary_tiers\[1\].*root_dir"),
        ({"root_dir": ""}, "root_dir"),
        ({"root_dir": 3}, r"root_dir.*given.*3"),
        ({"root_dir": "/x", "layout": "segmented"}, "segmented"),
        ({"root_dir": "/x", "threads": 1}, r">= 2.*threads"),
        ({"root_dir": "/x", "threads": "4"}, "threads"),
        ({"root_dir": "/x", "threads": 4, "n_read_threads": 2}, "either"),
        (
            {"root_dri": "/x"},
            r"secondary_tiers\[1\]\.root_dri .*did you mean 'root_dir'.*layout, min_free, n_read",
        ),
    ],
)
def test_wrong_fs_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fs(**options)


def test_fs_preflight_names_the_setting(tmp_path: Path) -> None:
    tier_type = load_tier_type("fs", SETTING)
    tier_type.preflight(fs(root_dir=str(tmp_path)), PLACE)
    with pytest.raises(ConfigError, match=r"secondary_tiers\[1\]\.root_dir = .*absent"):
        tier_type.preflight(fs(root_dir=str(tmp_path / "absent")), PLACE)


@pytest.mark.parametrize("name", ["fs", "memory"])
def test_a_kind_opens_a_tier(name: str, tmp_path: Path) -> None:
    tier_type = load_tier_type(name, SETTING)
    options = {"root_dir": str(tmp_path)} if name == "fs" else {}
    settings = decode_settings(tier_type, options, PLACE)
    tier_type.preflight(settings, PLACE)
    assert tier_type.num_threads(settings) >= 2
    tier = tier_type.open(settings, NAMESPACE, {"model": "tiny"})
    TierContract.put(tier, key_of(1))
    assert tier.exists([key_of(1)]) == [True]
    tier.close()
    assert (tmp_path / NAMESPACE / "namespace.json").exists() == (name == "fs")


def test_fs_measures_how_many_threads_a_directory_is_worth(tmp_path: Path) -> None:
    threads = load_tier_type("fs", SETTING).num_threads(fs(root_dir=str(tmp_path)))
    assert 2 <= threads <= 16
    assert (tmp_path / ".kvtier" / "probe.json").exists()


def test_fs_clears_away_what_killed_writers_left(tmp_path: Path) -> None:
    left = tmp_path / NAMESPACE / "ab" / "1-a-0.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    os.utime(left, (0, 0))
    (left.parent / "1-a-1.tmp").touch()
    tier_type = load_tier_type("fs", SETTING)
    tier_type.preflight(fs(root_dir=str(tmp_path)), PLACE)
    tier = tier_type.open(fs(root_dir=str(tmp_path)), NAMESPACE, {})
    deadline = time.monotonic() + 30
    while left.exists():
        assert time.monotonic() < deadline
    tier.close()
    assert (left.parent / "1-a-1.tmp").exists(), "its writer may be alive"
