"""Is the state machine worth anything? Plant one fault at a time in the core; each must be noticed.

    python tests/machine/mutants.py            all of them
    python tests/machine/mutants.py --machine  by the machine alone, without the unit tests
    python tests/machine/mutants.py WORD       those that mention the word

Prints KILLED or SURVIVED for each and exits with 1 when one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutant import Mutant
from planted_blocks import BLOCK_MUTANTS
from planted_jobs import JOB_MUTANTS
from planted_policies import POLICY_MUTANTS
from planted_requests import REQUEST_MUTANTS

MUTANTS = [*POLICY_MUTANTS, *BLOCK_MUTANTS, *JOB_MUTANTS, *REQUEST_MUTANTS]

ROOT = Path(__file__).resolve().parents[2]
UNITS = (
    "pool",
    "policies",
    "policy",
    "presence",
    "plans",
    "boundary",
    "stored_is_looked_up",
    "health",
    "cascades",
    "lending",
    "admission",
    "manager",
)


def unit_tests() -> list[str]:
    """Files of the unit tests of the core, from the root.

    Raises:
        FileNotFoundError: there is none for one of `UNITS`.
    """
    found = []
    for name in UNITS:
        files = sorted((ROOT / "tests/unit").glob(f"test_{name}*.py"))
        if not files:
            raise FileNotFoundError(f"tests/unit/test_{name}*.py")
        found += [str(file.relative_to(ROOT)) for file in files]
    return found


def killed(mutant: Mutant, tests: list[str]) -> bool:
    """Whether the tests notice the fault in a temporary copy."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        skip = shutil.ignore_patterns("__pycache__")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src/kvtier/core" / mutant.file
        text = target.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.what}: occurs {text.count(mutant.old)} times"
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "KVTIER_MACHINE_NO_SHRINK": "1",
        }
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode > 1:
            raise RuntimeError(f"{mutant.what}: the tests did not run\n{done.stdout}{done.stderr}")
        return done.returncode == 1


def main() -> int:
    """Run all mutants; 1 when one survives."""
    tests = ["tests/machine/test_machine.py"]
    if "--machine" not in sys.argv[1:]:
        tests = unit_tests() + tests
    survivors = 0
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    mutants = [m for m in MUTANTS if not words or any(w in f"{m.file} {m.what}" for w in words)]
    for mutant in mutants:
        start = time.monotonic()
        dead = killed(mutant, tests)
        survivors += not dead
        verdict = "KILLED  " if dead else "SURVIVED"
        print(
            f"{verdict} {time.monotonic() - start:5.1f}s {mutant.file}: {mutant.what}", flush=True
        )
    print(f"{len(mutants) - survivors} of {len(mutants)} killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
