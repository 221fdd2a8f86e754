"""Ctrl-C and SIGTERM while something is made that has to be ended."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvtier.interrupts import interrupts_held, termination_as_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    made = []
    former = signal.getsignal(number)

    def make() -> None:
        with interrupts_held():
            os.kill(os.getpid(), number)
            made.append("after the signal")

    with termination_as_interrupt(), pytest.raises(KeyboardInterrupt):
        make()
    assert made
    assert signal.getsignal(number) is former


def test_the_interrupt_takes_the_place_of_an_error() -> None:
    def fail() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_without_a_signal_nothing_happens_and_interrupts_work_again() -> None:
    with interrupts_held():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_termination_that_ends_the_process_at_once_is_not_held() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with interrupts_held():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_pass() -> None:
    passed = []

    def run() -> None:
        with interrupts_held():
            passed.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert passed == [signal.getsignal(signal.SIGINT)]
