"""The saving process: takes staged copies from its trainer and saves them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cloudckpt import api
from cloudckpt.background.agreement import agree
from cloudckpt.background.arena import Arena
from cloudckpt.background.channel import as_socket, receive_descriptor
from cloudckpt.background.handoff import unpack
from cloudckpt.background.priority import stand_back
from cloudckpt.background.reports import Pulse, Sender, forward_logs
from cloudckpt.background.termination import Termination
from cloudckpt.checkpoint.torch_private import set_group_timeout
from cloudckpt.dcp.failures import portable_errors, release_frames
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import CloudCheckpointError, ProcessGroupError, SaveProcessError
from cloudckpt.events import relay
from cloudckpt.stores.credentials import take_over

__all__ = ["Job", "Outcome", "Settings", "main"]

_LOOK = 0.5  # seconds between two looks whether the trainer is alive
_BEATS = 5  # signs of life in the time in which one must come


@dataclass(frozen=True)
class Settings:
    """What a saving process is told when it starts.

    Attributes:
        trainer: The process it serves.
        rank: Of the trainer in its group.
        world: Ranks of the group.
        store: Host and port at which the processes of all ranks meet; None if there is no group.
        generation: How often they have been replaced.
        nice: By how much to yield the CPU.
        io_priority: Of its reads and writes; None leaves it as it is.
        start_timeout: Seconds to meet the others.
        collective_timeout: Seconds to wait for them in a save.
        heartbeat_timeout: Seconds in which the trainer must hear of it while it saves.
        log_levels: From which on records of a logger are sent to the trainer.
    """

    trainer: int
    rank: int
    world: int
    store: tuple[str, int] | None
    generation: int
    nice: int
    io_priority: str | int | None
    start_timeout: float
    collective_timeout: float
    heartbeat_timeout: float
    log_levels: dict[str, int]


@dataclass(frozen=True)
class Job:
    """One save.

    Attributes:
        number: Counted alike on all ranks.
        payload: See :func:`~cloudckpt.background.handoff.pack`; empty if ``failure`` is given.
        arena: The number of the arena of its tensors.
        size: Bytes of that arena, whose descriptor follows if it is a new one.
        is_new: Whether that is so.
        kept: The arenas that the trainer still has.
        failure: Why this rank can't take part.
        variables: Where the trainer's environment has credentials now.
    """

    number: int
    payload: bytes = b""
    arena: int | None = None
    size: int = 0
    is_new: bool = False
    kept: frozenset[int] = frozenset()
    failure: CloudCheckpointError | None = None
    variables: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    Attributes:
        result: The pickled metadata and what was transferred, if it succeeded.
        error: Why it failed.
        begun: Whether all ranks had agreed to begin.
        superseded: Whether other ranks have gone on to a later one.
        is_last: Whether the process ends now.
    """

    result: bytes | None = None
    error: BaseException | None = None
    begun: bool = False
    superseded: bool = False
    is_last: bool = False


