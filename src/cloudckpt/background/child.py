"""One saving process, seen from its trainer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import connection as channels
from multiprocessing import process as processes
from multiprocessing import util
from typing import Any

from cloudckpt.background.arena import Arena
from cloudckpt.background.channel import send_descriptor, set_timeout
from cloudckpt.background.worker import Job, Outcome, Settings, main
from cloudckpt.errors import CloudCheckpointError, SaveProcessError
from cloudckpt.events import emit
from cloudckpt.stores.credentials import variables

__all__ = ["Child"]

_LOOK = 1.0  # seconds between two looks whether the process is alive
_FAREWELL = 5.0  # seconds for it to end by itself

_AFTERMATH = (
    "nothing of this save is visible unless it had committed, and the next save starts a new one"
)

_numbers = itertools.count()
_children: weakref.WeakSet[Child] = weakref.WeakSet()


class Child:
    """One process, from its start to its end.

    Attributes:
        is_busy: Whether it has a job and has not told its outcome.
        is_leaving: Whether it has said that it takes no other.
    """

    def __init__(self, settings: Settings, exit_timeout: float) -> None:
        """
        Args:
            settings: What it is told.
            exit_timeout: Seconds that the end of the interpreter waits for a save under way.
        """
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._timeout = settings.start_timeout
        self._patience = settings.heartbeat_timeout
        set_timeout(self._channel, self._patience)
        self._exit_timeout = exit_timeout
        self._ready = self._ended = False
        self._ending = threading.Lock()
        self.is_busy = self.is_leaving = False
        self._arenas: weakref.WeakKeyDictionary[Arena, int] = weakref.WeakKeyDictionary()
        self._process = context.Process(
            target=main, args=(theirs, settings), name="cloudckpt-save", daemon=True
        )
        try:
            with theirs:
                self._process.start()
        except (OSError, AssertionError, RuntimeError) as exc:
            self._channel.close()
            raise SaveProcessError(
                "the saving process can't be started; a training script must guard its entry with "
                "if __name__ == '__main__', and must not itself be a daemonic process",
                cause=exc,
            ) from exc
        _children.add(self)
        self._at_exit = util.Finalize(None, self._end_at_exit, exitpriority=0)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_until_ready(self, look: Callable[[], None]) -> None:
        """Waits until it has met those of the other ranks.

        Args:
            look: Called now and then; may raise to end the wait.

        Raises:
            SaveProcessError: If it ends before, or is not ready in time.
        """
        if not self._ready:
            self._receive("ready", look, time.monotonic() + self._timeout)
            self._ready = True

    def carry_out(
        self,
        number: int,
        payload: bytes,
        arena: Arena | None,
        failure: CloudCheckpointError | None,
        look: Callable[[], None],
    ) -> Outcome:
        """Sends a job and waits for its outcome.

        Args:
            number: Counted alike on all ranks.
            payload: What to save.
            arena: Where it is.
            failure: Why this rank can't take part.
            look: Called now and then until all ranks have begun; may raise to end the wait.

        Raises:
            SaveProcessError: If the process ends before, or gives no sign of life.
        """
        is_new = arena is not None and arena not in self._arenas
        if arena is not None and is_new:
            self._arenas[arena] = next(_numbers)
        job = Job(
            number=number,
            payload=payload,
            arena=None if arena is None else self._arenas[arena],
            size=0 if arena is None else arena.size,
            is_new=is_new,
            kept=frozenset(self._arenas[known] for known in self._arenas if known.fd >= 0),
            failure=failure,
            variables=variables(),
        )
        self.is_busy = True
        try:
            self._channel.send(job)
            if arena is not None and is_new:
                send_descriptor(self._channel, arena.fd)
        except (OSError, pickle.PicklingError) as exc:
            raise self._death(exc) from exc
        outcome: Outcome = self._receive("outcome", look)
        self.is_busy, self.is_leaving = False, outcome.is_last
        return outcome

    def _receive(self, wanted: str, look: Callable[[], None], deadline: float | None = None) -> Any:
        """The next message of a kind; log records and events on the way are handled here."""
        has_begun, silent = False, 0.0
        while True:
            try:
                ready = channels.wait([self._channel, self._process.sentinel], timeout=_LOOK)
                if self._channel.poll():
                    kind, content = self._channel.recv()
                    silent = 0.0
                elif not self._process.is_alive():
                    raise self._death(None)
                elif deadline is not None and time.monotonic() > deadline:
                    raise SaveProcessError(
                        f"the saving process was not ready within {self._timeout:g} s"
                    )
                elif wanted == "outcome" and silent >= self._patience:
                    raise SaveProcessError(
                        f"the saving process gave no sign of life for {silent:g} s and is ended; "
                        f"{_AFTERMATH}"
                    )
                else:
                    if not ready:  # else it is about to end
                        silent += _LOOK  # not by the clock: that runs on while both are suspended
                    if not has_begun:
                        look()
                    continue
            except (EOFError, OSError) as exc:
                raise self._death(exc) from exc
            if kind == "log":
                target = logging.getLogger(content.name)
                if target.isEnabledFor(content.levelno):
                    target.handle(content)
            elif kind == "begun":
                has_begun = True
            elif kind == "event":
                emit(content)
            elif kind == "failed to start":
                raise content
            elif kind == wanted:
                return content

    def _death(self, cause: BaseException | None) -> SaveProcessError:
        self._process.join(_FAREWELL)
        code = self._process.exitcode
        if self._ended:
            return SaveProcessError(
                "the saving process was ended with this save under way, because the saver was "
                "closed; nothing of this save is visible unless it had committed"
            )
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended ({code})"
        elif channels.wait([self._process.sentinel], timeout=0):
            how = "ended"  # somebody else was told how
        elif isinstance(cause, BlockingIOError):  # what the channel's time limit raises
            how = f"did not read or write for {self._patience:g} s"
        else:
            how = "can't be reached"
        if not self._ready:
            return SaveProcessError(
                f"the saving process {how} before it was ready; it says why on standard error. A "
                "training script must guard its entry with if __name__ == '__main__'",
                cause=cause,
            )
        return SaveProcessError(
            f"the saving process {how}; {_AFTERMATH}",
            cause=cause,
        )

    def end(self, timeout: float) -> None:
        """Ends the process: by request within ``timeout`` seconds, else by force.

        Both who closes the saver and the thread of a save that fails may do so.
        """
        self._ended = True
        with self._ending:
            with contextlib.suppress(OSError, ValueError):
                if timeout > 0:
                    self._channel.send(None)
                    self._process.join(timeout)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(_FAREWELL)
            self._channel.close()
            self._at_exit.cancel()

    def _end_at_exit(self) -> None:
        """Before multiprocessing does so, and waits without an end."""
        if self.is_busy:
            self._process.terminate()
            self._process.join(self._exit_timeout)
        self.end(0)


def _after_fork() -> None:
    """The parent's processes are not the child's to end: multiprocessing would, at its exit."""
    known: set[processes.BaseProcess] = getattr(processes, "_children", set())
    for child in list(_children):
        known.discard(child._process)


os.register_at_fork(after_in_child=_after_fork)
