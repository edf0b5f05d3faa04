"""The saving processes of all ranks, seen from their trainers: started, replaced, in step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cloudckpt.background.arena import Arena
from cloudckpt.background.child import Child
from cloudckpt.background.handoff import pack
from cloudckpt.background.worker import Settings
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import CloudCheckpointError, ProcessGroupError, SaveProcessError
from cloudckpt.stores.base import random_suffix

__all__ = ["SaveProcess", "log_levels"]

logger = logging.getLogger("cloudckpt")

_ROUNDS = 3  # tries of a save that no rank had begun


class SaveProcess:
    """A process beside this rank that carries out its saves, one after the other.

    The processes of all ranks have a process group of their own (gloo), so that neither planning
    nor coordination uses the trainer's interpreter. When one of them dies, all of them are
    replaced: they meet again under the next *generation*, a number kept in a store that lives in
    the first rank's trainer.

    Constructing it is a collective call for the ranks of ``group``; the process starts in the
    background.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: BackgroundOptions) -> None:
        """
        Args:
            group: The ranks that save together; None for this process alone.
            options: See there.
        """
        self._options = options
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world = 1 if group is None else dist.get_world_size(group)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        if group is not None:
            self._store, self._address = _meeting_place(group, options)
        self._generation = 0
        self._child: Child | None = None
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
                child.wait_until_ready(lambda: self._look(number, among_the_new=True))
                self._look(number)
                outcome = child.carry_out(
                    number, payload, arena, failure, lambda: self._look(number)
                )
            except _InVainError as vain:
                if vain.retry:
                    continue
                if child.is_busy:
                    self._replace()
                raise SaveProcessError(
                    "the saving process of another rank died in this save", cause=str(vain)
                ) from None
            except Exception as error:
                self._give_up(number, error)
                self._replace()  # it may still read the staged copy, which the next save writes to
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
            if attempt >= _ROUNDS:
                lost = SaveProcessError(
                    "the saving processes of the ranks lost each other", cause=reason
                )
                self._give_up(number, lost)
                raise lost from reason
        raise AssertionError("unreachable")

    def close(self, timeout: float) -> None:
        """Ends the process, at once if it does not end in time."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.end(timeout)
            self._child = None  # not before: an interrupt leaves it for the next call

    @property
    def pid(self) -> int | None:
        """The process, if it is there."""
        child = self._child
        return None if child is None else child.pid

    def _current(self) -> Child:
        """The process of the current generation; a new one if the old one belongs to the past."""
        child = self._child
        if child is not None and (child.is_busy or child.is_leaving or not child.is_alive()):
            self._replace()  # those of the other ranks have lost it, too
        generation = self._agreed_generation()
        with self._lock:
            if self._closed or self._child is None or generation != self._generation:
                self._start(generation)
            assert self._child is not None
            return self._child

    def _start(self, generation: int) -> None:
        if self._closed:
            raise SaveProcessError("the saver was closed")
        if self._child is not None:
            self._child.end(0)
        self._generation = generation
        self._child = Child(
            Settings(
                trainer=os.getpid(),
                rank=self._rank,
                world=self._world,
                store=self._address,
                generation=generation,
                nice=self._options.nice,
                io_priority=self._options.io_priority,
                start_timeout=self._options.start_timeout,
                collective_timeout=self._options.collective_timeout,
                heartbeat_timeout=self._options.heartbeat_timeout,
                log_levels=log_levels(),
            ),
            self._options.close_timeout,
        )

    def _agreed_generation(self) -> int:
        if self._store is None:
            return self._generation
        try:
            return int(self._store.get(_GENERATION))
        except Exception as exc:
            raise _unreachable(exc) from exc

    def _give_up(self, number: int, error: Exception) -> None:
        """Tells the other ranks, which may wait for this one to begin."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(f"{_GIVEN_UP}/{number}", str(error))

    def _look(self, number: int, *, among_the_new: bool = False) -> None:
        """Whether it is of use to wait for the other ranks.

        Raises:
            _InVainError: If one has given up this save, or (among new processes) if they meet
                under a later generation.
        """
        if self._store is None:
            return
        key = f"{_GIVEN_UP}/{number}"
        try:
            reason = self._store.get(key).decode() if self._store.check([key]) else None
        except Exception as exc:
            raise _unreachable(exc) from exc
        if reason is not None:
            raise _InVainError(reason)
        if among_the_new and self._agreed_generation() != self._generation:
            raise _InVainError("they have been replaced again", retry=True)

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


