"""Copies in ordinary memory: both ways of copying, order, waiting, failing, closing."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.vllm.copy_plan import CopyPlan
from kvtier.vllm.executors import cpu
from kvtier.vllm.executors.cpu import CopyError, CPUExecutor, copy_piecewise, copy_vectored


def arrays(pieces: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = np.array(pieces, np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def plan(*pieces: tuple[int, int, int]) -> CopyPlan:
    return CopyPlan(*arrays(list(pieces)), np.empty(0, bool))


def scattered(sizes: list[int], seed: int) -> tuple[list[tuple[int, int, int]], int]:
    """Pieces (source offset, destination offset, size) that do not overlap, in mixed order."""
    starts = np.concatenate(([0], np.cumsum(sizes)))
    order = np.random.default_rng(seed).permutation(len(sizes))
    pieces, at = [], 0
    for place in order.tolist():
        pieces.append((int(starts[place]), at, sizes[place]))
        at += sizes[place]
    return pieces, int(starts[-1])


def both(sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    pieces, total = scattered(sizes, seed)
    source = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
    results = []
    for copy in (copy_vectored, copy_piecewise):
        target = np.zeros(total + 8, np.uint8)
        copy(*arrays([(source.ctypes.data + s, target.ctypes.data + d, n) for s, d, n in pieces]))
        results.append(target)
    wanted = np.concatenate([*(source[s : s + n] for s, _, n in pieces), np.zeros(8, np.uint8)])
    assert (results[1] == wanted).all()
    return results[0], wanted


@settings(max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 2**31))
def test_both_ways_of_copying_agree(sizes: list[int], seed: int):
    copied, wanted = both(sizes, seed)
    assert (copied == wanted).all()


@pytest.mark.parametrize("count", [1023, 1024, 1025, 3000])
def test_more_pieces_than_a_call_takes(count: int):
    copied, wanted = both([7] * count, count)
    assert (copied == wanted).all()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 400),
    st.integers(0, 2**31),
)
def test_more_bytes_than_a_call_takes(sizes: list[int], limit: int, seed: int):
    """Also pieces that are larger than a call on their own."""
    calls: list[int] = []
    real = cpu._process_vm_readv

    def counted(pid, local, count, remote, same_count, flags):
        lengths = np.ctypeslib.as_array(
            (cpu.ctypes.c_uint64 * (2 * count)).from_address(remote)
        ).reshape(-1, 2)[:, 1]
        calls.append(int(lengths.sum()))
        return real(pid, local, count, remote, same_count, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_BYTES_PER_CALL", limit)
        patch.setattr(cpu, "_process_vm_readv", counted)
        copied, wanted = both(sizes, seed)
    assert (copied == wanted).all()
    assert max(calls) <= limit
    assert sum(calls) == sum(sizes)


def test_copying_nothing_is_fine():
    copy_vectored(*arrays([]))
    copy_piecewise(*arrays([]))


def test_memory_that_is_not_there_is_an_error_and_not_a_crash():
    target = np.zeros(16, np.uint8)
    with pytest.raises(CopyError, match="copying 1 pieces of memory: Bad address"):
        copy_vectored(*arrays([(4096, target.ctypes.data, 16)]))
    source = np.ones(16, np.uint8)
    with pytest.raises(CopyError, match="16 of 32 bytes"):
        copy_vectored(
            *arrays([(source.ctypes.data, target.ctypes.data, 16), (4096, target.ctypes.data, 16)])
        )


def test_where_the_kernel_refuses_copies_are_piecewise(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*args: object) -> int:
        cpu.ctypes.set_errno(errno.EPERM)
        return -1

    executor = CPUExecutor()
    assert executor._copy is copy_vectored
    executor.close()
    monkeypatch.setattr(cpu, "_process_vm_readv", forbidden)
    executor = CPUExecutor()
    assert executor._copy is copy_piecewise
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    executor.submit(1, plan((source.ctypes.data, target.ctypes.data, 64)), store=True)
    executor.wait({1})
    assert (target == source).all()
    executor.close()


class Gate:
    """A copy function that waits until it is let through, job by job."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.released = threading.Semaphore(0)
        self.affinity: set[int] = set()

    def __call__(self, source: np.ndarray, destination: np.ndarray, size: np.ndarray) -> None:
        self.affinity = os.sched_getaffinity(0)
        self.entered.release()
        self.released.acquire()
        copy_piecewise(source, destination, size)


