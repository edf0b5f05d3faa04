"""The garbage collector is held back in a block, and in no other place."""

import gc
import random
import signal
import threading

import pytest

from cloudckpt.gc_pause import paused_gc
from dcp.children import in_a_child

PATIENCE = 60  # seconds


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()


def test_the_collector_rests_in_blocks_which_may_nest():
    with paused_gc():
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with paused_gc():
        pass
    assert not gc.isenabled()


def test_blocks_of_two_threads_may_overlap():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with paused_gc():
            inside.set()
            assert leave.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    with paused_gc():
        thread.start()
        assert inside.wait(PATIENCE)
    assert not gc.isenabled()
    leave.set()
    thread.join(PATIENCE)
    assert gc.isenabled()


def test_a_forked_child_has_a_collector():
    with paused_gc():
        assert in_a_child("fork", gc.isenabled)


def test_what_an_interrupt_left_behind_is_made_good_by_the_next_block():
    def interrupt(_, frame):
        if not any(signal.getitimer(signal.ITIMER_VIRTUAL)):
            return  # on its way when the one before it ended the timer
        # not amid the book-keeping of coverage, whose lock would stay locked for ever
        if frame.f_globals["__name__"] in ("cloudckpt.gc_pause", "_weakrefset", __name__):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    moments, interrupts = random.Random(0), 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, moments.uniform(1e-5, 3e-3), 1e-4)
                for _ in range(100_000):
                    with paused_gc():
                        pass
            except KeyboardInterrupt:
                interrupts += 1
            with paused_gc():
                assert not gc.isenabled()
            assert gc.isenabled()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert interrupts > 250
