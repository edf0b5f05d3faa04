"""Saving processes are forked from a server, a process that has everything imported already.

An interpreter of its own takes seconds to import torch, and a fork of one that has takes
milliseconds and shares its memory: a saving process that has died is replaced at once. Each trainer
has a server as long as it has saving processes. It is started by multiprocessing's
``spawn``, as is documented of saving processes: it imports the trainer's main module, under another
name. From then on it does nothing but fork, and look for its trainer.

- It has one Python thread, no process group, no CUDA and no staged copy. If the main module starts
  threads or initializes CUDA when it is imported, what is forked of it might not work: it then
  starts an interpreter for each saving process instead.
- What may have changed since it was started is sent with each request: the environment, the working
  directory, the paths of modules.
- It ends when its trainer is gone, and the saving processes when it is; and when there have been
  none for a while. SIGTERM, which schedulers send to whole process groups, is for the others.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing import connection as channels
from multiprocessing import process as processes
from multiprocessing import spawn, util
from multiprocessing.connection import Connection
from typing import Any

import torch

from cloudckpt.background import worker
from cloudckpt.background.handoff import (
    Settings,
    as_socket,
    receive_descriptor,
    send_descriptor,
    set_timeout,
)
from cloudckpt.fork import ModuleLock

__all__ = ["Forked", "fork_worker"]

_LOOK = 0.5  # seconds between two looks whether the trainer is alive
_IDLE = 30.0  # seconds without a saving process after which it ends
_GLANCE = 0.05  # seconds between two looks at what the server tells
_PATIENCE = 60.0  # seconds that a request may take to be sent
_FAREWELL = 5.0  # seconds for a process that is killed to end


def fork_worker(channel: Connection, settings: Settings) -> Forked:
    """Starts a saving process; it need not run yet when this returns.

    Args:
        channel: Its end of the channel, which may be closed here then.
        settings: What it is told.

    Raises:
        OSError: If there is no server, and none can be started.
        AssertionError: If this process is a daemonic one of multiprocessing's.
        RuntimeError: If the main module is being imported by such a process.
    """
    global _server
    with _lock:
        if _server is None or _server.trainer != os.getpid() or not _server.process.is_alive():
            _server = _Server()
        return _server.fork(channel, settings)


@dataclass(frozen=True)
class _Request:
    """A saving process to be forked; the descriptors of its channel and its status follow.

    Attributes:
        settings: What it is told.
        surroundings: See ``multiprocessing.spawn.prepare``.
        environment: That of the trainer.
    """

    settings: Settings
    surroundings: dict[str, Any]
    environment: dict[str, str] = field(repr=False)


class _Server:
    """The server, seen from its trainer.

    Attributes:
        trainer: The process that has started it.
        process: Its own.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.trainer = os.getpid()
        self._channel, theirs = context.Pipe()
        set_timeout(self._channel, _PATIENCE)
        self.process = context.Process(
            target=_serve, args=(theirs, self.trainer, _IDLE), name="cloudckpt-server"
        )
        with theirs:
            self.process.start()
        # it is not one of the children that a program has started, and may wait for
        getattr(processes, "_children", set()).discard(self.process)
        util.Finalize(None, self._end, exitpriority=0)  # behind the ends of saving processes

    def _end(self) -> None:
        self.process.kill()
        self.process.join(_FAREWELL)

    def fork(self, channel: Connection, settings: Settings) -> Forked:
        surroundings = spawn.get_preparation_data("cloudckpt-save")
        surroundings["authkey"] = bytes(surroundings["authkey"])  # it refuses to be pickled
        status, theirs = multiprocessing.Pipe(duplex=False)
        with theirs:
            self._channel.send(_Request(settings, surroundings, dict(os.environ)))
            for end in (channel, theirs):
                send_descriptor(self._channel, end.fileno())
        return Forked(status, self.process)


