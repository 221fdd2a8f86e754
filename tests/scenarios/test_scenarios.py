"""Each transcript is what the core answers today. `pytest tests/scenarios --rewrite-scenarios`
writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.transcripts import run

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    answers = run(text)
    if request.config.getoption("--rewrite-scenarios", default=False):
        path.write_text(answers)
        return
    assert answers == text


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_says_what_must_be_seen(path: Path) -> None:
    head = path.read_text().partition("\n>")[0]
    assert "# Seen: " in head, "the comment tells what happens, then `# Seen: ` what must be seen"


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 15


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("> ask a 1", "line 1: .*the first command is `pool`"),
        ("> pool 4\n> sing", "line 2: '> sing'"),
        ("> pool 4 singing=3", "line 1: .*singing"),
        ("> pool 4\n> step 3", "line 2: .*'3' is no time"),
        ("> pool 4\n> tier3 has 1", "line 2"),
    ],
)
def test_a_command_that_is_not_understood_is_named(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        run(text)


def test_old_answers_do_not_survive() -> None:
    assert run("# why\n> pool 4\n> show\nnonsense\n") == (
        "# why\n> pool 4\n> show\n"
        "at 0s: 4 slots, 0 pinned: promoting 0, storing 0, cascading 0, lent 0\n"
        "readable nothing; filling nothing\n"
    )
