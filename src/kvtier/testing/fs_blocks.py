"""Blocks in directories of the fs tier, written past the tier: what tests of tools look at."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from kvtier.envelope import seal
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.namespace_directory import block_path

if TYPE_CHECKING:
    from pathlib import Path


def make_namespace(root: Path, namespace: str = NAMESPACE, label: str | None = None) -> Path:
    """A namespace without blocks; its directory."""
    directory = root / namespace
    directory.mkdir(mode=0o700)
    facts = {
        "architectures": ["TinyForCausalLM"],
        "model_dtype": "bfloat16",
        "layout": {"row_bytes": BLOCK_BYTES},
    }
    description = {"digest": namespace, "label": label, "epoch": None, "facts": facts}
    (directory / "namespace.json").write_text(json.dumps(description))
    return directory


def put_block(
    directory: Path, i: int, used_s: float | None = None, nbytes: int = BLOCK_BYTES
) -> Path:
    """The file of block `i` in the `files` layout, last used at `used_s` (None: now)."""
    key = key_of(i)
    row = block_of(key, nbytes)
    path = directory / block_path(key)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f"{os.getpid()}-{i:016x}-{i}.tmp")
    draft.write_bytes(seal(directory.name, key, memoryview(row), 1_700_000_000 * 10**9) + row)
    if used_s is not None:
        os.utime(draft, (used_s, used_s))
    draft.rename(path)
    return path
