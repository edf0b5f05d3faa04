"""The process beside a trainer that carries out its saves, seen from the trainer.

How saving processes are replaced
---------------------------------

The saving processes of all ranks have one process group (gloo), which none can leave and none can
join later. So they are replaced together or not at all, by the one meeting that the trainers hold
before each save (``saver``). There each says whether its process is *fit*: alive, with a group that
is whole, and not about to end after SIGTERM. If one is not, all trainers wait for the saves that
are under way, end their processes and start new ones. Each counts these replacements; as all
replace together, all have the same count, and it names the place in the first rank's store where
the new processes find each other. Then the trainers meet once more: all go on, or all raise alike.

From then on no rank asks another what it is doing: each hands over every save that the meeting has
passed, in the order of the meetings, to the process of this replacement. A rank that could not copy
or pickle its state hands over the reason, which the processes tell each other. A rank that can't
even do that ends its process, and is not fit in the next meeting. What this rules out:

- *A process dies between two saves*: its trainer is not fit in the next meeting. All are replaced
  before anything is sent, and no save is lost.
- *It dies between the meeting and the end of the save*: its connections break. The processes of the
  other ranks fail in their next collective call, say so and end as well. The save fails on all
  ranks, and those that were queued behind it in double buffering do, too; the next meeting replaces
  all. None can be left waiting for a process that is gone, nor pair one save with another's.
- *It dies before it has joined the group*: nobody has a connection to it yet. Its trainer leaves a
  note in the store (``BROKEN``), where those look whose processes wait for it.
- *A trainer is interrupted between the meeting and the handing over*: the others would wait for its
  part, or pair it with its next save. It ends its process, and is not fit.
- *A replacement fails on one rank, or is interrupted there*: the count has been advanced before
  anything could fail, and that rank has no process, so it is not fit. The new processes of the
  others wait for it in vain, under a count that the next meeting leaves behind.
- *SIGTERM reaches a process while its trainer makes a copy*: it has been told before the meeting
  that a save is coming, and ends behind it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import connection as channels
from multiprocessing import util
from typing import Any

import torch.distributed as dist

from cloudckpt.background.arena import Arena
from cloudckpt.background.groups import MeetingPlace
from cloudckpt.background.handoff import (
    COMING,
    END,
    NOT_COMING,
    Job,
    Outcome,
    Settings,
    pack,
    send_descriptor,
    set_timeout,
)
from cloudckpt.background.server import fork_worker
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import CloudCheckpointError, SaveProcessError
from cloudckpt.events import emit
from cloudckpt.stores.credentials import variables

__all__ = ["SaveProcess", "log_levels"]

_LOOK = 1.0  # seconds between two looks whether the process is alive
_FAREWELL = 5.0  # seconds for it to end by itself

_AFTERMATH = (
    "nothing of this save is visible unless it had committed, and the next save starts a new one"
)

_numbers = itertools.count()


class SaveProcess:
    """A process beside this rank that carries out its saves, one after the other.

    Constructing it is a collective call for the ranks of ``group``, and so is :meth:`replace`; the
    process starts in the background.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: BackgroundOptions) -> None:
        """
        Args:
            group: The ranks that save together; None for this process alone.
            options: See there.

        Raises:
            SaveProcessError: If it can't be started, or does not reach the first rank's trainer.
        """
        self._options = options
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world = 1 if group is None else dist.get_world_size(group)
        self._place = None if group is None else MeetingPlace(group, options.start_timeout)
        self._starts = 0
        self._life: _Life | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int | None:
        """The process, if it is there."""
        life = self._life
        return None if life is None else life.pid

    def expect(self) -> bool:
        """Tells the process that a save may be coming; returns whether it can carry that out."""
        life = self._life
        return life is not None and life.is_fit() and life.tell(COMING)

    def expect_none(self) -> None:
        """Tells it that no save is coming."""
        if (life := self._life) is not None:
            life.tell(NOT_COMING)

    def replace(self, wait: Callable[[], None]) -> None:
        """Ends the process and starts another, as all ranks do at this moment.

        Args:
            wait: Waits for the saves under way; if it raises, the process is left to them, and is
                not fit.

        Raises:
            SaveProcessError: If none can be started.
        """
        self._starts += 1
        if self._life is not None:
            self._life.is_leaving = True
        wait()
        if self._life is not None:
            self._life.end(0, "all ranks have new ones")
        self._start()
        self.expect()

    def give_up(self) -> None:
        """Ends the process, since this rank can't hand over a save that all ranks begin."""
        if (life := self._life) is not None:
            life.end(0, "the call that began a save was interrupted")

    def save(
        self,
        state_dict: dict[str, Any],
        arena: Arena | None,
        others: object,
        failure: CloudCheckpointError | None = None,
    ) -> bytes:
        """Carries out a save; returns the pickled metadata and what was transferred.

        Args:
            state_dict: The staged state dict.
            arena: Where it is.
            others: The writer, the planner and how to save.
            failure: Why this rank can't take part; the other ranks are told.

        Raises:
            SaveProcessError: If the process has died or did not start.
            CloudCheckpointError: The failure of the save.
        """
        payload = b""
        if failure is None:
            try:
                payload = pack(state_dict, others, arena)
            except CloudCheckpointError as error:
                failure = error
        life = self._life
        if life is None:
            raise SaveProcessError("the saving process could not be started")
        try:
            life.wait_until_ready(self._look)
            outcome = life.carry_out(payload, arena, failure)
        except BaseException:
            # it may still read the staged copy, which the next save writes to
            life.end(0, "the save before failed in it")
            if not life.is_ready and self._place is not None:
                self._place.leave_note(self._name(_BROKEN))
            raise
        if outcome.result is None:
            raise outcome.error or SaveProcessError("the saving process gave no reason")
        return outcome.result

    def close(self, timeout: float) -> None:
        """Ends the process, at once if it does not end in time."""
        with self._lock:
            self._closed = True
            life = self._life
        if life is not None:
            life.end(timeout, "the saver was closed")
            self._life = None  # not before: an interrupt leaves it for the next call

    def _start(self) -> None:
        with self._lock:
            self._life = None
            if self._closed:
                raise SaveProcessError("the saver was closed")
            self._life = _Life(
                Settings(
                    rank=self._rank,
                    world=self._world,
                    store=None if self._place is None else self._place.address,
                    place=self._name("group"),
                    options=self._options,
                    log_levels=log_levels(),
                )
            )

    def _name(self, what: str) -> str:
        """A name in the store that no other replacement uses."""
        return f"{self._starts}/{what}"

    def _look(self) -> None:
        """Whether it is of use to wait until the processes have met.

        Raises:
            SaveProcessError: If one of them never will.
        """
        if self._place is not None and self._place.has_note(self._name(_BROKEN)):
            raise SaveProcessError(
                "the saving process of another rank ended before it was ready; nothing was begun, "
                "and the next save starts new ones"
            )