class Forked:
    """A saving process, with what is needed of multiprocessing's interface of one.

    The server sends its number, and its exit code when it has ended.

    Attributes:
        sentinel: What can be waited for to see whether it has ended; it may also be a false alarm.
        exitcode: As multiprocessing's; None if it has not ended, or nobody knows.
    """

    def __init__(self, status: Connection, server: processes.BaseProcess) -> None:
        self.sentinel = status
        self.exitcode: int | None = None
        self._server = server
        self._pid: int | None = None
        self._has_ended = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Its number; waits until it is there."""
        while self._pid is None and self.is_alive():
            channels.wait([self.sentinel], timeout=_GLANCE)  # another thread may take what comes
        return self._pid

    def is_alive(self) -> bool:
        with self._lock:
            while not self._has_ended and self.sentinel.poll():
                try:
                    told = self.sentinel.recv()
                except (EOFError, OSError):
                    self._outlive_server()
                    break
                if self._pid is None:
                    self._pid = told
                else:
                    self._has_ended, self.exitcode = True, told
            return not self._has_ended

    def _outlive_server(self) -> None:
        """Ends it at once where its server is gone: it may still read the staged copy."""
        self._server.join(_FAREWELL)
        if self._pid is None:
            self.exitcode = self._server.exitcode
        else:
            end = time.monotonic() + _FAREWELL
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < end:
                    os.kill(self._pid, signal.SIGKILL)
                    time.sleep(_GLANCE / 10)
        self._has_ended = True

    def join(self, timeout: float) -> None:
        """Waits for its end."""
        end = time.monotonic() + timeout
        while self.is_alive() and (left := end - time.monotonic()) > 0:
            channels.wait([self.sentinel], timeout=min(left, _GLANCE))

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        end = time.monotonic() + _FAREWELL
        while self.is_alive() and self._pid is None:
            channels.wait([self.sentinel], timeout=_GLANCE)
            if time.monotonic() > end:  # it never gets so far
                self._server.kill()
        with self._lock:
            # while the server has not told of its end, its number is not used again
            if self._pid is not None and self.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)


_lock = ModuleLock()
_server: _Server | None = None


# ---- the server, its own side


_statuses: dict[int, Connection] = {}  # of what was forked, by sentinel


_OF_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers and terminals send to whole process groups, for the trainer to heed.

Most end a process that does not. What is forked here ignores them, too; a saving process of which
SIGTERM asks its end has a way of its own, see ``worker``.
"""


def _serve(trainer: Connection, number: int, patience: float) -> None:
    for one in _OF_THE_TRAINER:
        signal.signal(one, signal.SIG_IGN)
    forked: dict[int, processes.BaseProcess] = {}
    gc.collect()
    gc.freeze()  # the pages of what is there stay shared
    with as_socket(trainer) as end:
        used = time.monotonic()
        while os.getppid() == number and (forked or time.monotonic() - used < patience):
            ready = channels.wait([trainer, *forked], timeout=_LOOK)
            if ready or forked:
                used = time.monotonic()
            for sentinel in forked.keys() & set(ready):
                process = forked.pop(sentinel)
                process.join()
                with _statuses.pop(sentinel) as status, contextlib.suppress(OSError):
                    status.send(process.exitcode)
            if trainer in ready:
                try:
                    request = trainer.recv()
                    channel, status = (Connection(receive_descriptor(end)) for _ in range(2))
                except (EOFError, OSError):
                    break
                try:
                    with channel:
                        started = _start(request, channel, [trainer, status])
                except OSError:
                    traceback.print_exc()
                    status.close()  # which tells the trainer
                    continue
                forked[started.sentinel] = started
                _statuses[started.sentinel] = status
                with contextlib.suppress(OSError):
                    status.send(started.pid)
    os._exit(0)  # multiprocessing would wait for the saving processes, and they for this end


def _start(request: _Request, channel: Connection, held: list[Connection]) -> processes.BaseProcess:
    cuda: Any = torch.cuda
    can_fork = threading.active_count() == 1 and not cuda.is_initialized()
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    inherited = [*held, *_statuses.values()] if can_fork else []
    made: processes.BaseProcess = context.Process(
        target=_become_worker,
        args=(channel, request, os.getpid(), inherited),
        name="cloudckpt-save",
        daemon=True,
    )
    with warnings.catch_warnings():
        # newer Pythons warn of numpy's threads, which heed forks
        warnings.simplefilter("ignore", DeprecationWarning)
        made.start()
    return made


def _become_worker(
    channel: Connection, request: _Request, server: int, inherited: list[Connection]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for held in inherited:  # whose ends others wait for
        held.close()
    os.environ.clear()
    os.environ.update(request.environment)
    spawn.prepare(request.surroundings)
    worker.main(channel, server, request.settings)
