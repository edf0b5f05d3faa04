"""The saving process's side: sends the objects that the trainer has planned.

It is a separate interpreter, which the trainer starts by exec. It imports only what stores and
transfers need: no torch, and no user code. One thread takes jobs, as many as the options say send,
and one sends heartbeats and checks that the trainer is alive.

If its trainer ends before the commit, it keeps sending the save that it was given, from memory that
it holds itself, and records its progress in the store: at once that it is sending, again every two
seconds, and finally what a commit needs (:mod:`cloudckpt.checkpoint.pending`). It never commits:
the next job decides whether that step is still wanted.

The trainer sends ``Settings`` once and a ``Job`` for each save, followed by the descriptors of the
memory that holds its bytes. ``SETTLED`` says that the trainer knows the outcome of that save;
closing the channel ends the process, after it has finished a save that is not settled. The process
answers with pairs of a message type and its content: ``ready``, an ``outcome`` for each job, and
between them ``log``, ``event``, and ``alive`` with whether it makes no progress.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from cloudckpt.checkpoint.object_plan import Destination, ObjectPlan, send, sending_group
from cloudckpt.checkpoint.objects import METADATA, WrittenObject, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.errors import CloudCheckpointError, ObjectNotFoundError, SaveProcessError
from cloudckpt.events import Transferred, relay
from cloudckpt.stores.credentials import take_over
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.pool import MemoryPool
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import only_if_new, put_whole
from cloudckpt.waiting import is_stuck

__all__ = [
    "SETTLED",
    "CurrentSave",
    "Job",
    "Outcome",
    "Sending",
    "Settings",
    "Speaker",
    "as_socket",
    "finish",
    "forward_logs",
    "main",
]

logger = logging.getLogger("cloudckpt")

_BETWEEN = 2.0  # seconds between two progress records

SETTLED = "settled"


@dataclass(frozen=True)
class Settings:
    """The settings that a saving process receives when it starts.

    Attributes:
        trainer: The process ID of the trainer that started it.
        heartbeat_timeout: Seconds within which it must send a heartbeat while it has a job.
        outlive: Seconds it has to finish a save whose trainer has ended.
        log_levels: The level from which records are sent to the trainer, by logger name.
    """

    trainer: int
    heartbeat_timeout: float
    outlive: float
    log_levels: dict[str, int]


@dataclass(frozen=True)
class Job:
    """The objects that a rank sends in one save.

    Attributes:
        destination: The checkpoint, the rank, and options.
        plans: The plans to carry out, in this order.
        sizes: Bytes of the arena (the staged copy) and of the annex (other data), whose
            descriptors follow.
        variables: The credential variables of the trainer's environment when it sent the job.
        pending: A template of the record that :func:`finish` leaves in the store if the trainer
            ends before it knows the outcome. None to leave no record.
    """

    destination: Destination
    plans: Sequence[ObjectPlan]
    sizes: tuple[int, int]
    variables: dict[str, str] = field(repr=False)
    pending: Pending | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a :class:`Job`.

    Attributes:
        objects: The objects written; empty if the job failed.
        error: The error if the job failed; else None.
        transferred: The bytes and requests of the job.
    """

    objects: tuple[WrittenObject, ...]
    error: BaseException | None
    transferred: Transferred


@contextlib.contextmanager
def as_socket(channel: Connection) -> Iterator[socket.socket]:
    """Yields the channel as a socket, for operations that a ``Connection`` does not have.

    No other thread may use the channel at the start of the block: in a program that has called
    ``socket.setdefaulttimeout``, the channel is nonblocking for a moment.
    """
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setblocking(True)
        yield end


class Sending(NamedTuple):
    """A save whose outcome the trainer does not know yet.

    Attributes:
        job: The objects to send.
        stats: The bytes and requests sent so far.
        objects: The objects, once the store has all of them; None before.
    """

    job: Job
    stats: TransferStats
    objects: tuple[WrittenObject, ...] | None = None


class CurrentSave:
    """Shares the save in progress between the thread that sends and the one that watches.

    Attributes:
        save: The save; None between saves.
        is_orphaned: Whether the trainer has ended, or closed the channel.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.save: Sending | None = None
        self.is_orphaned = False

    def set(self, save: Sending | None) -> None:
        with self._changed:
            self.save = save
            self._changed.notify_all()

    def orphan(self) -> None:
        with self._changed:
            self.is_orphaned = True
            self._changed.notify_all()

    def wait_until_orphaned(self, timeout: float, *, or_sending: bool = False) -> bool:
        """Waits up to ``timeout`` seconds until the trainer has ended or closed the channel.

        Args:
            timeout: Seconds.
            or_sending: Whether to return True also while a save is being sent, though not if all
                of it was sent.

        Returns:
            Whether this was so before the timeout.
        """

        def is_over() -> bool:
            is_sending = self.save is not None and self.save.objects is None
            return self.is_orphaned or (or_sending and is_sending)

        with self._changed:
            return self._changed.wait_for(is_over, timeout)

    def wait_until_sent(self, timeout: float) -> Sending | None:
        """Waits up to ``timeout`` seconds until all data of the save is sent, or the save is over.

        Returns:
            The save, even if the time was too short; None if the save is over, because it failed or
            the trainer knows its outcome.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.save is None or self.save.objects is not None, timeout
            )
            return self.save


