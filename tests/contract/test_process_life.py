"""Killed, stopped and hung in each phase of a job: it ends, its slots are safe, and the next
process works.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_stage import Stage, drive

from kvtier.core.types import Done, Fault
from kvtier.drivers.process import pidfd
from kvtier.drivers.process.driver import (
    AGAIN_S,
    LAST_WORD_S,
    POLL_GAP_S,
    START_S,
    STEADY_S,
    ProcessDriver,
)
from kvtier.drivers.process.process import POLL_BYTES_MAX, POLL_FRAMES_MAX
from kvtier.testing.blocks import block_of, key_of
from kvtier.testing.faults import Fail, Hang

PHASES = ["import", "open", "exists", "read", "write", "report"]
OPERATION_OF = {"exists": "lookup", "read": "load"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def reach(stage: Stage, phase: str, released: threading.Event, **more: float) -> ProcessDriver:
    """A driver with job 1 in a process that hangs in a phase of it."""
    driver = stage.make(**more)
    if phase in ("read", "exists", "write"):
        stage.submit(driver, "store", 0, 1)
        assert stage.done(driver, 0).ok == {key_of(1)}
    stage.script.script(phase, Hang(released))  # type: ignore[arg-type]
    calls = stage.script.calls[phase]  # type: ignore[index]
    stage.submit(driver, OPERATION_OF.get(phase, "store"), 1, 1)
    stage.reach(driver, phase, calls + 1)
    return driver


@pytest.fixture
def released() -> Iterator[threading.Event]:
    released = threading.Event()
    yield released
    released.set()


def works_again(stage: Stage, driver: ProcessDriver, released: threading.Event) -> None:
    """The next process does all kinds of jobs."""
    released.set()
    stage.script.heal()
    before = driver.counters()
    assert driver.pid is None, "the backoff begins with the end of the last one"
    stage.submit(driver, "store", 50, 7)
    assert stage.done(driver, 50) == Done(50, frozenset(), Fault.UNREACHABLE)
    stage.clock.now += 1.0
    stage.poll(driver, lambda _: driver.pid is not None)
    for job_id, operation in enumerate(("store", "lookup", "load"), 51):
        stage.submit(driver, operation, job_id, 7, 8)
        assert stage.done(driver, job_id) == Done(job_id, frozenset({key_of(7), key_of(8)}))
    after = driver.counters()
    assert after.process_starts == 2
    assert after.write_blocks == before.write_blocks + 2
    assert after.write_bytes >= before.write_bytes
    assert after.lookup_blocks == before.lookup_blocks + 2
    assert after.write_failures == before.write_failures + 1


@pytest.mark.parametrize("phase", PHASES)
def test_killed(stage: Stage, phase: str, released: threading.Event):
    driver = reach(stage, phase, released)
    before = driver.counters()
    assert before.write_blocks == (phase in ("exists", "read", "write"))
    stage.kill(driver)
    assert stage.done(driver, 1) == Done(1, frozenset(), Fault.UNREACHABLE)
    counters = driver.counters()
    assert (counters.process_crashes, counters.process_kills) == (1, 0)
    assert counters.faults == {"unreachable": 1}
    assert counters.write_blocks >= before.write_blocks
    works_again(stage, driver, released)


@pytest.mark.parametrize("phase", PHASES)
def test_stopped(stage: Stage, phase: str, released: threading.Event):
    driver = reach(stage, phase, released, hang_s=20.0)
    stage.kill(driver, signal.SIGSTOP)
    begun = stage.clock.now
    early = stage.poll(driver, lambda _: driver.pid is None, POLL_GAP_S)
    assert stage.clock.now - begun >= (START_S if phase == "import" else 20.0)
    ended = early or [stage.done(driver, 1)]
    assert ended == [Done(1, frozenset(), Fault.UNREACHABLE)]
    counters = driver.counters()
    assert (counters.process_crashes, counters.process_kills) == (0, 1)
    assert counters.faults == {"stalled": 1}
    works_again(stage, driver, released)


@pytest.mark.parametrize("phase", ["open", "exists", "read", "write"])
def test_hung(
    stage: Stage, phase: str, released: threading.Event, caplog: pytest.LogCaptureFixture
):
    """The process lives and says for how long it hangs, by its own clock."""
    driver = reach(stage, phase, released, hang_s=1.2)
    process = driver._process
    assert process is not None
    early = stage.poll(driver, lambda _: process.stuck_at is not None)
    stage.clock.now += AGAIN_S
    ended = early or [stage.done(driver, 1)]
    assert ended == [Done(1, frozenset(), Fault.UNREACHABLE)]
    (record,) = caplog.records
    assert "hangs for more than 1.2 s" in record.getMessage()
    counters = driver.counters()
    assert (counters.process_crashes, counters.process_kills) == (0, 1)
    works_again(stage, driver, released)


def test_a_block_that_hangs_for_a_while_is_waited_for(stage: Stage, released: threading.Event):
    driver = reach(stage, "write", released, hang_s=10.0)
    pid = driver.pid
    for _ in range(9):
        stage.clock.now += 3600.0  # an engine that seldom polls
        assert driver.get_finished() == []
    released.set()
    assert stage.done(driver, 1).ok == {key_of(1)}
    assert driver.pid == pid


def test_time_without_a_poll_is_no_silence(stage: Stage):
    """The engine was idle for an hour, and the process had nothing to say that it could."""
    driver = stage.make(hang_s=10.0)
    stage.submit(driver, "store", 0, 1)
    stage.done(driver, 0)
    stage.kill(driver, signal.SIGSTOP)
    stage.submit(driver, "store", 1, 1)
    stage.clock.now += 3600.0
    assert driver.get_finished() == []
    assert driver.pid is not None
    stage.kill(driver, signal.SIGCONT)
    assert stage.done(driver, 1).ok == {key_of(1)}


def test_silence_without_jobs_is_no_fault(stage: Stage):
    driver = stage.make(hang_s=10.0)
    stage.submit(driver, "store", 0, 1)
    stage.done(driver, 0)
    for _ in range(1000):
        stage.clock.now += 1.0
        assert driver.get_finished() == []
    assert driver.counters().process_kills == 0


def test_no_slot_is_given_back_while_its_process_may_write(
    stage: Stage, released: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """A load hangs; its process is killed, but stopped short of its end, as one in uninterruptible
    sleep would be; another one serves new jobs meanwhile.
    """
    driver = reach(stage, "read", released, hang_s=0.01)
    dying = driver._process
    assert dying is not None
    kill = pidfd.kill
    monkeypatch.setattr(pidfd, "kill", lambda *_: None)
    stage.poll(driver, lambda _: driver.pid is None, 0.001)
    assert driver.counters().process_kills == 1
    for _ in range(50):
        assert driver.get_finished() == [], "its slots may still be written"
    stage.script.heal()
    stage.clock.now += 1.0
    stage.poll(driver, lambda _: driver.pid is not None)
    monkeypatch.undo()
    stage.submit(driver, "store", 2, 5)
    assert stage.done(driver, 2).ok == {key_of(5)}
    assert dying.pid != driver.pid
    assert driver.get_finished() == []
    kill(dying._pidfd)
    assert stage.done(driver, 1) == Done(1, frozenset(), Fault.UNREACHABLE)


def test_processes_that_cannot_be_killed_do_not_pile_up(
    stage: Stage, released: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    stage.script.script("write", Hang(released))
    driver = stage.make(hang_s=0.01)
    kill = pidfd.kill
    kept = []
    with monkeypatch.context() as patched:
        patched.setattr(pidfd, "kill", lambda *_: None)
        for job_id in (1, 2):
            kept.append(driver._process)
            stage.submit(driver, "store", job_id, job_id)
            stage.poll(driver, lambda _: driver.pid is None, 0.001)
            stage.clock.now += 100.0
            driver.get_finished()
        assert driver.pid is None, "no third one"
        stage.submit(driver, "store", 3, 3)
        assert driver.get_finished() == [Done(3, frozenset(), Fault.UNREACHABLE)]
        assert not driver.close(0.0)
    for process in kept:
        kill(process._pidfd)
    stage.poll(driver, lambda finished: len(finished) == 2)


def test_a_full_socket_holds_nothing_up(stage: Stage):
    """Stores, and between them lookups, which fill a socket as well and copy nothing."""
    driver = stage.make()
    stage.submit(driver, "store", 0, *range(16))  # what the lookups find
    stage.done(driver, 0)
    stage.kill(driver, signal.SIGSTOP)
    slots = stage.slots.take(16)
    keys = [key_of(i) for i in range(16)]
    for i, key in enumerate(keys):
        slots.fill(i, block_of(key))
    for job_id in range(1, 1501):
        if job_id % 10 == 1:
            driver.submit_store(drive.job(job_id, keys, slots, readonly=True))
        else:
            driver.submit_lookup(drive.job(job_id, keys, None))
    process = driver._process
    assert process is not None
    assert 1 << 19 < len(process._outbox) < 1500 * 16 * 64, "bounded by what is in flight"
    stage.kill(driver, signal.SIGCONT)
    finished = stage.poll(driver, lambda finished: len(finished) == 1500)
    assert {done.job for done in finished if isinstance(done, Done)} == set(range(1, 1501))
    assert all(isinstance(done, Done) and done.ok == set(keys) for done in finished)
    assert not process._outbox


def test_logs_come_out_here(stage: Stage, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        driver = stage.make(says="hello")
        stage.script.script("write", Fail(ValueError("what the tier says")))
        stage.submit(driver, "store", 1, 1)
        stage.done(driver, 1)
        stage.poll(driver, lambda _: len(caplog.records) >= 2)
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("of.the.tier", logging.WARNING, "hello: facts"),
        (
            "kvtier.drivers.threaded",
            logging.WARNING,
            "Tier x: store failed: ValueError: what the tier says (more are counted, not logged)",
        ),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_everybody_do_not_end_it_before_the_engine_is_done(stage: Stage, number: int):
    driver = stage.make()
    stage.submit(driver, "store", 1, 1)
    stage.done(driver, 1)
    stage.kill(driver, number)
    stage.submit(driver, "store", 2, 2)
    assert stage.done(driver, 2).ok == {key_of(2)}
    assert driver.pid is not None
    assert os.getpgid(driver.pid) == driver.pid, "a terminal's signals do not reach it"
    assert os.getsid(driver.pid) == os.getsid(0), "it is scheduled beside the engine"


def program(folder: Path, body: str) -> str:
    """An executable that is started in place of Python, and notes each start in `folder/starts`."""
    path = folder / "program"
    path.write_text(
        f"#!{sys.executable}\nimport os, socket, sys, time\n"
        f"open({str(folder / 'starts')!r}, 'a').write('x')\n"
        f"sock = socket.socket(fileno=int(sys.argv[sys.argv.index('--socket') + 1]))\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text()) if path.exists() else 0


def test_one_that_ends_at_once_is_started_less_and_less_often(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    began = stage.clock.now
    driver = stage.make(executable=program(tmp_path, "sys.exit(3)"))
    at: list[float] = []
    seen = 0
    while len(at) < 9:
        stage.poll(driver, lambda _: driver.pid is None and not driver._dying)
        if driver.counters().process_starts > seen:
            at.append(stage.clock.now - began)
            seen = driver.counters().process_starts
        stage.clock.now += 0.5
        driver.get_finished()
    assert at == pytest.approx([0, 1, 3, 7, 15, 31, 63, 123, 183], abs=0.6 * len(at))
    assert driver.counters().process_crashes == driver.counters().process_starts >= 9
    told = [record.getMessage() for record in caplog.records]
    assert told == ["The I/O process of tier x ended by itself (exit status 3)"]


def test_the_delay_falls_back_when_a_process_has_worked(stage: Stage):
    driver = stage.make()
    for _ in range(3):
        stage.submit(driver, "store", 0, 1)
        stage.done(driver, 0)
        stage.kill(driver)
        stage.poll(driver, lambda _: driver.pid is None)
        stage.clock.now += 30.0
        stage.poll(driver, lambda _: driver.pid is not None)
    stage.submit(driver, "store", 0, 1)
    stage.done(driver, 0)
    stage.clock.now += STEADY_S
    stage.submit(driver, "store", 1, 1)
    stage.done(driver, 1)
    stage.kill(driver)
    stage.poll(driver, lambda _: driver.pid is None)
    stage.clock.now += 1.0
    driver.get_finished()
    assert driver.pid is not None


@pytest.mark.parametrize("executable", ["/no/such/python", ""])
def test_one_that_cannot_be_started(
    stage: Stage, executable: str, caplog: pytest.LogCaptureFixture
):
    driver = stage.make(executable=executable)
    for job_id, operation in enumerate(["store", "load", "lookup"] * 3):
        stage.submit(driver, operation, job_id, 1, 2)
        assert driver.get_finished() == [Done(job_id, frozenset(), Fault.UNREACHABLE)]
        stage.clock.now += 0.4
    counters = driver.counters()
    assert (counters.write_failures, counters.read_failures, counters.lookup_failures) == (6, 6, 3)
    assert counters.process_starts == 0
    assert len(caplog.records) == 1
    attempts = []
    start = driver._start
    driver._start = lambda now: attempts.append(now) or start(now)
    for _ in range(100):
        stage.clock.now += 1.0
        driver.get_finished()
    assert len(attempts) <= 6


def test_one_that_never_begins(stage: Stage, tmp_path: Path):
    driver = stage.make(executable=program(tmp_path, "time.sleep(600)"))
    stage.submit(driver, "store", 1, 1)
    stage.poll(driver, lambda _: starts(tmp_path))
    stage.clock.now += START_S - 1
    assert driver.get_finished() == []
    stage.clock.now += 2
    assert stage.done(driver, 1).fault is Fault.UNREACHABLE
    assert driver.counters().process_kills == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [({"thread": 3}, "thread is no option"), ({"threads": "many"}, "Expected `int`")],
)
def test_a_refusal_is_told_once(
    stage: Stage, options: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
):
    driver = stage.make(**options)  # type: ignore[arg-type]
    stage.submit(driver, "store", 1, 1)
    assert stage.done(driver, 1).fault is Fault.UNREACHABLE
    stage.clock.now += 1.0
    stage.poll(driver, lambda _: driver.counters().process_starts == 2 and driver.pid is None)
    (record,) = caplog.records
    assert why in record.getMessage()
    assert driver.counters().process_crashes == 0


def test_a_tier_that_cannot_be_imported_there(stage: Stage, caplog: pytest.LogCaptureFixture):
    stage.script.script("import", Fail(RuntimeError("not on this machine")))  # type: ignore[arg-type]
    driver = stage.make()
    stage.submit(driver, "store", 1, 1)
    assert stage.done(driver, 1).fault is Fault.UNREACHABLE
    assert "RuntimeError: not on this machine" in caplog.text


NONSENSE = {
    "no length": "sock.send(b'\\xff' * 100)",
    "no message": "sock.send(b'\\x05\\0\\0\\0hello')",
    "another message": "sock.send(report([7, 'a', 10, 'b']))",
    "a job that was never sent": "sock.send(told([[6, 99, b'', '']]))",
    "a job that ended before": "sock.send(told([[6, 1, b'\\0', '']] * 2))",
    "too many bits": "sock.send(told([[6, 1, b'\\xff', '']]))",
    "too few bits": "sock.send(told([[6, 1, b'', '']]))",
    "no fault of ours": "sock.send(told([[6, 1, b'\\0', 'x']]))",
    "too few totals": "sock.send(told([], totals=C[1:]))",
    "an endless key": "sock.send(told([], dropped=[b'x' * 200]))",
}
HEADER = """
import msgspec
from kvtier.drivers.base import TOTALS
C = [0] * len(TOTALS)
def report(message):
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, 'little') + body

