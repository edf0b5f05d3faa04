"""The trainer's side of the saving process: starts it, replaces it, and waits for its saves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
import weakref
from datetime import timedelta
from multiprocessing import connection as channels
from multiprocessing import reduction
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cloudckpt.background.arena import Arena
from cloudckpt.background.handoff import pack
from cloudckpt.background.worker import Job, Outcome, Settings, main
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import CloudCheckpointError, ProcessGroupError, SaveProcessError
from cloudckpt.events.event import emit

__all__ = ["SaveProcess"]

logger = logging.getLogger("cloudckpt")

_LOOK = 1.0  # seconds between two looks whether the saving process is alive
_FAREWELL = 5.0  # seconds for it to end by itself
_ROUNDS = 3  # tries of a save that no rank had begun

_numbers = itertools.count()


class SaveProcess:
    """A process beside this rank that carries out its saves, one after the other.

    The processes of all ranks have a process group of their own (gloo), so that neither planning
    nor coordination uses the trainer's interpreter. When one of them dies, all of them are
    replaced: they meet again under the next *generation*, a number kept in a store that lives in
    the first rank's trainer.

    Constructing it is a collective call for the ranks of ``group``; the process starts in the
    background.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, options: BackgroundOptions, *, arenas: int = 1
    ) -> None:
        """
        Args:
            group: The ranks that save together; None for this process alone.
            options: See there.
            arenas: Most staged copies that are used in turn.
        """
        self._options = options
        self._arenas = arenas
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world = 1 if group is None else dist.get_world_size(group)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        if group is not None:
            self._store, self._address = _meeting_place(group, options)
        self._generation = 0
        self._child: _Child | None = None
        self._closed = False
        self._lock = threading.Lock()
        with self._lock:
            self._start(0)

    def save(
        self,
        number: int,
        state_dict: dict[str, Any],
        arena: Arena | None,
        others: object,
        failure: CloudCheckpointError | None = None,
    ) -> bytes:
        """Carries out a save; returns the pickled metadata and what was transferred.

        Args:
            number: Counted alike on all ranks.
            state_dict: The staged state dict.
            arena: Where it is.
            others: The writer, the planner and how to save.
            failure: Why this rank can't take part; the other ranks are told.

        Raises:
            SaveProcessError: If the process died or did not start.
            CloudCheckpointError: The failure of the save.
        """
        payload = b""
        if failure is None:
            try:
                payload = pack(state_dict, others, arena)
            except CloudCheckpointError as error:
                failure = error
        for attempt in itertools.count(1):
            try:
                child = self._current()
                outcome = child.carry_out(number, payload, arena, failure)
            except SaveProcessError:
                self._replace()
                raise
            if outcome.result is not None:
                return outcome.result
            if outcome.superseded:
                raise SaveProcessError(
                    "another rank's saving process died in this save, and the others went on"
                )
            reason = outcome.error or SaveProcessError("the saving process gave no reason")
            if outcome.begun:
                if isinstance(reason, ProcessGroupError):
                    self._replace()
                raise reason
            self._replace()  # no rank has begun: the processes that are left meet again
            if attempt == _ROUNDS:
                raise SaveProcessError(
                    "the saving processes of the ranks lost each other", cause=reason
                ) from reason
        raise AssertionError("unreachable")

    def close(self, timeout: float) -> None:
        """Ends the process, at once if it does not end in time."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end(timeout)

    @property
    def pid(self) -> int | None:
        """The process, if it is there."""
        child = self._child
        return None if child is None else child.pid

    def _current(self) -> _Child:
        """The process of the current generation; a new one if the old one belongs to the past."""
        child = self._child
        if child is not None and not child.is_alive():
            self._replace()  # those of the other ranks have lost it, too
        generation = self._agreed_generation()
        with self._lock:
            if self._child is None or generation != self._generation:
                self._start(generation)
            assert self._child is not None
            return self._child

    def _start(self, generation: int) -> None:
        if self._closed:
            raise SaveProcessError("the saver was closed")
        if self._child is not None:
            self._child.end(0)
        self._generation = generation
        self._child = _Child(
            Settings(
                trainer=os.getpid(),
                rank=self._rank,
                world=self._world,
                arenas=self._arenas,
                store=self._address,
                generation=generation,
                nice=self._options.nice,
                start_timeout=self._options.start_timeout,
                collective_timeout=self._options.collective_timeout,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
        )

    def _agreed_generation(self) -> int:
        if self._store is None:
            return self._generation
        try:
            return int(self._store.get(_GENERATION))
        except Exception as exc:
            raise SaveProcessError(
                "the first rank's trainer, at which the saving processes meet, does not answer",
                cause=exc,
            ) from exc

    def _replace(self) -> None:
        """Asks all ranks for new processes; this rank's starts at once, to meet the others."""
        with self._lock, contextlib.suppress(Exception):
            if self._child is not None:
                self._child.end(0)
                self._child = None
            old = self._generation
            if self._store is None:
                self._generation += 1
            else:
                # only one of those who ask for it advances it
                self._store.compare_set(_GENERATION, str(old), str(old + 1))
                self._generation = int(self._store.get(_GENERATION))
            self._start(self._generation)


