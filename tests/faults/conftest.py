from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import LAYOUTS, MakeRig, Rig

from kvtier.testing.broken_medium import BrokenCalls, LoopMount, UnavailableError


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_rig(layout: str, caplog: pytest.LogCaptureFixture) -> Iterator[MakeRig]:
    """Rigs that are closed at the end."""
    caplog.set_level(logging.INFO, "kvtier")
    made: list[Rig] = []

    def make(root: Path, **options: Any) -> Rig:
        made.append(Rig(root, layout, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return BrokenCalls.build(tmp_path_factory.mktemp("library"))
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def calls(
    root: Path, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> BrokenCalls:
    """Calls below `root` that fail when told to, in the I/O processes of this test."""
    calls = BrokenCalls(root, tmp_path, library)
    for name, value in calls.environment.items():
        monkeypatch.setenv(name, value)
    return calls


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[LoopMount]:
    try:
        mount = LoopMount(tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))
    with mount:
        yield mount