_BROKEN = "broken"


def log_levels() -> dict[str, int]:
    """The levels of loggers that somebody has set; that of the root under the empty name."""
    named = list(logging.Logger.manager.loggerDict.items())
    levels = {name: known.level for name, known in named if isinstance(known, logging.Logger)}
    return {
        "": logging.getLogger().level,
        **{name: level for name, level in levels.items() if level != logging.NOTSET},
    }


class _Life:
    """One process, from its start to its end.

    Attributes:
        is_ready: Whether it has said that it has met those of the other ranks.
        is_leaving: Whether it is to carry out no saves but those that were promised it.
    """

    def __init__(self, settings: Settings) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        self._sending = threading.Lock()
        self._options = settings.options
        set_timeout(self._channel, self._options.heartbeat_timeout)
        self.is_ready = self.is_leaving = self._is_busy = False
        self._ended_for = ""  # why this trainer has ended it
        self._ending = threading.Lock()
        self._arenas: weakref.WeakKeyDictionary[Arena, int] = weakref.WeakKeyDictionary()
        try:
            with theirs:
                self._process = fork_worker(theirs, settings)
        except (OSError, AssertionError, RuntimeError) as exc:
            self._channel.close()
            raise SaveProcessError(
                "the saving process can't be started; a training script must guard its entry with "
                "if __name__ == '__main__', and must not itself be a daemonic process",
                cause=exc,
            ) from exc
        self._at_exit = util.Finalize(None, self._end_at_exit, exitpriority=1)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_fit(self) -> bool:
        """Whether it can take another save."""
        return not (self.is_leaving or self._ended_for) and self._process.is_alive()

    def tell(self, message: object) -> bool:
        """Sends a message; returns whether it could be sent."""
        try:
            with self._sending:
                self._channel.send(message)
        except (OSError, ValueError):
            return False
        return True

    def wait_until_ready(self, look: Callable[[], None]) -> None:
        """Waits until it has met those of the other ranks.

        Args:
            look: Called now and then; may raise to end the wait.

        Raises:
            SaveProcessError: If it ends before, or is not ready in time.
        """
        if not self.is_ready:
            self._receive("ready", look, time.monotonic() + self._options.start_timeout)
            self.is_ready = True

    def carry_out(
        self, payload: bytes, arena: Arena | None, failure: CloudCheckpointError | None
    ) -> Outcome:
        """Sends a job and waits for its outcome.

        Args:
            payload: What to save.
            arena: Where it is.
            failure: Why this rank can't take part.

        Raises:
            SaveProcessError: If the process ends before, or gives no sign of life.
        """
        if self._ended_for:
            raise self._death(None)
        is_new = arena is not None and arena not in self._arenas
        if arena is not None and is_new:
            self._arenas[arena] = next(_numbers)
        job = Job(
            payload=payload,
            arena=None if arena is None else self._arenas[arena],
            size=0 if arena is None else arena.size,
            is_new=is_new,
            kept=frozenset(self._arenas[known] for known in self._arenas if known.fd >= 0),
            failure=failure,
            variables=variables(),
        )
        self._is_busy = True
        try:
            with self._sending:
                self._channel.send(job)
                if arena is not None and is_new:
                    send_descriptor(self._channel, arena.fd)
        except (OSError, pickle.PicklingError) as exc:
            raise self._death(exc) from exc
        outcome: Outcome = self._receive("outcome")
        self._is_busy = False
        if outcome.is_last:
            self.is_leaving = True
        return outcome

    def _receive(
        self,
        wanted: str,
        look: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> Any:
        """The next message of a kind; log records and events on the way are handled here."""
        silent = 0.0
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
                        f"the saving process was not ready within {self._options.start_timeout:g} s"
                    )
                elif wanted == "outcome" and silent >= self._options.heartbeat_timeout:
                    raise SaveProcessError(
                        f"the saving process gave no sign of life for {silent:g} s and is ended; "
                        f"{_AFTERMATH}"
                    )
                else:
                    if not ready:  # else it is about to end
                        silent += _LOOK  # not by the clock: that runs on while both are suspended
                    look()
                    continue
            except (EOFError, OSError) as exc:
                raise self._death(exc) from exc
            if kind == "log":
                target = logging.getLogger(content.name)
                if target.isEnabledFor(content.levelno):
                    target.handle(content)
            elif kind == "event":
                emit(content)
            elif kind == "failed to start":
                raise content
            elif kind == wanted:
                return content

    def _death(self, cause: BaseException | None) -> SaveProcessError:
        self._process.join(_FAREWELL)
        code = self._process.exitcode
        if self._ended_for:
            return SaveProcessError(
                f"the saving process was ended before this save had, because {self._ended_for}; "
                "nothing of this save is visible unless it had committed"
            )
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended ({code})"
        elif not self._process.is_alive():
            how = "ended"
        elif isinstance(cause, BlockingIOError):  # what the channel's time limit raises
            how = f"did not read or write for {self._options.heartbeat_timeout:g} s"
        else:
            how = "can't be reached"
        if not self.is_ready:
            return SaveProcessError(
                f"the saving process {how} before it was ready; it says why on standard error. A "
                "training script must guard its entry with if __name__ == '__main__'",
                cause=cause,
            )
        return SaveProcessError(
            f"the saving process {how}; {_AFTERMATH}",
            cause=cause,
        )

    def end(self, timeout: float, why: str) -> None:
        """Ends the process: by request within ``timeout`` seconds, else by force.

        Both who closes the saver and the thread of a save that fails may do so.

        Args:
            timeout: Seconds.
            why: For the saves that fail by it.
        """
        self._ended_for = self._ended_for or why
        with self._ending:
            if timeout > 0 and self.tell(END):
                self._process.join(timeout)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(_FAREWELL)
            self._channel.close()
            self._at_exit.cancel()

    def _end_at_exit(self) -> None:
        """Before its server is ended, and it with that."""
        if self._is_busy:
            self._process.terminate()
            self._process.join(self._options.close_timeout)
        self.end(0, "the trainer has ended")
