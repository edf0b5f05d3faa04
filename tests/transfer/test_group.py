"""Parallel tasks: bounded, and the first failure stops the rest."""

import gc
import sys
import threading
import weakref

import pytest

from cloudckpt.errors import ServerError, TransferCancelledError
from cloudckpt.transfer import group as group_module
from cloudckpt.transfer.group import TaskGroup
from transfer.props import Crowd

PATIENCE = 30  # seconds after which a test that hangs fails


class Gate:
    """Tasks that wait for one another, without ever waiting for ever."""

    def __init__(self):
        self._opened = threading.Event()

    def open(self):
        self._opened.set()

    def wait(self):
        assert self._opened.wait(PATIENCE)


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def run(group, *tasks):
    """Submits the tasks, and waits for the end of the group."""

    def produce():
        for task in tasks:
            group.submit(task)

    group.run(produce)


def fail():
    raise ServerError("first")


def test_no_more_tasks_run_at_once_than_the_group_is_wide():
    work = Crowd()
    run(TaskGroup(3), *[work] * 60)
    assert max(work.counts) <= 3
    assert len(work.counts) == 60


class Widths:
    """A pace that says one width after the other; the last one from then on."""

    tick = 0.001

    def __init__(self, *widths):
        self._widths = list(widths)
        self.asked = 0
        self.has_ended = False

    def width(self, threads, *, is_full):
        assert not self.has_ended
        self.asked += 1
        return self._widths.pop(0) if self._widths[1:] else self._widths[0]

    def ended(self):
        self.has_ended = True


def test_a_group_grows_when_its_pace_says_so():
    meeting = threading.Barrier(6, timeout=PATIENCE)
    run(TaskGroup(2, pace=(pace := Widths(2, 2, 6))), *[meeting.wait] * 12)
    assert pace.has_ended


@pytest.mark.parametrize("width", [1, 3])
def test_a_group_shrinks_when_its_pace_says_so_and_all_tasks_are_carried_out(width):
    work = Crowd(0.002)
    run(TaskGroup(8, name="shrinks", pace=Widths(8, width)), *[work] * 200)
    assert len(work.counts) == 200
    assert max(work.counts[-100:]) <= width
    assert threads_of("shrinks") == []


def test_a_failure_ends_a_group_that_grows():
    def produce():
        for _ in range(4):
            group.submit(lambda: threading.Event().wait(0.01))
        while True:
            group.submit(fail)

    group = TaskGroup(2, name="fails", pace=(pace := Widths(2, 8)))
    with pytest.raises(ServerError):
        group.run(produce)
    assert threads_of("fails") == []
    assert not pace.has_ended


def test_a_producer_does_not_run_ahead_of_the_tasks():
    """Two tasks wait and as many run as the group is wide; who submits more has to wait."""
    width, finished, ahead, gate = 2, [], [], Gate()
    opener = threading.Timer(0.05, gate.open)

    def work():
        gate.wait()
        finished.append(1)

    def produce():
        for number in range(1, 41):
            group.submit(work)
            ahead.append(number - len(finished) - width)
            if number == width + 2:
                opener.start()

    group = TaskGroup(width)
    group.run(produce)
    assert max(ahead) == 2


@pytest.mark.parametrize("of_producer", [False, True])
def test_an_error_stops_tasks_that_look_at_the_flag_and_is_raised_as_it_is(of_producer):
    begun, error = Gate(), KeyError("first")

    def endless():
        begun.open()
        while True:
            group.cancellation.wait(PATIENCE)
            group.cancellation.check()

    def fail_then():
        begun.wait()
        raise error

    def produce():
        group.submit(endless)
        fail_then() if of_producer else group.submit(fail_then)

    group = TaskGroup(2)
    with pytest.raises(KeyError) as caught:
        group.run(produce)
    assert caught.value is error


def test_an_error_breaks_off_what_other_tasks_wait_for():
    """A task that waits for the network does not look at the flag."""
    waiting, broken_off, threads, broken = Gate(), Gate(), [], []

    def wait():
        threads.append(threading.get_ident())
        waiting.open()
        broken_off.wait()

    def fail_then():
        waiting.wait()
        fail()

    def interrupt(running):
        broken.extend(running)
        broken_off.open()

    with pytest.raises(ServerError, match="first"):
        run(TaskGroup(2, interrupt=interrupt), wait, fail_then)
    assert set(threads) <= set(broken)


def test_tasks_that_wait_are_dropped_after_an_error():
    ran, failing, gate = [], Gate(), Gate()

    def fail_then():
        failing.open()
        gate.wait()
        fail()

    def produce():
        group.submit(fail_then)
        failing.wait()
        group.submit(lambda: ran.append(1))
        group.submit(lambda: ran.append(2))
        gate.open()

    group = TaskGroup(1)
    with pytest.raises(ServerError):
        group.run(produce)
    assert ran == []


def test_a_producer_that_waits_is_told_of_the_error():
    gate, told = Gate(), []

    def fail_then():
        gate.wait()
        fail()

    def produce():
        try:
            for number in range(100):
                if number == 2:
                    gate.open()
                group.submit(fail_then)
        except TransferCancelledError as error:
            told.append(error)
            raise

    group = TaskGroup(1)
    with pytest.raises(ServerError, match="first"):
        group.run(produce)
    assert len(told) == 1


def test_a_thread_that_waits_for_work_keeps_no_buffer_alive():
    class Buffer:
        pass

    def produce():
        buffer = Buffer()
        weakref.finalize(buffer, gone.open)
        group.submit(lambda buffer=buffer: None)
        del buffer
        gone.wait()

    gone, group = Gate(), TaskGroup(1)
    group.run(produce)


def test_a_group_may_be_ended_in_one_of_its_own_threads():
    """Where the garbage collector finds a forgotten upload, whichever thread it runs in."""
    group, found = TaskGroup(2, name="forgotten"), []

    def end():
        try:
            group.run(fail)
        except ServerError as error:
            found.append(error)

    group.submit(end)
    for thread in threads_of("forgotten"):
        thread.join(PATIENCE)
    assert threads_of("forgotten") == []
    assert len(found) == 1


class InterruptAt:
    """Raises KeyboardInterrupt in this thread, before the n-th line or call in ``group.py``."""

    def __init__(self, moment: int) -> None:
        self._left, self.has_come = moment, False

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename != group_module.__file__:
            return None
        if event in ("call", "line") and not self.has_come:
            self._left -= 1
            if self._left < 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_any_moment_stops_the_tasks(fails):
    """Also one while the others are stopped, because one of them has failed."""

    def run(moment):
        def work():
            group.cancellation.wait(0.005)
            if fails:
                raise ServerError("failed")

        def produce():
            for _ in range(3):
                group.submit(work)

        group = TaskGroup(2, name="any-moment")
        with InterruptAt(moment) as interrupt:
            try:
                group.run(produce)
            except ServerError:
                assert not interrupt.has_come, "the interrupt was lost"
        return interrupt.has_come

    moment, interrupted = 0, True
    while interrupted:
        try:
            interrupted = run(moment)
            assert not interrupted, f"the interrupt of moment {moment} was lost"
        except KeyboardInterrupt:
            moment += 1
        assert threads_of("any-moment") == [], f"of moment {moment}"
    assert moment > 50


def test_the_error_of_a_group_holds_no_reference_to_it_for_ever():
    group = TaskGroup(1)
    run(group, lambda: None)
    found = weakref.ref(group)
    del group
    gc.collect()
    assert found() is None
