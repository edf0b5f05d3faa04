"""The trainer's side of the saving process, which sends the objects of the trainer's saves.

The process is a separate interpreter, started by exec, without torch, a process group or the
trainer's script. The trainer's saving thread meets the other ranks, plans, lays out and commits;
only the sending is handed over. So if the process dies or sends no heartbeat, this rank's send has
failed: the ranks exchange that like any failure, nothing is committed, and this rank's next save
starts another process. The trainer deletes the objects that the process has left in the store for
that save.

The process reads the staged copy, and the next save overwrites it. So no save releases the copy
before its process has answered or ended.

If a trainer ends without knowing the outcome of its save, the process keeps running, for up to
``outlive`` seconds, and finishes that save for the next job (``sender``).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection as channels
from multiprocessing import util
from typing import Any

import torch

from cloudckpt.background.arena import Annex, Arena
from cloudckpt.background.groups import START_TIMEOUT
from cloudckpt.background.sender import SETTLED, Job, Outcome, Settings, as_socket
from cloudckpt.checkpoint.object_plan import STATE, Destination
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.shard import Layout
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import SaveProcessError
from cloudckpt.events import emit
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.credentials import variables
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import clear_away

__all__ = ["ProcessSender", "SaveProcess", "log_levels"]

_ANNEX = 1  # the number of the annex as a buffer of plans
_HEARTBEAT_TIMEOUT = 120.0  # seconds without a heartbeat after which a process with a save is ended
_LOOK = 1.0  # seconds between checks that the process is alive
_SHUTDOWN_TIMEOUT = 5.0  # seconds for it to end on its own, or after being killed

_BEGIN = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # without the current folder
    "from multiprocessing.connection import Connection; channel = Connection({}); "
    "sys.path[:] = channel.recv(); from cloudckpt.background.sender import main; main(channel)"
)
"""The code that the interpreter runs, given the descriptor of its end of the channel."""


class SaveProcess:
    """A process beside this rank that sends its saves, one after another.

    It starts in the background; if it has died, the next save replaces it.
    """

    def __init__(self, options: BackgroundOptions) -> None:
        """Starts the process; does not wait until it is ready.

        Args:
            options: The options of background saves.

        Raises:
            SaveProcessError: If it can't be started.
        """
        self._options = options
        self._closed = False
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self.worker()

    @property
    def pid(self) -> int | None:
        """The process ID; None after :meth:`close`, or if a dead process could not be replaced."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def is_stuck(self) -> bool:
        """Whether the process makes no progress with a save, as the store fails or is silent."""
        worker = self._worker
        return worker is not None and worker.is_busy and worker.is_stuck

    def sender(self, arena: Arena | None) -> ProcessSender:
        """Returns a sender that makes the process send one save.

        Args:
            arena: The memory of the staged copy; None if a custom stager has made it elsewhere.
        """
        return ProcessSender(self, arena, self._options.outlive > 0)

    def close(self, timeout: float) -> None:
        """Ends the process, by force if it does not end within ``timeout`` seconds; 0: at once."""
        with self._lock:
            self._closed = True
            worker = self._worker
        if worker is not None:
            worker.end(timeout, "the checkpointer was closed")
            self._worker = None  # not before: after an interrupt, the next call ends it

    def worker(self) -> _Worker:
        """Returns the running process, started if necessary.

        Raises:
            SaveProcessError: If it can't be started, or the saver was closed.
        """
        with self._lock:
            if self._closed:
                raise SaveProcessError("the checkpointer was closed: make a new one")
            if self._worker is None or not self._worker.is_alive:
                self._worker = None
                self._worker = _Worker(self._options)
            return self._worker


class _Shared:
    """The memory shared with the saving process: the arena of the staged copy, and the annex.

    The annex takes the bytes that are not in the arena, such as pickled values.
    """

    def __init__(self, arena: Arena | None, annex: Annex, pool: StagingPool) -> None:
        self.pool = pool
        self.is_private = arena is not None  # else another stager may have kept what it returned
        self._annex = annex
        self._begin = 0 if arena is None else arena.address
        self._end = 0 if arena is None else self._begin + arena.size

    def place_of(self, address: int) -> int | None:
        return address - self._begin if self._begin <= address < self._end else None

    def put(self, view: memoryview, owner: object) -> tuple[int, int]:
        if not view.readonly and view.nbytes:
            start = self.place_of(ctypes.addressof(ctypes.c_char.from_buffer(view)))
            if start is not None:
                return STATE, start
        return _ANNEX, self._annex.append(view)

    def put_strided(self, tensor: torch.Tensor) -> tuple[int, int]:
        start = self._annex.size
        for piece in self.pool.pieces(tensor):
            if piece.ready is not None:
                piece.ready()
            self._annex.append(piece.view)
            if piece.lease is not None:
                piece.lease.release()
        return _ANNEX, start


