"""Random walks over the core. `KVTIER_MACHINE_EXAMPLES=5000` walks longer, with fresh seeds."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.testing.engine import Groups
from kvtier.testing.machine import TieringMachine

EXAMPLES = os.environ.get("KVTIER_MACHINE_EXAMPLES")
SHRINK = "KVTIER_MACHINE_NO_SHRINK" not in os.environ


class FullOnly(TieringMachine):
    """One full group: the common model."""

    groups = Groups(full=(0,))


class TwoFullGroups(TieringMachine):
    """Two full groups and a window of one block."""

    groups = Groups(full=(0, 1), windows={2: 1})


class S3FIFOMachine(TieringMachine):
    """Evicts by S3-FIFO."""

    policy = "s3fifo"


class ARCMachine(TieringMachine):
    """Evicts by ARC."""

    policy = "arc"


@pytest.mark.parametrize(
    "machine", [TieringMachine, FullOnly, TwoFullGroups, S3FIFOMachine, ARCMachine]
)
def test_machine(machine: type[TieringMachine]) -> None:
    phases = [Phase.generate, Phase.shrink] if SHRINK else [Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(EXAMPLES or 200),
            stateful_step_count=40,
            derandomize=EXAMPLES is None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
