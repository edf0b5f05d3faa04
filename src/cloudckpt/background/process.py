"""The process beside a trainer that sends what its saves lay out, seen from the trainer.

It is started by exec, as an interpreter of its own, and knows no torch, no process group and
nothing of the trainer's script. The thread of the trainer that saves meets the other ranks, plans,
lays out and commits; only the sending is handed over. So a process that dies, or gives no sign of
life, is a send of this rank that has failed: the ranks tell each other as of any failure, nothing
is committed, and the next save of this rank starts another one. What it has left in the store under
the names of that attempt is deleted from here.

Whoever sends reads the staged copy, which the next save writes to. So no save gives the copy back
before its process has answered, or has ended.

A trainer that ends without knowing what became of its save leaves the process behind, which
finishes that save for the next job (``outliving``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import connection as channels
from multiprocessing import util
from typing import Any

from cloudckpt.background.arena import Annex, Arena
from cloudckpt.background.channel import (
    SETTLED,
    Job,
    Outcome,
    Settings,
    send_descriptor,
    set_timeout,
)
from cloudckpt.background.script import Recording
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.sending import Destination, LayOut, Sender
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import SaveProcessError
from cloudckpt.events import emit
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.credentials import variables
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import clear_away

__all__ = ["SaveProcess", "log_levels"]

_LOOK = 1.0  # seconds between two looks whether the process is alive
_SHUTDOWN_TIMEOUT = 5.0  # seconds for it to end by itself, or when it is killed

_BEGIN = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # not what lies in the current folder
    "from multiprocessing.connection import Connection; channel = Connection({}); "
    "sys.path[:] = channel.recv(); from cloudckpt.background.sender import main; main(channel)"
)
"""What the interpreter is to run, with the number of its end of the channel."""


class SaveProcess:
    """A process beside this rank that sends its saves, one after the other.

    It starts in the background; one that has died is replaced by the next save.
    """

    def __init__(self, options: BackgroundOptions) -> None:
        """
        Args:
            options: See there.

        Raises:
            SaveProcessError: If it can't be started.
        """
        self._options = options
        self._closed = False
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._running_worker()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def is_busy(self) -> bool:
        """Whether it has a job that it has not answered."""
        worker = self._worker
        return worker is not None and worker.is_busy

    @property
    def is_stuck(self) -> bool:
        """Whether it has a job that gets no further, as its store fails or says nothing."""
        worker = self._worker
        return worker is not None and worker.is_busy and worker.is_stuck

    def sender(self, arena: Arena | None, handed_over: Callable[[], None]) -> Sender:
        """What has it send a save.

        Args:
            arena: The memory of the staged copy, if it is in one.
            handed_over: Called when the process has all that it takes.
        """
        return functools.partial(self._send, arena, handed_over)

    def _send(
        self,
        arena: Arena | None,
        handed_over: Callable[[], None],
        destination: Destination,
        store: ObjectStore,
        lay_out: LayOut,
        stats: TransferStats,
        began: Callable[[str], None],
        leave: Callable[[], Pending | None],
        meanwhile: Callable[[], None],
    ) -> tuple[WrittenObject, ...]:
        """See :class:`~cloudckpt.checkpoint.sending.Sender`.

        Raises:
            SaveProcessError: If the process can't be started, dies, or gives no sign of life.
            StagingMemoryError: If there is no memory for what lies outside of the arena.
        """
        names: list[str] = []

        def note(name: str) -> None:
            names.append(name)
            began(name)

        with contextlib.closing(Annex()) as annex:
            recording = Recording(destination, store.capabilities, arena, annex, note)
            lay_out(recording.open, Cancellation())
            annex.flush()
            memory = [(0, -1) if arena is None else (arena.size, arena.fd), (annex.size, annex.fd)]
            sizes = memory[0][0], memory[1][0]
            pending = leave() if self._options.outlive > 0 else None
            job = Job(destination, recording.scripts(), sizes, variables(), pending)
            worker = self._running_worker()
            try:
                worker.wait_until_ready()
                worker.begin(job, [fd for size, fd in memory if size])
                handed_over()
                meanwhile()
                outcome = worker.outcome()
            except BaseException:
                worker.end(0, "the save before failed in it")
                keys = [destination.uri.key(name) for name in names]
                clear_away(store, keys, destination.config.retry)
                raise
        stats.include(outcome.transferred)
        if outcome.error is not None:
            raise outcome.error
        return outcome.objects

    def settle(self) -> None:
        """Says that the trainer knows what became of the save that was sent last."""
        worker = self._worker
        if worker is not None:
            worker.settle()

    def close(self, timeout: float) -> None:
        """Ends the process, at once if it does not end in time."""
        with self._lock:
            self._closed = True
            worker = self._worker
        if worker is not None:
            worker.end(timeout, "the saver was closed")
            self._worker = None  # not before: an interrupt leaves it for the next call

    def _running_worker(self) -> _Worker:
        """The process; a new one if there is none."""
        with self._lock:
            if self._closed:
                raise SaveProcessError("the saver was closed")
            if self._worker is None or not self._worker.is_alive:
                self._worker = None
                self._worker = _Worker(self._options)
            return self._worker


def log_levels() -> dict[str, int]:
    """The levels of loggers that somebody has set; that of the root under the empty name."""
    named = list(logging.Logger.manager.loggerDict.items())
    levels = {name: known.level for name, known in named if isinstance(known, logging.Logger)}
    return {
        "": logging.getLogger().level,
        **{name: level for name, level in levels.items() if level != logging.NOTSET},
    }


class _Worker:
    """One process, from its start to its end.

    Attributes:
        is_busy: Whether it has a job.
        is_stuck: Whether it has said last that it gets no further.
        unsettled: Set as long as nobody knows what has become of the job.
    """

    def __init__(self, options: BackgroundOptions) -> None:
        if not sys.executable:
            raise SaveProcessError(
                "sys.executable is empty, as in an interpreter that is embedded in another "
                "program, so no saving process can be started; save in a thread"
            )
        self._options = options
        self.is_busy = self.is_stuck = self._is_ready = False
        self.unsettled = threading.Event()
        self._ended_for = ""  # why this trainer has ended it
        self._ending = threading.Lock()
        self._channel, theirs = multiprocessing.Pipe()
        set_timeout(self._channel, options.heartbeat_timeout)
        try:
            with theirs:
                self._process = _start(theirs.fileno())
            self._channel.send(_paths())
            self._channel.send(
                Settings(
                    os.getpid(),
                    options.nice,
                    options.heartbeat_timeout,
                    options.outlive,
                    log_levels(),
                )
            )
        except OSError as exc:
            self._channel.close()
            raise SaveProcessError(
                f"the saving process can't be started by {sys.executable}", cause=exc
            ) from exc
        _workers.add(self)
        # also if nobody closes the saver; and at the end of the interpreter, behind the last save
        self._at_exit = weakref.finalize(
            self, _leave, self._process, self._channel, self.unsettled, os.getpid()
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._ended_for and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Waits until it can take jobs.

        Raises:
            SaveProcessError: If it ends before, or is not ready in time.
        """
        if not self._is_ready:
            self._receive("ready", time.monotonic() + self._options.start_timeout)
            self._is_ready = True

    def begin(self, job: Job, descriptors: list[int]) -> None:
        """Sends a job; from then on it is carried out also if this trainer should end.

        Args:
            job: What to send.
            descriptors: Of the memory that its bytes lie in.

        Raises:
            SaveProcessError: If the process has ended.
        """
        if self._ended_for:
            raise self._death(None)
        self.is_busy = True
        self.unsettled.set()
        try:
            self._channel.send(job)
            for fd in descriptors:
                send_descriptor(self._channel, fd)
        except OSError as exc:
            raise self._death(exc) from exc

    def outcome(self) -> Outcome:
        """Waits for what has become of the job.

        Raises:
            SaveProcessError: If the process ends before, or gives no sign of life.
        """
        outcome: Outcome = self._receive("outcome")
        self.is_busy = False
        return outcome

    def _receive(self, wanted: str, deadline: float | None = None) -> Any:
        """The next message of a kind; log records and events on the way are handled here."""
        silent = 0.0
        while True:
            try:
                if channels.wait([self._channel], timeout=_LOOK):
                    kind, content = self._channel.recv()
                    silent = 0.0
                elif self._process.poll() is not None:
                    raise self._death(None)
                elif deadline is not None and time.monotonic() > deadline:
                    raise SaveProcessError(
                        f"the saving process was not ready within {self._options.start_timeout:g} s"
                    )
                elif deadline is None and silent >= self._options.heartbeat_timeout:
                    raise SaveProcessError(
                        f"the saving process gave no sign of life for {silent:g} s and was "
                        "killed; this save is not committed, and the next one starts a new "
                        "process"
                    )
                else:
                    silent += _LOOK  # not by the clock: that runs on while both are suspended
                    continue
            except (EOFError, OSError, pickle.UnpicklingError) as exc:
                raise self._death(exc) from exc
            if kind == "log":
                target = logging.getLogger(content.name)
                if target.isEnabledFor(content.levelno):
                    target.handle(content)
            elif kind == "event":
                emit(content)
            elif kind == "stuck":
                self.is_stuck = content
            elif kind == wanted:
                return content

    def _death(self, cause: BaseException | None) -> SaveProcessError:
        _wait(self._process, _SHUTDOWN_TIMEOUT)
        code = self._process.returncode
        if self._ended_for:
            return SaveProcessError(
                "the saving process was stopped before this save had finished, because "
                f"{self._ended_for}; this save is not committed"
            )
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended ({code})"
        elif isinstance(cause, BlockingIOError):  # what the channel's time limit raises
            how = f"did not read or write for {self._options.heartbeat_timeout:g} s"
        else:
            how = "can't be reached"
        if not self._is_ready:
            how += " before it was ready; it says why on standard error"
        return SaveProcessError(
            f"the saving process {how}; this save is not committed, and the next one starts a "
            "new process",
            cause=cause,
        )

    def settle(self) -> None:
        """Says that it is known what has become of the job."""
        self.unsettled.clear()
        with contextlib.suppress(OSError):  # it has died, or was ended
            self._channel.send(SETTLED)

    def forget(self) -> None:
        """In a child that was forked from the trainer: the process is not the child's.

        The channel's end is to be that of the trainer, and whoever holds it puts it off.
        """
        self._channel.close()
        self._process.returncode = 0  # else it would be missed when this object goes

    def end(self, timeout: float, why: str) -> None:
        """Ends the process: by request within ``timeout`` seconds, else by force.

        Both who closes the saver and the thread of a save that fails may do so.

        Args:
            timeout: Seconds.
            why: For the saves that fail by it.
        """
        self._ended_for = self._ended_for or why
        with self._ending:
            if timeout > 0:
                self._channel.close()
                _wait(self._process, timeout)
            _kill(self._process)
            self._channel.close()
            self._at_exit.detach()


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _forget_in_fork() -> None:
    for worker in list(_workers):
        worker.forget()


os.register_at_fork(after_in_child=_forget_in_fork)


def _start(fd: int) -> subprocess.Popen[bytes]:
    flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, *flags, "-c", _BEGIN.format(fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # signals to the trainer's process group are the trainer's
    )


def _paths() -> list[str]:
    """Where modules are found: by the trainer, and this package for sure.

    The folder in which the trainer found it may be the current one no more.
    """
    own = os.path.abspath(__file__)
    for _ in __name__.split("."):
        own = os.path.dirname(own)
    known = [path for path in sys.path if isinstance(path, str)]
    # what is no folder or archive may be a word for somebody's import hook
    found = [os.path.abspath(path) if not path or os.path.exists(path) else path for path in known]
    return [*found, own]


def _wait(process: subprocess.Popen[bytes], timeout: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        _wait(process, _SHUTDOWN_TIMEOUT)


def _leave(
    process: subprocess.Popen[bytes],
    channel: channels.Connection,
    unsettled: threading.Event,
    owner: int,
) -> None:
    if os.getpid() == owner:
        channel.close()
        if not unsettled.is_set():  # else it has something to finish
            _wait(process, _SHUTDOWN_TIMEOUT)
            _kill(process)
