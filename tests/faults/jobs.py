"""What children do."""

import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CheckpointManager, Config
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.runs import Preemption
from cloudckpt.stores.http import options as http

from .states import filled


def _outcome(action: Any) -> dict[str, Any]:
    """What came of it: the error's class and text, and the threads that stay behind."""
    http.LONGER = 1  # as in the tests, whose patches reach no child
    error: BaseException | None = None
    try:
        action()
    except BaseException as exc:  # noqa: BLE001 - the test looks at it
        error = exc
    return {
        "error": None if error is None else type(error).__name__,
        "committed": getattr(error, "committed", None),
        "text": str(error),
        "threads": _threads_that_stay(),
    }


def _threads_that_stay() -> list[str]:
    """The threads of cloudckpt that do not end soon, but for the watch over connections."""
    patience = time.monotonic() + 5.0  # one that was just begun has to find out that all is over
    while True:
        names = [thread.name for thread in threading.enumerate()]
        names = [n for n in names if n.startswith("cloudckpt") and n != "cloudckpt-watch"]
        if not names or time.monotonic() > patience:
            return names
        time.sleep(0.01)


def save(uri: str, config: Config, step: int, nbytes: int) -> dict[str, Any]:
    """One save."""
    state = filled(step, nbytes)
    return _outcome(lambda: cloudckpt.save(state, checkpoint_id=uri, config=config))


ROADS = ("save", "THREAD", "PROCESS", "incremental", "manager")
"""The ways to save a state to a location."""


def save_by(road: str, run: str, config: Config, step: int, nbytes: int) -> dict[str, Any]:
    """Saves step 1 beside the location, then ``step`` to it, by a plan that is known then."""
    if road == "incremental":
        config = replace(config, incremental=True)
    kind = AsyncCheckpointerType.THREAD if road == "THREAD" else AsyncCheckpointerType.PROCESS

    def save(number: int) -> None:
        state, place = filled(number, nbytes), f"{run}/step-{number}"
        if road == "save":
            cloudckpt.save(state, checkpoint_id=place, config=config)
        else:
            cloudckpt.async_save(
                state, checkpoint_id=place, config=config, async_checkpointer_type=kind
            ).result(150)

    if road != "manager":
        save(1)
        return _outcome(lambda: save(step))
    options = {"save_interval_steps": 1, "preemption": Preemption(signals=())}
    with CheckpointManager(run, checkpointer=CheckpointerConfig(config=config), **options) as one:
        one.save(1, filled(1, nbytes))
        one.wait_until_finished()

        def save_and_wait() -> None:
            one.save(step, filled(step, nbytes), force=True)
            one.wait_until_finished()

        return _outcome(save_and_wait)


def load(uri: str, config: Config, nbytes: int) -> dict[str, Any]:
    """One load."""
    state = filled(-1, nbytes)
    return _outcome(lambda: cloudckpt.load(state, checkpoint_id=uri, config=config))


def save_on_and_on(
    uri: str, config: Config, first: int, nbytes: int, in_background: bool = False
) -> None:
    """Saves step after step until it is killed; ``{step}`` in the URI is replaced."""
    for step in range(first, first + 1000):
        given = {"checkpoint_id": uri.format(step=step), "config": config}
        if in_background:
            kind = AsyncCheckpointerType.PROCESS
            cloudckpt.async_save(
                filled(step, nbytes), async_checkpointer_type=kind, **given
            ).result(150)
        else:
            cloudckpt.save(filled(step, nbytes), **given)


def save_to_disk_until(uri: str, nbytes: int, fatal: int) -> None:
    """Saves step after step, and kills itself before a system call that changes the disk."""
    calls = itertools.count()

    def deadly(call: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return wrapped

    for name in ("link", "replace", "unlink", "fsync", "pwritev"):
        setattr(os, name, deadly(getattr(os, name)))
    committed = Path(f"{uri}.committed")
    committed.write_text("0")
    for step in range(1, 1000):
        cloudckpt.save(filled(step, nbytes), checkpoint_id=uri)
        with committed.open("a") as log:
            log.write(f" {step}")


def save_as_rank(
    rank: int,
    rendezvous: str,
    uri: str,
    config: Config,
    step: int,
    nbytes: int,
    background: bool = False,
) -> dict[str, Any]:
    """One save of two ranks over gloo, each with an item of its own.

    Another one to the local disk comes first, so that this one goes by its plan.
    """
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    state = {f"{name}.{rank}": value for name, value in filled(step, nbytes).items()}

    def save(place: str) -> None:
        if background:
            cloudckpt.async_save(state, checkpoint_id=place, config=config).result(150)
        else:
            cloudckpt.save(state, checkpoint_id=place, config=config)

    save(f"{rendezvous}-before")
    return _outcome(lambda: save(uri))
