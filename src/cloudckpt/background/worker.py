"""The saving process, its own side: takes staged copies from its trainer, and saves them.

It has one thread that saves, and one that gives signs of life and looks whether the trainer lives.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cloudckpt import api
from cloudckpt.background.arena import Arena
from cloudckpt.background.handoff import (
    END,
    NOT_COMING,
    Job,
    Outcome,
    Settings,
    as_socket,
    receive_descriptor,
    unpack,
)
from cloudckpt.checkpoint.torch_private import set_group_timeout
from cloudckpt.dcp.committed_metadata import attempt_of
from cloudckpt.dcp.failures import portable, release_frames
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    MissingDependencyError,
    ProcessGroupError,
    SaveProcessError,
)
from cloudckpt.events import relay
from cloudckpt.stores.credentials import take_over

__all__ = ["Termination", "check_io_priority", "forward_logs", "main", "yield_to_trainer"]

logger = logging.getLogger("cloudckpt")

_LOOK = 0.5  # seconds between two looks whether the trainer is alive
_BEATS = 5  # signs of life in the time in which one must come


def main(connection: Connection, parent: int, settings: Settings) -> None:
    """Serves until the trainer says so, or is gone.

    Args:
        connection: To the trainer.
        parent: The process that ends when the trainer is gone.
        settings: What this process is told.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    with as_socket(connection) as end:  # now, while no other thread uses the connection
        termination = Termination(connection)
        sender = Sender(connection)
        interval = settings.options.heartbeat_timeout / _BEATS
        threading.Thread(target=_watch, args=(parent, sender, interval), daemon=True).start()
        forward_logs(sender, settings.log_levels)
        relay(lambda event: sender.send("event", event))  # told by the trainer, not here, too
        yield_to_trainer(settings.options.nice, settings.options.io_priority)
        torch.set_num_threads(1)
        try:
            if settings.store is not None:
                _join(settings)
        except Exception as error:  # noqa: BLE001 - told to the trainer
            sender.send(
                "failed to start",
                SaveProcessError("the saving processes of the ranks did not meet", cause=error),
            )
            return
        sender.send("ready", None)
        _serve(connection, end, sender, termination)


def _watch(parent: int, sender: Sender, interval: float) -> None:
    """Gives signs of life, and ends this process soon after its trainer, however that ended.

    A process that outlives its trainer could at most commit late, and the commit is conditional;
    but it would hold memory and send bytes for nobody.
    """
    told = time.monotonic()
    while os.getppid() == parent:
        time.sleep(min(_LOOK, interval))
        if sender.is_awaited and time.monotonic() - told >= interval:
            told = time.monotonic()
            with contextlib.suppress(OSError):  # the trainer is gone
                sender.send("alive", None)
    os._exit(1)


def _join(settings: Settings) -> None:
    """Makes a process group with the saving processes of the other ranks."""
    assert settings.store is not None
    host, port = settings.store
    timeout = timedelta(seconds=settings.options.start_timeout)
    store = PrefixStore(settings.place, TCPStore(host, port, timeout=timeout))
    dist.init_process_group(
        "gloo", store=store, rank=settings.rank, world_size=settings.world, timeout=timeout
    )
    dist.barrier()
    set_group_timeout(timedelta(seconds=settings.options.collective_timeout))


def _serve(
    connection: Connection,
    end: socket.socket,
    sender: Sender,
    termination: Termination,
) -> None:
    arenas: dict[int, Arena] = {}
    meeting = Meeting.of(None, no_dist=False)
    while True:
        try:
            connection.poll(None)
            termination.hold()
            message = connection.recv()
            if message == END:
                return
            if not isinstance(message, Job):
                if message == NOT_COMING:
                    termination.let_go()
                continue
            job = message
            sender.is_awaited = True
            if job.is_new and job.arena is not None:
                arenas[job.arena] = Arena.attach(receive_descriptor(end), job.size)
        except (EOFError, OSError):
            return
        for number in arenas.keys() - job.kept:
            arenas.pop(number).close()
        take_over(job.variables)
        result, error, lost = None, None, False
        try:
            result = _save(job, arenas, meeting)
        except BaseException as raised:  # noqa: BLE001 - told to the trainer
            lost = _has_lost_the_others(raised, meeting)
            error = portable(raised, None)
            release_frames(error)
        outcome = Outcome(result, error, is_last=lost or termination.is_due)
        del job, message
        gc.collect()  # cycles hold on to the staged copy, which the trainer writes to next
        sender.is_awaited = False  # nobody would read it
        try:
            sender.send("outcome", outcome)
        except (OSError, pickle.PicklingError):
            return
        if lost:
            return  # the connections of the others end with this process, so that none waits
        termination.let_go()