def finish(current: CurrentSave, limit: float) -> None:
    """Records in the store how much of a save was sent, after its trainer has ended.

    The record is updated until another thread has sent all data; the next training job can then
    commit the save. If the save fails, the record is deleted. Does nothing if no save is in
    progress, if ``Job.pending`` is None, or if the location already has a checkpoint. Errors of the
    store are logged.

    Args:
        current: The save.
        limit: Seconds after which this process exits, even if data is left to send; 0: nothing is
            recorded.
    """
    save = current.save
    if save is None or (template := save.job.pending) is None or limit <= 0:
        return
    end = threading.Timer(limit, os._exit, (0,))
    end.daemon = True
    end.start()
    _let_go_of_output()
    destination = save.job.destination
    config, policy = destination.config, destination.config.retry
    key = destination.uri.key(pending_name(destination.rank, destination.attempt))
    try:
        store, retrier = open_store(destination.uri, config), Retrier(policy)
        with contextlib.suppress(ObjectNotFoundError):
            retrier.call(lambda: store.head(destination.uri.key(METADATA)))
            return  # it is committed, or was to replace one that is
        condition, version = only_if_new(store, config), None
        wait = 0.0
        while (save := current.wait_until_sent(wait)) is not None:
            wait = _BETWEEN
            pending = template.so_far(save.stats.snapshot().nbytes)
            if save.objects is not None:
                pending = pending.finished(save.objects)
            version = put_whole(
                store,
                key,
                memoryview(pending.to_bytes()),
                retrier,
                if_version=None if condition is None else version or "",
            ).version
            if save.objects is not None:
                return
        if version is not None:
            delete_quietly(store, [key], policy, threads=1)  # the save could not be sent
    except CloudCheckpointError as error:
        logger.debug(
            "the state of a save whose trainer has ended could not be recorded in the store, so "
            "the next job can't finish this save: %s",
            error,
        )


def _let_go_of_output() -> None:
    """Redirects standard output and error of this process to the null device.

    Both were inherited from the trainer: whoever reads the trainer's output through a pipe would
    otherwise wait until this process ends, too.
    """
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


_NICE = 5  # niceness of this process relative to the trainer
_LOOK = 0.5  # seconds between checks that the trainer is alive
_LAST_WORDS = 2.0  # seconds for reading a trainer's last messages
_BEATS = 5  # heartbeats per heartbeat timeout

_OF_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to all processes of a job, for the trainer to handle: it decides
what is still saved, and once it has ended, this process finishes its work and ends.
"""


def main(channel: Connection) -> None:
    """Sends the trainer's saves until the trainer ends or closes the channel; ends the process.

    If the trainer does not know the outcome of its last save yet, that save is first finished for
    the next training job; see :func:`finish`.
    """
    for number in _OF_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = channel.recv()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    speaker, current = Speaker(channel), CurrentSave()
    forward_logs(speaker, settings.log_levels)
    relay(lambda event: speaker.send("event", event))  # reported by the trainer, not here as well
    with as_socket(channel) as end:  # now, while no other thread uses the channel
        watch = threading.Thread(target=_watch, args=(settings, speaker, current), daemon=True)
        watch.start()
        with contextlib.suppress(OSError):  # the trainer has ended
            speaker.send("ready", None)
        while (job := _next(channel, current)) is not None:
            _carry_out(job, end, speaker, current)
    current.orphan()
    watch.join()


def _next(channel: Connection, current: CurrentSave) -> Job | None:
    """Returns the next job; None if the trainer has closed the channel."""
    while True:
        try:
            message = channel.recv()
        except (EOFError, OSError):
            return None
        if message != SETTLED:
            job: Job = message
            return job
        current.set(None)


def _watch(settings: Settings, speaker: Speaker, current: CurrentSave) -> NoReturn:
    """Sends heartbeats; when the trainer has ended, finishes its save and ends this process.

    The process ID of the parent shows that the trainer has ended. The channel does not: children
    forked from the trainer may hold it open.
    """
    interval = settings.heartbeat_timeout / _BEATS
    pause, last = min(_LOOK, interval), time.monotonic()
    while os.getppid() == settings.trainer and not current.wait_until_orphaned(pause):
        stuck, now = is_stuck(), time.monotonic()
        if speaker.is_awaited and (stuck != speaker.is_stuck or now - last >= interval):
            speaker.is_stuck, last = stuck, now
            with contextlib.suppress(OSError):  # the trainer has ended
                speaker.send("alive", stuck)
    speaker.is_heard = False
    current.wait_until_orphaned(_LAST_WORDS, or_sending=True)
    try:
        finish(current, settings.outlive)
    finally:
        os._exit(0)


def _carry_out(job: Job, end: socket.socket, speaker: Speaker, current: CurrentSave) -> None:
    speaker.is_stuck, speaker.is_awaited = False, True
    uri, error = job.destination.uri, None
    stats = TransferStats(str(uri), job.destination.rank, job.destination.expected)
    objects: tuple[WrittenObject, ...] = ()
    memory: list[memoryview] | None = None
    with contextlib.ExitStack() as held:
        try:
            if (memory := _taken_over(end, job.sizes, held)) is None:
                return  # the trainer has just ended
            take_over(job.variables)
            current.set(Sending(job, stats))
            objects = _sent(job, memory, stats)
        except BaseException as raised:  # noqa: BLE001 - sent to the trainer
            error = _portable(raised)
            current.set(None)
        else:
            current.set(Sending(job, stats, objects))
    with contextlib.suppress(OSError):  # the trainer has ended
        speaker.send("outcome", Outcome(objects, error, stats.snapshot()))
    speaker.is_awaited = False  # the trainer would not read a further heartbeat
    if error is not None:
        del error, memory
        gc.collect()  # the error's frames hold on to the memory


def _sent(
    job: Job, memory: Sequence[memoryview], stats: TransferStats
) -> tuple[WrittenObject, ...]:
    """Sends a job's objects from its two parts of memory (arena, annex), and returns them."""
    destination = job.destination
    store = open_store(destination.uri, destination.config)
    group = sending_group(destination, store)
    pool = MemoryPool(destination.config.memory_budget, group.cancellation)
    return send(destination, store, job.plans, _Buffers(pool, memory), group, stats)