@dataclass
class ProcessSender:
    """Makes the process send one save; see :class:`~cloudckpt.checkpoint.shard.Sender`.

    Attributes:
        process: The saving process.
        arena: The memory of the staged copy; None if a custom stager has made it elsewhere.
        outlives: Whether the process goes on when this trainer ends before the commit.
    """

    process: SaveProcess
    arena: Arena | None
    outlives: bool
    _sent_by: _Worker | None = None

    def __call__(
        self,
        destination: Destination,
        store: ObjectStore,
        layout: Layout,
        stats: TransferStats,
        pending: Pending | None,
    ) -> tuple[WrittenObject, ...]:
        """Has the process send the layout's objects; returns them once the store has all of them.

        Raises:
            BaseException: An error of the layout when it makes its plans, or of the process when it
                sends the objects.
            SaveProcessError: If the process can't be started, dies, or sends no heartbeat.
            StagingMemoryError: If there is no memory for bytes outside the arena.
        """
        arena = self.arena
        with contextlib.closing(Annex()) as annex:
            pool = StagingPool(destination.config.memory_budget, Cancellation())
            with contextlib.closing(pool):
                plans = list(layout.plans(_Shared(arena, annex, pool)))
            annex.flush()
            sizes = 0 if arena is None else arena.size, annex.size
            descriptors = annex.fd if arena is None else arena.fd, annex.fd
            pending = None if pending is None else layout.pending(pending)
            job = Job(destination, plans, sizes, variables(), pending)
            worker = self.process.worker()
            try:
                worker.wait_until_ready()
                worker.begin(job, descriptors)
                self._sent_by = worker
                outcome = worker.outcome()
            except BaseException:
                worker.end(0, "the previous save failed in it")
                keys = [destination.key(number) for number in {plan.object for plan in plans}]
                clear_away(store, keys, destination.config.retry)
                raise
        stats.include(outcome.transferred)
        if outcome.error is not None:
            raise outcome.error
        return outcome.objects

    def settle(self) -> None:
        """Tells the saving process, if it was given the save, that the trainer knows the outcome.

        The process then need not finish the save if the trainer ends.
        """
        if self._sent_by is not None:
            self._sent_by.settle()


def _set_timeout(channel: channels.Connection, seconds: float) -> None:
    """Sets the timeout of each read and write on a channel, in seconds.

    Otherwise a process that stops within a message would block the other one forever.
    """
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with as_socket(channel) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def log_levels() -> dict[str, int]:
    """Returns the explicitly set levels of loggers, by name; the root logger's name is empty."""
    named = list(logging.Logger.manager.loggerDict.items())
    levels = {name: known.level for name, known in named if isinstance(known, logging.Logger)}
    return {
        "": logging.getLogger().level,
        **{name: level for name, level in levels.items() if level != logging.NOTSET},
    }