def gated(monkeypatch: pytest.MonkeyPatch) -> tuple[CPUExecutor, Gate]:
    gate = Gate()
    executor = CPUExecutor()
    monkeypatch.setattr(executor, "_copy", gate)
    return executor, gate


def test_waiting_blocks_until_the_copy_ended(monkeypatch: pytest.MonkeyPatch):
    executor, gate = gated(monkeypatch)
    source, target = np.full(8, 9, np.uint8), np.zeros(8, np.uint8)
    for job in (1, 2):
        executor.submit(job, plan((source.ctypes.data, target.ctypes.data, 8)), store=True)
    seen: list[int] = []

    def wait_and_look() -> None:
        executor.wait({2, 77})
        seen.append(int(target[0]))

    waiter = threading.Thread(target=wait_and_look)
    waiter.start()
    gate.entered.acquire()
    executor.wait({77})  # not a job: nothing to wait for
    assert executor.finished() == []
    gate.released.release()
    executor.wait({1})
    gate.entered.acquire()  # now job 2 is being copied
    target[:] = 0
    assert [result.job_id for result in executor.finished()] == [1]
    waiter.join(0.05)
    assert waiter.is_alive(), "job 2 has not ended"
    gate.released.release()
    waiter.join(20)
    assert seen == [9], "what was waited for is in place"
    assert [result.job_id for result in executor.finished()] == [2]
    executor.close()


def test_jobs_run_in_the_order_of_submission(monkeypatch: pytest.MonkeyPatch):
    executor, gate = gated(monkeypatch)
    cells = np.zeros(3, np.uint8)
    first = cells.ctypes.data
    executor.submit(1, plan((first, first + 1, 1)), store=True)
    executor.submit(2, plan((first + 1, first + 2, 1)), store=False)
    cells[0] = 5
    gate.released.release(2)
    executor.wait({1, 2})
    assert cells.tolist() == [5, 5, 5]
    assert [result.job_id for result in executor.finished()] == [1, 2]
    executor.close()


def test_closing_finishes_what_was_submitted(monkeypatch: pytest.MonkeyPatch):
    executor, gate = gated(monkeypatch)
    source, target = np.arange(5, dtype=np.uint8), np.zeros(5, np.uint8)
    for job in range(5):
        piece = (source.ctypes.data + job, target.ctypes.data + job, 1)
        executor.submit(job, plan(piece), store=True)
    closer = threading.Thread(target=executor.close)
    closer.start()
    gate.released.release(5)
    closer.join(20)
    assert not closer.is_alive()
    assert target.tolist() == source.tolist()
    assert not executor._thread.is_alive()


def test_a_copy_that_fails_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch):
    executor = CPUExecutor()
    target = np.zeros(8, np.uint8)
    source = np.ones(8, np.uint8)
    executor.submit(1, plan((4096, target.ctypes.data, 8)), store=True)
    executor.submit(2, plan((source.ctypes.data, target.ctypes.data, 8)), store=True)
    executor.wait({1, 2})
    failed, good = executor.finished()
    assert failed.error is not None
    assert "Bad address" in failed.error
    assert (failed.job_id, failed.num_bytes) == (1, 8)
    assert (good.job_id, good.error, good.num_bytes) == (2, None, 8)
    assert good.seconds >= 0
    executor.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_the_copying_thread_leaves_the_processor_of_its_maker(monkeypatch: pytest.MonkeyPatch):
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        executor, gate = gated(monkeypatch)
        gate.released.release()
        executor.submit(1, plan(), store=True)
        executor.wait({1})
        assert os.sched_getaffinity(0) == {min(mine)}
    finally:
        os.sched_setaffinity(0, mine)
    assert gate.affinity >= mine
    executor.close()


def test_a_thread_that_may_not_choose_its_processor_works_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(pid: int, mask: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    executor = CPUExecutor()
    executor.submit(1, plan(), store=True)
    executor.wait({1})
    executor.close()
