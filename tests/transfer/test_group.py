"""Parallel tasks: bounded, and the first failure stops the rest."""

import gc
import signal
import sys
import threading
import weakref

import pytest

from cloudckpt.errors import ServerError, TransferCancelledError
from cloudckpt.transfer.group import Cancellation, TaskGroup

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


def test_all_tasks_have_run_when_the_block_is_left():
    done, lock = [], threading.Lock()

    def work(number):
        with lock:
            done.append(number)

    with TaskGroup(4) as group:
        for number in range(200):
            group.submit(lambda number=number: work(number))
    assert sorted(done) == list(range(200))


def test_a_group_without_tasks_ends():
    with TaskGroup(4, name="no-tasks"):
        pass
    assert threads_of("no-tasks") == []


def test_as_many_tasks_run_at_once_as_the_group_is_wide():
    meeting = threading.Barrier(5)
    with TaskGroup(5) as group:
        for _ in range(10):
            group.submit(lambda: meeting.wait(PATIENCE))


def test_no_more_tasks_run_at_once_than_the_group_is_wide():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)  # gives others the chance to be too many
        with lock:
            running -= 1

    with TaskGroup(3) as group:
        for _ in range(60):
            group.submit(work)
    assert most <= 3


def test_few_threads_are_started_for_few_tasks():
    with TaskGroup(50, name="few-tasks") as group:
        first = Gate()
        group.submit(first.open)
        first.wait()
        assert len(threads_of("few-tasks")) == 1


def test_a_producer_does_not_run_ahead_of_the_tasks():
    """Two tasks wait and as many run as the group is wide; who submits more has to wait."""
    width, submitted, finished, excess = 2, 0, 0, 0
    lock = threading.Lock()
    full = threading.Event()
    gate = Gate()

    def work():
        nonlocal finished
        gate.wait()
        with lock:
            finished += 1

    def open_when_full():
        assert full.wait(PATIENCE)
        gate.open()

    opener = threading.Thread(target=open_when_full)
    opener.start()
    with TaskGroup(width) as group:
        for _ in range(40):
            group.submit(work)
            with lock:
                submitted += 1
                excess = max(excess, submitted - finished - width)
            if submitted == width + 2:
                full.set()
    opener.join()
    assert excess <= 2


def test_the_first_error_is_raised_as_it_is():
    error = ServerError("first")

    def fail():
        raise error

    def run():
        with TaskGroup(2) as group:
            group.submit(fail)

    with pytest.raises(ServerError) as caught:
        run()
    assert caught.value is error


def test_an_error_stops_tasks_that_look_at_the_flag():
    begun = Gate()

    def endless():
        begun.open()
        while True:
            group.cancellation.wait(PATIENCE)
            group.cancellation.check()

    def fail():
        begun.wait()
        raise ServerError("first")

    group = TaskGroup(2)

    def run():
        with group:
            group.submit(endless)
            group.submit(fail)

    with pytest.raises(ServerError, match="first"):
        run()


def test_an_error_breaks_off_what_other_tasks_wait_for():
    """A task that waits for the network does not look at the flag."""
    waiting, broken_off, threads, broken = Gate(), Gate(), [], []

    def wait():
        threads.append(threading.get_ident())
        waiting.open()
        broken_off.wait()

    def fail():
        waiting.wait()
        raise ServerError("first")

    def interrupt(running):
        broken.extend(running)
        broken_off.open()

    def run():
        with TaskGroup(2, interrupt=interrupt) as group:
            group.submit(wait)
            group.submit(fail)

    with pytest.raises(ServerError, match="first"):
        run()
    assert set(threads) <= set(broken)


def test_tasks_that_wait_are_dropped_after_an_error():
    ran, failing, gate = [], Gate(), Gate()

    def fail():
        failing.open()
        gate.wait()
        raise ServerError("first")

    def run():
        with TaskGroup(1) as group:
            group.submit(fail)
            failing.wait()
            group.submit(lambda: ran.append(1))
            group.submit(lambda: ran.append(2))
            gate.open()

    with pytest.raises(ServerError):
        run()
    assert ran == []


def test_a_producer_that_waits_is_told_of_the_error():
    gate, told = Gate(), []

    def fail():
        gate.wait()
        raise ServerError("first")

    def run():
        with TaskGroup(1) as group:
            try:
                for number in range(100):
                    if number == 2:
                        gate.open()
                    group.submit(fail)
            except TransferCancelledError as error:
                told.append(error)
                raise

    with pytest.raises(ServerError, match="first"):
        run()
    assert len(told) == 1


def test_an_error_of_the_block_stops_the_tasks_and_is_raised():
    def endless():
        while True:
            group.cancellation.wait(PATIENCE)
            group.cancellation.check()

    group = TaskGroup(1)

    def run():
        with group:
            group.submit(endless)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        run()


@pytest.mark.parametrize("fails", [True, False])
def test_no_thread_is_left_behind(fails):
    def work():
        if fails:
            raise ServerError("failed")

    def run():
        with TaskGroup(4, name="left-behind") as group:
            for _ in range(3):
                group.submit(work)

    if fails:
        with pytest.raises((ServerError, TransferCancelledError)):
            run()
    else:
        run()
    assert threads_of("left-behind") == []


def test_a_thread_that_waits_for_work_keeps_no_buffer_alive():
    class Buffer:
        pass

    gone = Gate()
    with TaskGroup(1) as group:
        buffer = Buffer()
        weakref.finalize(buffer, gone.open)
        group.submit(lambda buffer=buffer: None)
        del buffer
        gone.wait()


def test_errors_of_many_tasks_at_once_are_one():
    meeting = threading.Barrier(4)

    def fail(number):
        meeting.wait(PATIENCE)
        raise ServerError(f"of task {number}")

    def run():
        with TaskGroup(4) as group:
            for number in range(4):
                group.submit(lambda number=number: fail(number))

    with pytest.raises(ServerError, match=r"of task \d"):
        run()


def test_an_interrupt_while_leaving_the_block_stops_the_tasks():
    main, release = threading.main_thread().ident, threading.Event()

    def is_joining():
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != "_join":
            frame = frame.f_back
        return frame is not None

    def endless():
        while not is_joining():
            group.cancellation.wait(0.001)
        signal.pthread_kill(main, signal.SIGINT)
        while not release.is_set():
            group.cancellation.wait(0.001)

    group = TaskGroup(1, name="interrupted")

    def run():
        with group:
            group.submit(endless)

    # a process that a shell has started in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert threads_of("interrupted") == []
    finally:
        signal.signal(signal.SIGINT, before)
        release.set()


# cancellation


def test_a_flag_is_raised_once_and_for_all():
    cancellation = Cancellation()
    cancellation.check()
    cancellation.wait(0)
    cancellation.cancel()
    cancellation.cancel()
    with pytest.raises(TransferCancelledError):
        cancellation.check()
    with pytest.raises(TransferCancelledError):
        cancellation.wait(PATIENCE)


def test_the_error_of_a_group_holds_no_reference_to_it_for_ever():
    group = TaskGroup(1)
    with group:
        group.submit(lambda: None)
    found = weakref.ref(group)
    del group
    gc.collect()
    assert found() is None
