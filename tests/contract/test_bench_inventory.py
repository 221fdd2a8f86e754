"""`bench/inventory.py` makes the files that the layout would, and sees all of an eviction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvtier

FILES = 1000
PROGRAM = Path(__file__).parents[2] / "bench/inventory.py"


def test_it_finds_and_evicts_what_it_made(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--files", str(FILES), "--dir", tmp_path, "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(kvtier.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["inventory_without_ledger"]["value"] >= rows["ready_without_ledger"]["value"] > 0
    for name in ("evict_100k_wall", "evict_100k_cpu"):
        assert rows[name]["value"] > 0 < rows[name]["baseline"]
    assert list(tmp_path.iterdir()) == []
