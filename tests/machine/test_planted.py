"""Faults are planted in the code as it is now; running all of them takes an hour, this does not."""

from __future__ import annotations

from collections import Counter

from mutants import MUTANTS, ROOT, UNITS, unit_tests


def test_every_planted_fault_has_a_place() -> None:
    nowhere = [
        mutant.what
        for mutant in MUTANTS
        if (ROOT / "src/kvtier/core" / mutant.file).read_text().count(mutant.old) != 1
    ]
    assert nowhere == []


def test_every_planted_fault_changes_something() -> None:
    assert [mutant.what for mutant in MUTANTS if mutant.old == mutant.new] == []
    assert [what for what, count in Counter(m.what for m in MUTANTS).items() if count > 1] == []


def test_the_tests_that_are_to_notice_are_there() -> None:
    assert len(unit_tests()) >= len(UNITS)
