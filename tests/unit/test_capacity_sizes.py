from __future__ import annotations

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.fs.sizes import parse_capacity, parse_min_free

GIB = 2**30
MOUNT = 100 * GIB


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, None),
        (5000, 5000),
        ("5GiB", 5 * GIB),
        ("5 GB", 5 * 10**9),
        ("80%", 80 * GIB),
        (" 12.5 % ", 12 * GIB + GIB // 2),
        ("100%", MOUNT),
    ],
)
def test_capacity(value: object, size: int | None) -> None:
    assert parse_capacity(value, "capacity", MOUNT) == size


@pytest.mark.parametrize(
    ("value", "size"), [(0, 0), ("0%", 0), (4096, 4096), ("10%", 10 * GIB), ("1TiB", None)]
)
def test_min_free(value: object, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match=r"tiers\[0\]\.min_free = '1TiB' .* nothing could"):
            parse_min_free(value, "tiers[0].min_free", MOUNT)
    else:
        assert parse_min_free(value, "min_free", MOUNT) == size


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (0, "between 1 and"),
        (True, "must be"),
        ("", "must be"),
        ("-5%", "must be"),
        ("5 per cent", "must be|not a unit"),
        ("101%", "at most 100%"),
        ("0%", "above 0%"),
        ("200GiB", "more than the 107374182400 bytes of the mount"),
        (1.5, "must be"),
        ([1], "must be"),
    ],
)
def test_a_capacity_that_makes_no_sense_names_the_setting(value: object, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"^secondary_tiers\[2\]\.capacity.*({advice})"):
        parse_capacity(value, "secondary_tiers[2].capacity", MOUNT)


def test_all_of_a_mount_cannot_stay_free() -> None:
    with pytest.raises(ConfigError, match="nothing could ever be stored"):
        parse_min_free("100%", "min_free", MOUNT)