def told(ended, dropped=(), totals=C, age=0.0):
    return report([8, ended, dropped, totals, None, None, age, []])
sock.send(report([4]))
while len(sock.recv(1 << 16, socket.MSG_PEEK)) < 300: pass
"""


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_process_and_nothing_else(stage: Stage, tmp_path: Path, what: str):
    body = HEADER + NONSENSE[what] + "\ntime.sleep(600)"
    driver = stage.make(executable=program(tmp_path, body))
    for job_id in (1, 2):
        stage.submit(driver, "store", job_id, job_id)
    finished = stage.poll(driver, lambda finished: len(finished) >= 2)
    assert [done.job for done in finished if isinstance(done, Done)] == [1, 2]
    assert not any(isinstance(done, Done) and done.ok for done in finished)
    counters = driver.counters()
    assert (counters.process_kills, counters.process_crashes) == (1, 0)


def test_what_hung_once_may_be_over_when_it_is_heard(stage: Stage, tmp_path: Path):
    """The report lay in the socket while nobody polled."""
    body = (
        HEADER
        + "sock.send(told([], age=99.0))\n"
        + "while len(sock.recv(1 << 20, socket.MSG_PEEK)) < size: pass\n"
        + "sock.send(told([[6, 1, b'\\1', '']]))\ntime.sleep(600)"
    ).replace("size", "8000")
    driver = stage.make(executable=program(tmp_path, body))
    stage.submit(driver, "store", 1, 1)
    process = driver._process
    assert process is not None
    stage.poll(driver, lambda _: process.stuck_at is not None)
    stage.clock.now += 60.0
    driver.get_finished()
    stage.submit(driver, "store", 2, *range(300))
    assert stage.done(driver, 1).ok == {key_of(1)}
    stage.clock.now += 1.0
    driver.get_finished()
    assert driver.counters().process_kills == 0


def test_half_a_message_is_no_message(stage: Stage, tmp_path: Path):
    body = HEADER + "sock.send(told([[6, 1, b'\\1', '']])[:-1])"
    driver = stage.make(executable=program(tmp_path, body))
    stage.submit(driver, "store", 1, 1)
    stage.submit(driver, "store", 2, 1)
    assert stage.done(driver, 1) == Done(1, frozenset(), Fault.UNREACHABLE)


def test_what_was_said_before_the_end_counts(stage: Stage, tmp_path: Path):
    body = HEADER + "sock.send(told([[6, 1, b'\\1', '']]))\nos._exit(0)"
    driver = stage.make(executable=program(tmp_path, body))
    for job_id in (1, 2):
        stage.submit(driver, "store", job_id, job_id)
    finished = stage.poll(driver, lambda finished: len(finished) >= 2)
    assert finished == [
        Done(1, frozenset({key_of(1)})),
        Done(2, frozenset(), Fault.UNREACHABLE),
    ]


@pytest.mark.parametrize("closes", [False, True])
def test_one_that_closes_its_socket_and_lives_is_killed(stage: Stage, tmp_path: Path, closes: bool):
    driver = stage.make(executable=program(tmp_path, HEADER + "sock.close()\ntime.sleep(600)"))
    for job_id in (1, 2):
        stage.submit(driver, "store", job_id, job_id)
    stage.poll(driver, lambda _: driver.pid is None)
    assert driver.get_finished() == [], "it may be at them still"
    if closes:
        assert driver.close()
    stage.clock.now += LAST_WORD_S
    assert len(stage.poll(driver, lambda finished: len(finished) == 2)) == 2


def test_one_that_floods_costs_a_bounded_time_per_poll(stage: Stage, tmp_path: Path):
    body = HEADER + "frames = told([]) * 1000\nwhile True: sock.sendall(frames)"
    driver = stage.make(executable=program(tmp_path, body))
    stage.submit(driver, "store", 1, 1)
    stage.submit(driver, "store", 2, 1)
    process = driver._process
    assert process is not None
    polls = 0
    while polls < 100:
        messages, drained, _ = process.receive()
        polls += len(messages) == POLL_FRAMES_MAX
        assert len(messages) <= POLL_FRAMES_MAX
        assert not (drained and len(messages) == POLL_FRAMES_MAX)
        assert len(process._inbox._bytes) < POLL_BYTES_MAX
