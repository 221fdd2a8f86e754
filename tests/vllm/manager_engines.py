"""Engines in small for the tests of the manager: made for a test, held up, and looked into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector import Engine

from kvtier.vllm.executors.cpu import copy_piecewise

MEMORY = {"type": "memory", "name": "ram"}

ALL_OF_IT = {"promotion_share": 0.45, "cascade_share": 0.45}

Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(Engine(**settings))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture(params=[False, True], ids=["0.32", "0.33"])
def newest(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def hold_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    released = threading.Event()
    engine.gates.append(released)

    def held(*arrays: Any) -> None:
        released.wait()
        copy_piecewise(*arrays)

    for rank in engine.ranks:
        monkeypatch.setattr(rank.worker._executor, "_copy", held)
    return released


def free_slots(engine: Engine) -> set[int]:
    return set(engine.offloader.core.pool._free)


def total(engine: Engine, name: str, labels: tuple[str, ...]) -> float:
    return float(engine.metrics._values[name][labels])