@dataclass(frozen=True)
class _Buffers:
    """The buffers of a plan: the arena of the staged copy, and the annex."""

    pool: MemoryPool
    _memory: Sequence[memoryview]

    def views(self, plan: ObjectPlan) -> Iterator[memoryview]:
        memory = self._memory[plan.buffer]
        for start, form in zip(plan.starts, plan.forms, strict=True):
            yield memory[start : start + form.nbytes]

    def pieces(self, buffer: int, start: int, nbytes: int) -> tuple[Piece]:
        return (Piece(self._memory[buffer][start : start + nbytes]),)


def _taken_over(
    end: socket.socket, sizes: Sequence[int], held: contextlib.ExitStack
) -> list[memoryview] | None:
    """Receives and maps the trainer's memory: the arena and the annex.

    Args:
        end: The socket that receives a descriptor of each.
        sizes: Bytes of each; a part of 0 bytes is not mapped.
        held: Keeps the memory mapped until it is closed.

    Returns:
        A view of each part; None if the trainer has ended.

    Raises:
        SaveProcessError: If this process can't map it.
    """
    try:
        received = socket.recv_fds(end, 1, len(sizes))
    except OSError:
        return None
    message, descriptors, _, _ = received
    with contextlib.ExitStack() as closed:
        for fd in descriptors:
            closed.callback(os.close, fd)
        if not message:
            return None
        try:
            parts = zip(descriptors, sizes, strict=True)  # descriptors beyond the limit are lost
            return [held.enter_context(_mapped(fd, size)) for fd, size in parts]
        except (OSError, ValueError) as exc:
            raise SaveProcessError(
                f"the saving process can't map {sum(sizes):,} bytes of the staged copy: raise the "
                "limits of its address space (ulimit -v) and of open files (ulimit -n), or save "
                "in a thread (AsyncCheckpointerType.THREAD)",
                cause=exc,
            ) from exc


@contextlib.contextmanager
def _mapped(fd: int, size: int) -> Iterator[memoryview]:
    """Maps the first ``size`` bytes of a file, read-only."""
    with memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b"") as view:
        yield view


def _portable(error: BaseException) -> BaseException:
    """Returns the error itself, or a SaveProcessError that describes it if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line itself
    except Exception:  # noqa: BLE001 - anything may be raised by somebody's __reduce__
        return SaveProcessError(
            "the saving process failed with an error that can't be sent to the trainer (see the "
            "cause); this save is not committed",
            cause=error,
        )
    return error


class Speaker:
    """Sends messages to the trainer, from several threads.

    Attributes:
        is_awaited: Whether the trainer is waiting for an outcome, and so reading.
        is_stuck: Whether the last ``alive`` message of this job reported no progress.
        is_heard: Whether the trainer still exists; if False, messages are dropped.
    """

    def __init__(self, channel: Connection) -> None:
        self.is_awaited = self.is_stuck = False
        self.is_heard = True
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, kind: str, content: object) -> None:
        """Sends a message's type and content to the trainer; nothing once ``is_heard`` is False.

        Raises:
            OSError: If the trainer has ended.
        """
        with self._lock:
            if self.is_heard:
                self._channel.send((kind, content))


def forward_logs(speaker: Speaker, levels: dict[str, int]) -> None:
    """Redirects log records of this process to the trainer.

    Args:
        speaker: Sends the records.
        levels: Levels of loggers by name; the root logger's name is empty.
    """

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "cloudckpt_event"):
                return  # the trainer gets the event, and logs it
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            with contextlib.suppress(Exception):
                speaker.send("log", record)

    logging.getLogger().handlers[:] = [Forward()]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
