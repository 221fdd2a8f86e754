"""Help texts are shown whole: what stands in brackets is markup to the library that draws them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvtier.cli.app import app


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one, with its path. Any: typer has groups of its own, or click's."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_shown_whole(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    shown = " ".join(CliRunner().invoke(app, [*path, "--help"]).stdout.split())
    for parameter in COMMANDS[path].params:
        text = getattr(parameter, "help", None)
        assert text is None or " ".join(text.split()) in shown, parameter.name


@pytest.mark.parametrize(
    ("path", "defaults"),
    [
        (("bench", "fs"), ("64KiB,256KiB,1MiB,4MiB,16MiB", "1,16,64,256")),
        (("bench", "object"), ("64KiB,512KiB,2MiB,8MiB", "1,8,64")),
        (("bench", "valkey"), ("64KiB,512KiB,2MiB,8MiB", "1,8,64")),
    ],
    ids=" ".join,
)
def test_lists_that_are_measured_by_default_are_told(
    path: tuple[str, ...], defaults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    shown = CliRunner().invoke(app, [*path, "--help"]).stdout
    for default in defaults:
        assert default in shown
