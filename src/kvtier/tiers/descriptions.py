"""What a namespace says of itself, beside its blocks: the digest, the label and the facts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DESCRIPTION_BYTES_MAX = 1 << 20
"""No description is longer; what is has been put there by somebody else."""


def parse_description(text: bytes) -> dict[str, object]:
    """The description in a text; empty if it is none."""
    try:
        description = json.loads(text) if len(text) <= DESCRIPTION_BYTES_MAX else None
    except (ValueError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}


def label_of(description: Mapping[str, object]) -> str | None:
    """The operator's label."""
    label = description.get("label")
    return label if isinstance(label, str) else None


def fact_of(description: Mapping[str, object], *names: str) -> object:
    """A fact by its path below `facts`; None if there is no such."""
    value: object = description.get("facts")
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
