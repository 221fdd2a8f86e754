"""Rounds of the benchmarks of tiers behind a network."""

from __future__ import annotations

import pytest

from kvtier.cli import bench_remote


class Recording:
    """A bare client that keeps the names that it was given, in order."""

    def __init__(self, overwrites: bool) -> None:
        self.overwrites = overwrites
        self.names: list[str] = []
        self.cleaned = 0

    def put(self, name: str, data: memoryview) -> None:
        self.names.append(name)

    def get(self, name: str, into: memoryview) -> None:
        assert name in self.names

    def clean(self) -> None:
        self.cleaned += 1


@pytest.mark.parametrize("overwrites", [False, True])
def test_rounds_write_new_keys_or_those_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, overwrites: bool
) -> None:
    monkeypatch.setattr(bench_remote, "_TICKS", 20)
    monkeypatch.setattr(bench_remote, "_ROUND_BYTES", 4 * 8192)
    bare = Recording(overwrites)
    rows = bench_remote.measure(
        bench_remote.Plan("memory", {}, (8192,), (1, 2), 0.01), bare, lambda _: None
    )
    assert len(rows) == 2 * 2 + 1
    assert bare.cleaned == 2, "with each number of blocks"
    if overwrites:
        # four times, and twice, in each of three rounds
        assert len(bare.names) >= (1 + 3 * 4) + (2 + 3 * 4)
        assert len(set(bare.names)) == 3
    else:
        assert len(set(bare.names)) == len(bare.names) >= (1 + 3) + (2 + 3 * 2)
