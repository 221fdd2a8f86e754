"""Engines that are killed, and engines that must not start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import block_files, connector_settings, engine_arguments
from engine_client import SERVER_LIKE, EngineError

pytestmark = pytest.mark.engine

DEADLINE_S = 60.0


def nothing_is_left(before) -> bool:
    return all(now <= before[kind] for kind, now in traces().items())


def until(reached) -> None:
    """Look again until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def traces() -> dict[str, set[str]]:
    """What an engine with kvtier could leave behind on this host."""
    names = Path("/proc/net/unix").read_text().split()
    return {
        "shm": {n for n in os.listdir("/dev/shm") if "kvtier" in n or "offload" in n},
        "sockets": {name for name in names if name.startswith("@kvtier")},
        "processes": processes_with_a_pool(),
    }


def processes_with_a_pool() -> set[str]:
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if "memfd:kvtier" in maps.read_text():
                found.add(maps.parent.name)
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def scripted(root):
    return [{"type": "scripted_tier:ScriptedTierType", "name": "slow", "root_dir": str(root)}]


@pytest.mark.parametrize("phase", ["starting", "storing", "loading", "idle"])
def test_sigkill(engines, prompt, tmp_path, model, phase) -> None:
    before = traces()
    asked, another = prompt(500), prompt(500)
    writer = engines.start("gqa", tmp_path)
    expected = writer.reference(asked)
    expected_of_another = writer.generate(another, salt="computed").tokens
    writer.quiet()
    writer.stop()

    victim = engines.process()
    arguments = {
        "engine": engine_arguments(model("gqa")),
        "connector": connector_settings(None, {"secondary_tiers": scripted(tmp_path)}),
    }
    if phase == "starting":
        victim.send("start", **arguments)
        until(lambda: str(victim.pid) in processes_with_a_pool())
    else:
        victim.call("start", **arguments)
    if phase == "storing":
        victim.call("script", method="hold", operation="write", after=5)
        victim.call("add", prompt=another)
        victim.call("step_until_waiting", operation="write", count=4)
    if phase == "loading":
        victim.call("script", method="hold", operation="read", after=5)
        victim.call("add", prompt=asked)
        victim.call("step_until_waiting", operation="read", count=4)
    if phase == "idle":
        assert victim.generate(asked).disk == 480
    assert str(victim.pid) in processes_with_a_pool()
    victim.kill()
    until(lambda: nothing_is_left(before))

    heir = engines.start("gqa", tmp_path)
    answer = heir.generate(asked)
    assert answer.tokens == expected
    assert answer.disk == 480
    answer = heir.generate(another)
    assert answer.tokens == expected_of_another
    assert answer.disk == (5 * 32 if phase == "storing" else 0)
    heir.stop()


def test_sigkill_of_a_scheduler_process(engines, prompt, tmp_path) -> None:
    """As `vllm serve` runs: two workers and the scheduler are processes."""
    before = traces()
    engine = engines.start(
        "gqa",
        tmp_path,
        environment={**SERVER_LIKE, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        fresh=True,
        engine={"tensor_parallel_size": 2},
    )
    asked = prompt(500)
    engine.generate(asked)
    expected = engine.generate(asked)
    assert expected.device == 480
    until(lambda: engine.call("nudge") or len(block_files(tmp_path)) == 15)
    engine.call("reset", connector=True)
    answer = engine.generate(asked)
    assert (answer.disk, answer.tokens) == (480, expected.tokens)
    family = children(engine.pid)
    schedulers = [
        pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert schedulers
    os.kill(schedulers[0], 9)
    until(lambda: nothing_is_left(before))
    engine.kill()

    heir = engines.start("gqa", tmp_path)
    answer = heir.generate(asked)
    assert (answer.disk, answer.tokens) == (480, expected.tokens)
    heir.stop()


@pytest.fixture(scope="module")
def bare(engines):
    """A process without an engine."""
    return engines.process()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_wait": 5}, "max_wait"),
        ({"max_wait_ms": 0}, "max_wait_ms"),
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "8XB"}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1000}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "1000TiB"}, "cpu_bytes_to_use"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/nowhere"}]}, "root_dir"),
        ({"secondary_tiers": [{"type": "fs", "root": "/tmp"}]}, "secondary_tiers[0].root"),
        ({"secondary_tiers": [{"type": "sf"}]}, "secondary_tiers[0].type"),
        ({"canonical_layout": False}, "canonical_layout"),
    ],
)
def test_a_wrong_setting_is_named(bare, changes, named) -> None:
    before = traces()
    message = bare.call("make_spec", connector=connector_settings(None, changes), pages=[16, 4096])
    assert message.startswith("ConfigError: ")
    assert named in message
    assert nothing_is_left(before)


def test_right_settings_are_taken(bare, tmp_path) -> None:
    settings = connector_settings(tmp_path, {})
    assert bare.call("make_spec", connector=settings, pages=[16, 4096]) == ""


@pytest.mark.parametrize("changes", [{"max_wait": 5}, {"cpu_bytes_to_use": "4KiB"}])
def test_an_engine_does_not_start_with_a_wrong_setting(engines, model, tmp_path, changes) -> None:
    before = traces()
    engine = engines.process()
    with pytest.raises(EngineError, match=next(iter(changes))):
        engine.call(
            "start",
            engine=engine_arguments(model("gqa")),
            connector=connector_settings(tmp_path, changes),
        )
    assert list(tmp_path.iterdir()) == []
    engine.stop()
    until(lambda: nothing_is_left(before))