def _has_lost_the_others(error: BaseException, meeting: Meeting) -> bool:
    """Whether the processes may not be at the same collective call after a save that failed.

    All raise alike what is told in a meeting or in torch's steps. Anything else was raised on its
    way there, and others may wait for this process.
    """
    if meeting.group is None:
        return False
    told = isinstance(error, CloudCheckpointError) and not isinstance(error, ProcessGroupError)
    return meeting.is_broken or not told


def _save(job: Job, arenas: dict[int, Arena], meeting: Meeting) -> bytes:
    state, (writer, planner, use_collectives) = meeting.begin(lambda: _unpacked(job, arenas))
    metadata = api.save(
        state,
        storage_writer=writer,
        planner=planner,
        use_collectives=use_collectives,
        no_dist=meeting.group is None,
    )
    sent = writer.transferred if isinstance(writer, CloudStorageWriter) else None
    protocol = pickle.HIGHEST_PROTOCOL
    attempt = attempt_of(metadata)
    told = attempt if attempt is not None else pickle.dumps(metadata, protocol)
    return pickle.dumps((told, sent), protocol)


def _unpacked(job: Job, arenas: dict[int, Arena]) -> tuple[dict[str, Any], Any]:
    if job.failure is not None:
        raise job.failure
    try:
        return unpack(job.payload, None if job.arena is None else arenas[job.arena])
    except Exception as error:
        raise SaveProcessError(
            "the saving process can't read what it was sent: are all its classes importable by "
            "name?",
            cause=error,
        ) from error


class Termination:
    """Ends this process when it is asked to by SIGTERM, but not within a save.

    Schedulers send the signal to whole process groups, some time before they end them by force: it
    is the trainer's to decide what is still to be saved. So a save under way is finished, and one
    that the trainers have agreed to begin, for which it is making the copy: ``COMING`` has told of
    it. Messages that were not read yet count.

    Attributes:
        is_due: Whether the signal has come.
    """

    def __init__(self, connection: Connection) -> None:
        """
        Args:
            connection: On which the trainer tells of saves.
        """
        self.is_due = False
        self._connection = connection
        self._is_idle = True
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """A save begins, or is about to."""
        self._is_idle = False

    def let_go(self) -> None:
        """It has ended, or does not begin."""
        self._is_idle = True
        if self.is_due:
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_due = True
        if self._is_idle:
            self._end()

    def _end(self) -> None:
        if not self._connection.poll():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class Sender:
    """Sends to the trainer, from several threads.

    Attributes:
        is_awaited: Whether the trainer waits for an outcome, and reads.
    """

    def __init__(self, connection: Connection) -> None:
        self.is_awaited = False
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: object) -> None:
        with self._lock:
            self._connection.send((kind, content))


def forward_logs(sender: Sender, levels: dict[str, int]) -> None:
    """Sends log records to the trainer.

    Args:
        sender: Sends them.
        levels: Of loggers by name; that of the root under the empty one.
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
                sender.send("log", record)

    logging.getLogger().handlers[:] = [Forward()]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


_CLASSES = {"idle": 3, "best-effort": 2}  # IOPRIO_CLASS_* of Linux


def check_io_priority(wanted: str | int | None) -> None:
    """Whether a saving process of this machine could be given an I/O priority.

    Args:
        wanted: See :class:`~cloudckpt.config.BackgroundOptions`; None is always possible.

    Raises:
        ConfigError: If this system has none.
        MissingDependencyError: If psutil is not installed.
    """
    if wanted is None:
        return
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"io_priority={wanted!r}: only Linux has I/O priorities; leave the option out"
        )
    try:
        _process().ionice()
    except ImportError as exc:
        raise MissingDependencyError(
            f"io_priority={wanted!r} needs psutil; install it with: "
            "pip install 'cloudckpt[priority]'",
            cause=exc,
        ) from exc
    except Exception as exc:  # psutil wraps some errors of the system
        raise ConfigError(
            f"io_priority={wanted!r}: this system has no I/O priorities; leave the option out",
            cause=exc,
        ) from exc


def yield_to_trainer(nice: int, io_priority: str | int | None) -> None:
    """Lowers the priorities of this thread, and of all threads that it starts from now on.

    A priority that can't be had is no reason not to save: the log says so.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
    if io_priority is None:
        return
    try:
        if io_priority == "idle":
            _process().ionice(_CLASSES["idle"])
        else:
            _process().ionice(_CLASSES["best-effort"], io_priority)
    except Exception as exc:  # noqa: BLE001 - psutil has errors of its own
        logger.warning("the I/O priority stays as it is: %s", exc)


def _process() -> Any:
    import psutil

    return psutil.Process()