class _Worker:
    """One saving process, from its start to its end.

    Attributes:
        is_busy: Whether the process has a job.
        is_stuck: Whether the process last reported that it makes no progress.
        unsettled: An event, which is set while this trainer does not know the outcome of the save.
    """

    def __init__(self, options: BackgroundOptions) -> None:
        self.is_busy = self.is_stuck = self._is_ready = False
        self.unsettled = threading.Event()
        self._ended_for = ""  # why this trainer has ended it; empty if it has not
        self._ending = threading.Lock()
        undo = contextlib.ExitStack()
        try:
            self._channel, theirs = multiprocessing.Pipe()
            undo.callback(self._channel.close)
            with theirs:
                _set_timeout(self._channel, _HEARTBEAT_TIMEOUT)
                self._process = _start(theirs.fileno())
            settings = Settings(os.getpid(), _HEARTBEAT_TIMEOUT, options.outlive, log_levels())
            with contextlib.suppress(ConnectionError):  # it has ended: the first wait says how
                self._channel.send(_paths())
                self._channel.send(settings)
        except OSError as exc:
            undo.close()
            raise SaveProcessError(
                f"can't start the saving process with {sys.executable!r}: correct the cause (raise "
                "a limit, set sys.executable), or save in a thread (AsyncCheckpointerType.THREAD)",
                cause=exc,
            ) from exc
        _workers.add(self)
        # also if nobody closes the saver; and at the interpreter's end, after the last save
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
        """Waits until the process can take jobs.

        Raises:
            SaveProcessError: If it ends first, or is not ready in time.
        """
        if not self._is_ready:
            self._receive("ready", time.monotonic() + START_TIMEOUT)
            self._is_ready = True

    def begin(self, job: Job, descriptors: Sequence[int]) -> None:
        """Sends a job; the process goes on with it, as ``outlive`` says, if this trainer ends.

        Args:
            job: The job.
            descriptors: Descriptors of the memory that holds its bytes.

        Raises:
            SaveProcessError: If the process has ended, or does not take the job.
        """
        if self._ended_for:
            raise self._death(None)
        self.is_busy, self.is_stuck = True, False  # values of the previous job
        self.unsettled.set()
        try:
            self._channel.send(job)
            with as_socket(self._channel) as end:
                socket.send_fds(end, [b"\0"], descriptors)
        except OSError as exc:
            raise self._death(exc) from exc

    def outcome(self) -> Outcome:
        """Waits for the outcome of the job, and returns it.

        Raises:
            SaveProcessError: If the process ends first, or sends no heartbeat.
        """
        outcome: Outcome = self._receive("outcome")
        self.is_busy = False
        return outcome

    def _receive(self, wanted: str, deadline: float | None = None) -> Any:
        """Returns the content of the next message of a type; handles logs and events before it.

        Args:
            wanted: The type.
            deadline: When to give up, by ``time.monotonic``; None: after two minutes without a
                message.

        Raises:
            SaveProcessError: If the process ends first, or the message does not come in time.
        """
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
                        f"the saving process was not ready within {START_TIMEOUT:g} s; see its "
                        "output on standard error, or save in a thread "
                        "(AsyncCheckpointerType.THREAD)"
                    )
                elif deadline is None and silent >= _HEARTBEAT_TIMEOUT:
                    raise SaveProcessError(
                        f"the saving process did not respond for {silent:g} s and was killed; "
                        "this save is not committed, and the next one starts a new process"
                    )
                else:
                    silent += _LOOK  # not by the clock, which runs on while both are suspended
                    continue
            except (EOFError, OSError, pickle.UnpicklingError) as exc:
                raise self._death(exc) from exc
            if kind == "log":
                target = logging.getLogger(content.name)
                if target.isEnabledFor(content.levelno):
                    target.handle(content)
            elif kind == "event":
                emit(content)
            elif kind == "alive":
                self.is_stuck = content
            elif kind == wanted:
                return content

    def _death(self, cause: BaseException | None) -> SaveProcessError:
        _wait(self._process, _SHUTDOWN_TIMEOUT)
        code = self._process.returncode
        if self._ended_for:
            return SaveProcessError(
                "the saving process was stopped before this save had finished, because "
                f"{self._ended_for}; this save is not committed: save again"
            )
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        elif isinstance(cause, BlockingIOError):  # the channel's timeout raises it
            how = f"did not read or write for {_HEARTBEAT_TIMEOUT:g} s"
        else:
            how = "can't be reached"
        if not self._is_ready:
            how += " before it was ready; see its output on standard error"
        return SaveProcessError(
            f"the saving process {how}; this save is not committed, and the next one starts a "
            "new process",
            cause=cause,
        )

    def settle(self) -> None:
        """Tells the process that the trainer knows the save's outcome: it need not finish it."""
        self.unsettled.clear()
        with contextlib.suppress(OSError):  # it has died, or was ended
            self._channel.send(SETTLED)

    def forget(self) -> None:
        """Closes the channel in a child forked from the trainer, without ending the process.

        The child would otherwise keep the channel open after the trainer has ended.
        """
        self._channel.close()
        self._process.returncode = 0  # otherwise Popen would warn when this object is deleted

    def end(self, timeout: float, why: str) -> None:
        """Ends the process; may be called by several threads.

        Args:
            timeout: Seconds in which the process may end by itself, after the channel is closed,
                before it is killed; 0 to kill it at once.
            why: The reason, for the errors of saves that fail because of this.
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
        [sys.executable or "", *flags, "-c", _BEGIN.format(fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # the trainer alone handles signals to its process group
    )


def _paths() -> list[str]:
    """Returns the trainer's ``sys.path`` for the saving process, plus the folder of this package.

    Relative paths of existing folders and files are made absolute.
    """
    own = os.path.abspath(__file__)
    for _ in __name__.split("."):
        own = os.path.dirname(own)
    known = [path for path in sys.path if isinstance(path, str)]
    # an entry that is neither a folder nor an archive may be meant for an import hook
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
        if not unsettled.is_set():  # otherwise it has a save to finish
            _wait(process, _SHUTDOWN_TIMEOUT)
            _kill(process)