_GENERATION = "cloudckpt/generation"


def _meeting_place(
    group: dist.ProcessGroup, options: BackgroundOptions
) -> tuple[TCPStore, tuple[str, int]]:
    """A store in the first rank's trainer, and where the processes of all ranks reach it."""
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    host = "127.0.0.1" if len(set(hosts)) == 1 else _host_of_first(group)
    first = dist.get_global_rank(group, 0)
    found: list[Any] = [None]
    store: TCPStore | None = None
    timeout = timedelta(seconds=options.start_timeout)
    if dist.get_rank(group) == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        store.set(_GENERATION, "0")
        found = [(host, store.port)]
    dist.broadcast_object_list(found, src=first, group=group)
    address: tuple[str, int] = found[0]
    if store is None:
        store = TCPStore(*address, timeout=timeout)
    return store, address


def _host_of_first(group: dist.ProcessGroup) -> str:
    """A name of this machine that other machines know; only the first rank's is used."""
    known = os.environ.get("MASTER_ADDR") if dist.get_global_rank(group, 0) == 0 else None
    return known or socket.getfqdn()


class _Child:
    """One process, from its start to its end."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._timeout = settings.start_timeout
        self._ready = False
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

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def carry_out(
        self,
        number: int,
        payload: bytes,
        arena: Arena | None,
        failure: CloudCheckpointError | None,
    ) -> Outcome:
        """Sends a job and waits for its outcome.

        Raises:
            SaveProcessError: If the process ends before, or is not ready in time.
        """
        if not self._ready:
            self._receive("ready", time.monotonic() + self._timeout)
            self._ready = True
        is_new = arena is not None and arena not in self._arenas
        if arena is not None and is_new:
            self._arenas[arena] = next(_numbers)
        job = Job(
            number=number,
            payload=payload,
            arena=None if arena is None else self._arenas[arena],
            size=0 if arena is None else arena.size,
            is_new=is_new,
            failure=failure,
        )
        try:
            self._channel.send(job)
            if arena is not None and is_new:
                reduction.send_handle(self._channel, arena.fd, self._process.pid)
        except (OSError, pickle.PicklingError) as exc:
            raise self._death(exc) from exc
        outcome: Outcome = self._receive("outcome", None)
        return outcome

    def _receive(self, wanted: str, deadline: float | None) -> Any:
        """The next message of a kind; log records and events on the way are handled here."""
        while True:
            channels.wait([self._channel, self._process.sentinel], timeout=_LOOK)
            try:
                if self._channel.poll():
                    kind, content = self._channel.recv()
                elif not self._process.is_alive():
                    raise self._death(None)
                elif deadline is not None and time.monotonic() > deadline:
                    raise SaveProcessError(
                        f"the saving process was not ready within {self._timeout:g} s"
                    )
                else:
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
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended ({code})"
        return SaveProcessError(
            f"the saving process {how}; nothing of this save is visible unless it had committed, "
            "and the next save starts a new one",
            cause=cause,
        )

    def end(self, timeout: float) -> None:
        """Ends the process: by request within ``timeout`` seconds, else by force."""
        with contextlib.suppress(OSError, ValueError):
            if timeout > 0:
                self._channel.send(None)
                self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_FAREWELL)
        self._channel.close()
