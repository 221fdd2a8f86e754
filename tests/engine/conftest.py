"""Engines for tests: real vLLM on the CPU, small models with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_client import Forker
from small_engines import Engines, Prompts, make_model

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a model by kind: "gqa", "hybrid" or "mla"."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(kind, root / kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("forker") / "log")
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def engines(
    forker: Forker, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(forker, model, tmp_path_factory.mktemp("logs"))
    yield engines
    engines.stop()


@pytest.fixture(scope="module")
def prompt() -> Prompts:
    return Prompts()
