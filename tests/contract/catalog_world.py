"""A root with a namespace for the catalog, and what the catalog lists of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvtier.core.types import BlockKey
from kvtier.testing.fs_blocks import make_namespace
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_archive import export_namespace, import_namespace, list_for_export
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.catalog_verify import verify_blocks
from kvtier.tiers.fs.files import FilesTier

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


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    return directory
