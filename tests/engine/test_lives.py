"""Engines that are killed, and engines that must not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_client import SERVER_LIKE, EngineError
from small_engines import children, connector_settings, engine_arguments, stored_blocks, until

from kvtier.tiers.fs.marker import mark

pytestmark = pytest.mark.engine


class Family:
    """An engine's process and all that it has started, to see that none of it outlives the engine.

    Looks at nothing else on this host: other engines may run.
    """

    def __init__(self, pid: int) -> None:
        self._pids = [pid, *children(pid)]
        self._born = {p: born(p) for p in self._pids}
        self._sockets = {link for p in self._pids for link in open_sockets(p)}

    def is_gone(self) -> bool:
        """No process is left, and no name of theirs in the kernel or in /dev/shm."""
        if any(born(pid) == self._born[pid] for pid in self._pids):
            return False
        named = {line.split()[6] for line in unix_sockets() if "@kvtier/" in line}
        return not (named & self._sockets) and not kvtier_files()


def born(pid: int) -> str | None:
    """When a process started, which tells it from a later one of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] == "Z" else stat[19]


def unix_sockets() -> list[str]:
    return Path("/proc/net/unix").read_text().splitlines()[1:]


def open_sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(descriptor)
        except OSError:
            continue  # closed meanwhile
        if link.startswith("socket:["):
            found.add(link[len("socket:[") : -1])
    return found


def kvtier_files() -> set[str]:
    """Names in shared memory; there must never be one."""
    return {name for name in os.listdir("/dev/shm") if "kvtier" in name}


def has_a_pool(pid: int) -> bool:
    return "memfd:kvtier" in Path(f"/proc/{pid}/maps").read_text()


def scripted(root):
    return [{"type": "scripted_tier:ScriptedTierType", "name": "slow", "root_dir": str(root)}]


@pytest.mark.parametrize("phase", ["starting", "storing", "loading", "idle"])
def test_sigkill(engines, prompt, tmp_path, model, phase) -> None:
    mark(tmp_path, "files")  # as the scripted tier keeps blocks
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
        until(lambda: has_a_pool(victim.pid))
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
    assert has_a_pool(victim.pid)
    family = Family(victim.pid)
    victim.kill()
    until(family.is_gone)

    heir = engines.start("gqa", tmp_path)
    answer = heir.generate(asked)
    assert answer.tokens == expected
    assert answer.disk == 480
    answer = heir.generate(another)
    assert answer.tokens == expected_of_another
    assert answer.disk == (5 * 32 if phase == "storing" else 0)
    heir.stop()


def test_sigkill_of_a_scheduler_process(engines, prompt, tmp_path) -> None:
    """As `vllm serve` runs: two workers and the scheduler are processes, and the tier is one."""
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
    until(lambda: engine.call("nudge") or stored_blocks(tmp_path) == 15)
    engine.call("reset", connector=True)
    answer = engine.generate(asked)
    assert (answer.disk, answer.tokens) == (480, expected.tokens)
    scheduler = next(
        pid
        for pid in children(engine.pid)
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    family = Family(scheduler)
    os.kill(scheduler, 9)
    until(family.is_gone)
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
    message = bare.call("make_spec", connector=connector_settings(None, changes), pages=[16, 4096])
    assert message.startswith("ConfigError: ")
    assert named in message
    assert not has_a_pool(bare.pid), "nothing was made"


def test_right_settings_are_taken(bare, tmp_path) -> None:
    settings = connector_settings(tmp_path, {})
    assert bare.call("make_spec", connector=settings, pages=[16, 4096]) == ""


@pytest.mark.parametrize("changes", [{"max_wait": 5}, {"cpu_bytes_to_use": "4KiB"}])
def test_an_engine_does_not_start_with_a_wrong_setting(engines, model, tmp_path, changes) -> None:
    engine = engines.process()
    with pytest.raises(EngineError, match=next(iter(changes))):
        engine.call(
            "start",
            engine=engine_arguments(model("gqa")),
            connector=connector_settings(tmp_path, changes),
        )
    assert {path.name for path in tmp_path.iterdir()} <= {"kvtier.json"}, "at most its mark"
    family = Family(engine.pid)
    engine.stop()
    until(family.is_gone)
