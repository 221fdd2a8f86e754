"""One region in many processes: real ones, that join in any order, disagree, and are killed."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.types import Slot
from kvtier.errors import RegionError
from kvtier.region import (
    Geometry,
    Mark,
    Offer,
    Region,
    available_memory,
    join,
    memory,
    share,
    total_memory,
)
from kvtier.region.rendezvous import _address

PROGRAM = Path(__file__).with_name("region_process.py")
PAGE = 4096
AS_ROOT = os.geteuid() == 0


class Process:
    """A process of an engine."""

    def __init__(self, engine: str, timeout_s: float = 30.0) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(PROGRAM), engine, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: object) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.child.stdin.flush()

    def answer(self) -> object:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())["answer"]

    def call(self, do: str, **arguments: object) -> object:
        self.ask(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[..., Process]


@pytest.fixture
def engine() -> str:
    return f"test-{secrets.token_hex(8)}"


@pytest.fixture
def start(engine: str) -> Iterator[Start]:
    started: list[Process] = []

    def begin(timeout_s: float = 30.0) -> Process:
        started.append(Process(engine, timeout_s))
        return started[-1]

    yield begin
    for process in started:
        if process.child.poll() is None:
            process.kill()


def abstract_names(engine: str) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if engine in line]


def traces() -> set[str]:
    """What bears our name; other programs come and go."""
    return {name for name in os.listdir("/dev/shm") if "kvtier" in name}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        os.sched_yield()


def worker(process: Process, rank: int, ranks: int, slots: int = 8, **facts: object) -> object:
    return process.call("share", slots=slots, ranks=ranks, rank=rank, facts=facts)


def test_what_one_process_writes_all_see(engine: str, start: Start):
    first, second, scheduler = start(), start(), start()
    assert worker(first, 0, 2, kind="canonical") == "shared"
    scheduler.ask("join")  # comes before the last worker: has to wait for it
    assert worker(second, 1, 2, kind="canonical") == "shared"
    assert scheduler.answer() == {"kind": "canonical"}

    first.call("write", slot=3, byte=7, rank=0, mark="COMPLETE")
    second.call("write", slot=4, byte=9, rank=1, mark="PARTIAL")
    for process in (first, second, scheduler):
        assert process.call("read", slot=3) == [[7], [Mark.COMPLETE, Mark.UNTOUCHED]]
        assert process.call("read", slot=4) == [[9], [Mark.UNTOUCHED, Mark.PARTIAL]]
        assert process.call("read", slot=5) == [[0], [Mark.UNTOUCHED] * 2]
    eventually(lambda: not abstract_names(engine))  # the socket went when everyone had come


def test_any_rank_may_come_first(start: Start):
    late, early = start(), start()
    assert worker(early, 1, 2) == "shared"
    assert worker(late, 0, 2) == "shared"
    early.call("write", slot=0, byte=5, rank=1, mark="FAILED")
    assert late.call("read", slot=0) == [[5], [Mark.UNTOUCHED, Mark.FAILED]]


@pytest.mark.parametrize(
    ("slots", "ranks", "facts"), [(9, 2, {}), (8, 3, {}), (8, 2, {"layout": "another"})]
)
def test_a_rank_that_disagrees_is_refused(start: Start, slots: int, ranks: int, facts: dict):
    first, second = start(), start()
    worker(first, 0, 2)
    answer = worker(second, 1, ranks, slots, **facts)
    assert answer == {"RegionError": "rank 1 has another KV cache than the first worker"}
    assert worker(second, 1, 2) == "shared", "the first worker still waits for a right one"


def test_a_rank_beyond_the_number_of_ranks_is_refused(start: Start):
    first, second = start(), start()
    worker(first, 0, 2)
    assert "RegionError" in str(worker(second, 2, 2))


def test_a_second_engine_of_the_same_name_is_refused_while_the_first_one_starts(
    engine: str, start: Start
):
    first, second = start(), start()
    worker(first, 0, 2)
    answer = worker(second, 0, 2)
    assert answer == {"RegionError": f"another engine called {engine} is starting here"}


def test_once_an_engine_has_started_another_one_may_have_its_name(engine: str, start: Start):
    one, two = start(), start()
    for process in (one, two):
        worker(process, 0, 1)
        region, _ = join(engine, 10)
        region.close()
        eventually(lambda: not abstract_names(engine))
    one.call("write", slot=0, byte=1, rank=0, mark="COMPLETE")
    assert two.call("read", slot=0) == [[0], [Mark.UNTOUCHED]]


def test_the_scheduler_refuses_when_a_rank_does_not_come(engine: str, start: Start):
    worker(start(), 0, 2)
    with pytest.raises(RegionError, match=rf"not all workers of engine {engine} .* within 0.3 s"):
        join(engine, 0.3)


def test_the_scheduler_refuses_when_no_worker_comes(engine: str):
    with pytest.raises(RegionError, match="one host"):
        join(engine, 0.05)


def test_a_worker_that_comes_after_a_scheduler_gave_up_still_gets_the_memory(
    engine: str, start: Start
):
    first, second = start(), start()
    worker(first, 0, 2)
    with pytest.raises(RegionError):
        join(engine, 0.2)
    assert worker(second, 1, 2) == "shared"


def test_long_names_are_not_cut_short(engine: str):
    name = engine + "x" * 200
    assert _address(name + "_dp0") != _address(name + "_dp1")
    region = share(name + "_dp0", Offer(Geometry(4, PAGE, 1), {}, 0))
    with pytest.raises(RegionError):
        join(name + "_dp1", 0.05)
    joined, _ = join(name + "_dp0", 10)
    region.rows[1] = 3
    assert (joined.rows[1] == 3).all()


def test_facts_may_be_long(engine: str):
    facts = {"ignored_modules": [f"model.layers.{i}.mlp.gate" for i in range(40_000)]}
    geometry = Geometry(4, PAGE, 2)
    share(engine, Offer(geometry, facts, 0))
    share(engine, Offer(geometry, facts, 1), 10)
    _, received = join(engine, 10)
    assert received == facts


def test_garbage_does_not_stop_the_first_worker(engine: str):
    share(engine, Offer(Geometry(4, PAGE, 1), {"a": 1}, 0))
    for garbage in (b"", b"no json\n", b"[]\n", b"{}\n", b'{"rank": [1], "offer": 1}\n', b"{"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(_address(engine))
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(100) == b"", "no reply but an end"
    assert join(engine, 10)[1] == {"a": 1}


# -- other users ----------------------------------------------------------

AS_NOBODY = "import os, sys, socket; os.setuid(65534); address = eval(sys.argv[1])\n"


@pytest.mark.skipif(not AS_ROOT, reason="only root can become another user")
def test_another_user_is_given_nothing(engine: str):
    share(engine, Offer(Geometry(4, PAGE, 1), {}, 0))
    program = AS_NOBODY + (
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "peer.connect(address)\n"
        "try:\n"
        "    peer.sendall(b'{\"scheduler\": true}\\n')\n"
        "    data, fds, _, _ = socket.recv_fds(peer, 100, 1)\n"
        "except OSError:\n"
        "    data, fds = b'', []\n"
        "sys.exit(bool(data or fds))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, repr(_address(engine))], check=False)
    assert ran.returncode == 0
    join(engine, 10)


@pytest.mark.skipif(not AS_ROOT, reason="only root can become another user")
def test_the_memory_of_another_user_is_not_taken(engine: str):
    program = AS_NOBODY + (
        "listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "listener.bind(address); listener.listen(9); print('up', flush=True)\n"
        "while True:\n"
        "    peer, _ = listener.accept()\n"
        "    fd = os.memfd_create('bad'); os.ftruncate(fd, 1 << 20)\n"
        "    try: socket.send_fds(peer, [b'{\"facts\": {}}\\n'], [fd])\n"
        "    except OSError: pass\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, repr(_address(engine))], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        with pytest.raises(RegionError, match=f"user 65534 listens in the name of engine {engine}"):
            share(engine, Offer(Geometry(4, PAGE, 1), {}, 0), 5)
        with pytest.raises(RegionError, match="not trusted"):
            join(engine, 5)
    finally:
        child.kill()
        child.communicate()


# -- sudden death ---------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_a_killed_creator_leaves_nothing_behind(engine: str, start: Start, moment: str):
    before = traces()
    creator, second = start(), start()
    worker(creator, 0, 2)
    if moment == "while":
        second.ask("join")  # is kept waiting for rank 1
        eventually(lambda: len(abstract_names(engine)) > 1)
    elif moment == "after":
        worker(second, 1, 2)
        region, _ = join(engine, 10)
        region.rows[2] = 77
    creator.kill()
    assert not abstract_names(engine) or moment == "while"
    if moment == "while":
        second.kill()
        assert not abstract_names(engine)
    elif moment == "after":
        assert second.call("read", slot=2) == [[77], [0, 0]], "the memory is everybody's"
        second.call("write", slot=2, byte=78, rank=1, mark="COMPLETE")
        assert (region.rows[2] == 78).all()
    assert traces() == before

    again = start()
    assert worker(again, 0, 1, slots=16) == "shared", "the name is free"
    joined, _ = join(engine, 10)
    assert joined.geometry == Geometry(16, PAGE, 1)
    assert not joined.rows.any()


def test_a_joiner_is_told_when_the_creator_dies(engine: str, start: Start):
    creator, waiting = start(), start(timeout_s=1.0)
    worker(creator, 0, 2)
    waiting.ask("join")
    eventually(lambda: len(abstract_names(engine)) > 1)
    creator.kill()
    assert "RegionError" in str(waiting.answer())


# -- memory ---------------------------------------------------------------


def test_populate_backs_the_region_and_its_end_frees_it(start: Start):
    slots = 64 << 8  # 64 MiB

    def shared_memory() -> int:
        return memory._meminfo("Shmem")

    process = start()
    worker(process, 0, 1, slots=slots)
    status = Path(f"/proc/{process.child.pid}/status")

    def resident() -> int:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["RssShmem"].split()[0]) << 10

    assert resident() < 1 << 20
    process.call("populate")
    assert resident() >= slots * PAGE
    assert shared_memory() >= slots * PAGE
    backed = shared_memory()
    process.kill()
    eventually(lambda: shared_memory() <= backed - slots * PAGE // 2)


def test_populate_leaves_what_is_written():
    region = Region.create(Geometry(2048, PAGE, 1))
    region.rows[:] = np.arange(2048, dtype=np.uint8)[:, None]
    region.populate().join()
    assert (region.rows == np.arange(2048, dtype=np.uint8)[:, None]).all()


SMAPS = """\
7f0000000000-7f0000200000 rw-s 00000000 00:01 1  /memfd:kvtier (deleted)
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
7f0000200000-7f0000a00000 rw-s 00000000 00:01 2  /memfd:kvtier (deleted)
Rss:                8192 kB
ShmemPmdMapped:     6144 kB
VmFlags: rd wr sh mr mw me ms sd hg
7f0000a00000-7f0000b00000 rw-p 00000000 00:00 0
Rss:                1024 kB
"""


@pytest.mark.parametrize(
    ("address", "huge"),
    [
        (0x7F0000000000, 2 << 20),
        (0x7F0000200000, 6 << 20),
        (0x7F0000A00000, 0),
        (0x7F0000001000, 0),
    ],
)
def test_huge_pages_are_those_of_one_mapping(address: int, huge: int):
    assert memory._huge_bytes_at(address, SMAPS.splitlines(keepends=True)) == huge


def test_populate_tells_of_what_pages_the_pool_is(caplog: pytest.LogCaptureFixture):
    region = Region.create(Geometry(2048, 4 * PAGE, 1))
    with caplog.at_level("INFO", "kvtier"):
        region.populate().join()
    (told,) = caplog.messages
    if huge := region.huge_bytes():
        assert 0 < huge <= region.geometry.total_bytes
        assert "are in huge pages" in told
    else:
        assert "small pages" in told
        assert memory._SHMEM_ENABLED in told


def test_the_size_is_sealed():
    region = Region.create(Geometry(4, PAGE, 1))
    for size in (PAGE, 1 << 20):
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(region.fd, size)
    assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


def test_slots_marks_and_rows_do_not_overlap():
    region = Region.create(Geometry(3, 2 * PAGE, 5000))
    region.marks[:] = Mark.FAILED
    for slot in range(3):
        region.slot(Slot(slot))[:] = bytes([slot + 1]) * (2 * PAGE)
    assert (region.marks == Mark.FAILED).all()
    for slot in range(3):
        assert (region.rows[slot] == slot + 1).all()
    assert region.rows_address == region.rows.ctypes.data
    assert region.rows_address % PAGE == 0
    again = Region.from_fd(os.dup(region.fd))
    assert (again.marks == Mark.FAILED).all()
    assert (again.rows == region.rows).all()
    assert again.slot_bytes == 2 * PAGE


def test_closing_keeps_what_is_mapped():
    region = Region.create(Geometry(2, PAGE, 1))
    view = region.slot(Slot(1))
    region.close()
    region.close()
    del region
    gc.collect()
    view[:] = b"k" * PAGE
    assert bytes(view) == b"k" * PAGE


def test_a_region_larger_than_memory_is_refused_with_the_figures():
    slots = available_memory() // PAGE + (1 << 20)
    geometry = Geometry(slots, PAGE, 1)
    with pytest.raises(RegionError) as refused:
        Region.create(geometry)
    for figure in (f"{geometry.total_bytes:,}", f"{slots:,} slots of {PAGE:,}", "cpu_bytes_to_use"):
        assert figure in str(refused.value)


def test_the_name_is_free_after_a_region_was_refused(engine: str):
    with pytest.raises(RegionError, match="memory are available"):
        share(engine, Offer(Geometry(1 << 50, PAGE, 1), {}, 0))
    assert not abstract_names(engine)


@pytest.mark.parametrize(("slots", "row_bytes"), [(0, PAGE), (-1, PAGE), (4, 0), (4, 100)])
def test_an_impossible_region_is_refused(slots: int, row_bytes: int):
    with pytest.raises(RegionError, match="impossible"):
        Region.create(Geometry(slots, row_bytes, 1))


def test_the_memory_of_the_machine_is_not_less_than_what_is_free():
    assert total_memory() >= available_memory() > 0


# -- descriptors of others ------------------------------------------------


def foreign(content: bytes, size: int) -> int:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


def test_a_foreign_descriptor_is_refused_and_closed():
    region = Region.create(Geometry(4, PAGE, 1))
    header = os.pread(region.fd, 64, 0)
    size = region.geometry.total_bytes
    for content, length, message in [
        (b"something else" * 10, size, "not a kvtier region"),
        (header, size + PAGE, "another size"),
        (header, PAGE, "another size"),
        (b"", 0, "cannot be used"),
    ]:
        fd = foreign(content, length)
        with pytest.raises(RegionError, match=message):
            Region.from_fd(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_region_whose_size_is_not_sealed_is_refused():
    region = Region.create(Geometry(4, PAGE, 1))
    fd = foreign(os.pread(region.fd, 64, 0), region.geometry.total_bytes)
    with pytest.raises(RegionError, match="not sealed"):
        Region.from_fd(fd)


def test_a_socket_is_no_region():
    one, other = socket.socketpair()
    with other, pytest.raises(RegionError, match="cannot be used"):
        Region.from_fd(one.detach())
