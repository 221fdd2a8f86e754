"""The layers hold, and no module grows beyond what one reads in one go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 500


def modules() -> list[Path]:
    return sorted((ROOT / "src" / "kvtier").rglob("*.py"))


def test_the_import_contracts_of_the_project_hold():
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 kept, 0 broken" in ran.stdout


@pytest.mark.parametrize("module", modules(), ids=lambda m: str(m.relative_to(ROOT / "src")))
def test_a_module_is_short(module: Path):
    assert len(module.read_text().splitlines()) < LINES_MAX