def main(connection: Connection, settings: Settings) -> None:
    """Serves until the trainer says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    with as_socket(connection) as end:  # now, while no other thread uses the connection
        _work(connection, end, settings)


def _work(connection: Connection, end: socket.socket, settings: Settings) -> None:
    termination = Termination(connection)
    sender = Sender(connection)
    pulse = Pulse(sender, settings.heartbeat_timeout / _BEATS)
    threading.Thread(target=_watch, args=(settings.trainer, pulse), daemon=True).start()
    forward_logs(sender, settings.log_levels)
    relay(lambda event: sender.send("event", event))  # told by the trainer, not here, too
    stand_back(settings.nice, settings.io_priority)
    torch.set_num_threads(1)
    try:
        if settings.store is not None:
            _meet(settings)
    except Exception as error:  # noqa: BLE001 - told to the trainer
        sender.send(
            "failed to start",
            SaveProcessError("the saving processes of the ranks did not meet", cause=error),
        )
        return
    sender.send("ready", None)
    _serve(connection, end, sender, pulse, termination, settings)


def _watch(trainer: int, pulse: Pulse) -> None:
    """Tells the trainer of life, and ends this process soon after it, however that ended.

    A process that outlives its trainer could at most commit late, and the commit is conditional;
    but it would hold memory and send bytes for nobody.
    """
    while os.getppid() == trainer:
        time.sleep(min(_LOOK, pulse.interval))
        pulse.beat()
    os._exit(1)


def _meet(settings: Settings) -> None:
    assert settings.store is not None
    host, port = settings.store
    timeout = timedelta(seconds=settings.start_timeout)
    place = TCPStore(host, port, timeout=timeout)
    store = PrefixStore(f"cloudckpt/{settings.generation}", place)
    dist.init_process_group(
        "gloo", store=store, rank=settings.rank, world_size=settings.world, timeout=timeout
    )
    dist.barrier()
    set_group_timeout(timedelta(seconds=settings.collective_timeout))


def _serve(
    connection: Connection,
    end: socket.socket,
    sender: Sender,
    pulse: Pulse,
    termination: Termination,
    settings: Settings,
) -> None:
    arenas: dict[int, Arena] = {}
    while True:
        try:
            connection.poll(None)
            termination.hold()
            message = connection.recv()
            if message is None:
                return
            job: Job = message
            pulse.is_wanted = True
            if job.is_new and job.arena is not None:
                arenas[job.arena] = Arena.attach(receive_descriptor(end), job.size)
        except (EOFError, OSError):
            return
        for number in arenas.keys() - job.kept:
            arenas.pop(number).close()
        take_over(job.variables)
        outcome = _carry_out(job, arenas, settings, sender)
        if outcome.error is not None:
            release_frames(outcome.error)
        if termination.is_due:
            outcome = replace(outcome, is_last=True)
        del job, message
        gc.collect()  # cycles hold on to the staged copy, which the trainer writes to next
        pulse.is_wanted = False  # nobody would read it
        try:
            sender.send("outcome", outcome)
        except (OSError, pickle.PicklingError):
            return
        if isinstance(outcome.error, ProcessGroupError) or _is_broken(outcome):
            return  # the connections of the others end with this process, so that none waits
        termination.let_go()


def _is_broken(outcome: Outcome) -> bool:
    return outcome.error is not None and not outcome.begun and dist.is_initialized()


def _carry_out(job: Job, arenas: dict[int, Arena], settings: Settings, sender: Sender) -> Outcome:
    begun = False
    try:
        failure, others = job.failure, None
        state: dict[str, Any] = {}
        if failure is None:
            try:
                arena = None if job.arena is None else arenas[job.arena]
                state, others = unpack(job.payload, arena)
            except Exception as error:  # noqa: BLE001 - told to all ranks
                failure = SaveProcessError(
                    "the saving process can't read what it was sent: are all its classes "
                    "importable by name?",
                    cause=error,
                )
        if settings.store is not None:
            try:
                if agree(job.number, failure) == "superseded":
                    return Outcome(superseded=True)
            except CloudCheckpointError as error:
                return Outcome(error=error, begun=True)
        elif failure is not None:
            return Outcome(error=failure, begun=True)
        begun = True
        sender.send("begun", None)
        return Outcome(result=_save(state, others), begun=True)
    except BaseException as error:  # noqa: BLE001 - told to the trainer
        return Outcome(error=_portable(error), begun=begun)


def _save(state: dict[str, Any], others: Any) -> bytes:
    writer, planner, use_collectives, no_dist = others
    metadata = api.save(
        state,
        storage_writer=writer,
        planner=planner,
        use_collectives=use_collectives,
        no_dist=no_dist,
    )
    sent = writer.transferred if isinstance(writer, CloudStorageWriter) else None
    protocol = pickle.HIGHEST_PROTOCOL
    return pickle.dumps((pickle.dumps(metadata, protocol), sent), protocol)


def _portable(error: BaseException) -> BaseException:
    """The error, or its text if it can't be pickled."""
    try:
        with portable_errors(""):
            raise error
    except BaseException as made:  # noqa: BLE001 - this is what it is for
        return made