def log_levels() -> dict[str, int]:
    """The levels of loggers that somebody has set; that of the root under the empty name."""
    named = list(logging.Logger.manager.loggerDict.items())
    levels = {name: known.level for name, known in named if isinstance(known, logging.Logger)}
    return {
        "": logging.getLogger().level,
        **{name: level for name, level in levels.items() if level != logging.NOTSET},
    }


_GENERATION = "cloudckpt/generation"
_GIVEN_UP = "cloudckpt/given-up"
_TOKEN = "cloudckpt/token"  # noqa: S105 - no secret
_LOOPBACK = "127.0.0.1"
_ADDRESS_TIMEOUT = 10.0  # seconds to reach an address


class _InVainError(Exception):
    """The other ranks will not come to this save, or are elsewhere."""

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


def _unreachable(cause: Exception) -> SaveProcessError:
    return SaveProcessError(
        "the first rank's trainer, at which the saving processes meet, does not answer", cause=cause
    )


@dataclass(frozen=True)
class _Offer:
    """Where the first rank's trainer has its store.

    Attributes:
        machine: Its own, see :func:`_machine`.
        addresses: By which other machines may reach it, the likeliest first.
        port: Of the store.
        token: What is found there: another machine may have something else at that address.
    """

    machine: str
    addresses: Sequence[str]
    port: int
    token: str


def _meeting_place(
    group: dist.ProcessGroup, options: BackgroundOptions
) -> tuple[TCPStore, tuple[str, int]]:
    """A store in the first rank's trainer, and where this rank and its processes reach it.

    Raises:
        SaveProcessError: If this rank reaches it by none of its addresses.
    """
    timeout = timedelta(seconds=options.start_timeout)
    found: list[Any] = [None]
    store: TCPStore | None = None
    if dist.get_rank(group) == 0:
        store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        offer = _Offer(_machine(), _addresses(group), store.port, random_suffix())
        store.set(_TOKEN, offer.token)
        store.set(_GENERATION, "0")
        found = [offer]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    offer = found[0]
    if store is not None:
        return store, (_LOOPBACK, offer.port)
    here = [_LOOPBACK] if offer.machine == _machine() else []
    for address in (*here, *offer.addresses):
        if (reached := _reached(address, offer, timeout)) is not None:
            return reached, (address, offer.port)
    raise SaveProcessError(
        f"the saving processes can't meet: port {offer.port} of the first rank's machine is "
        f"reached by none of its addresses {list(offer.addresses)}. Set MASTER_ADDR to one that "
        "all machines reach, and let them reach each other's ports"
    )


def _reached(address: str, offer: _Offer, timeout: timedelta) -> TCPStore | None:
    """The store of an offer, if it is what this address leads to."""
    patience = min(_ADDRESS_TIMEOUT, timeout.total_seconds())
    found: list[TCPStore] = []

    def reach() -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # also those of torch's stores
            socket.create_connection((address, offer.port), patience).close()
            store = TCPStore(address, offer.port, timeout=timedelta(seconds=patience))
            if store.get(_TOKEN).decode() == offer.token:
                store.set_timeout(timeout)
                found.append(store)

    # a server that is no store, and says nothing, would hold torch's client for good
    thread = threading.Thread(target=reach, name="cloudckpt-meet", daemon=True)
    thread.start()
    thread.join(2 * patience)
    return found[0] if found else None


def _machine() -> str:
    """The same for processes that reach each other by the loopback address.

    Host names do not tell: those of containers are often equal.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not on Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _addresses(group: dist.ProcessGroup) -> list[str]:
    """What other machines may know this one by."""
    known: list[str] = []
    if master := os.environ.get("MASTER_ADDR"):
        if dist.get_global_rank(group, 0) == 0:
            known.append(master)
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))  # sends nothing: the kernel chooses the address of the route
            known.append(way.getsockname()[0])
    return list(dict.fromkeys((*known, socket.getfqdn(), socket.gethostname())))
