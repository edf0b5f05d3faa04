"""Jobs whose trainers are killed, when a step was staged or later, and the jobs after them."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from background.waiting import eventually, processes_of
from cloudckpt import CheckpointManager, Config, per_rank
from cloudckpt.background.process import _Worker
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.runs import Preemption
from support.forks import together

__all__ = ["Killing", "job", "settled", "values_at"]

ROWS = 12  # which 1, 2, 3 and 4 ranks divide


class Killing(CommitHook):
    """Kills its trainer before the commit of a step: all was sent, and nobody knows of it."""

    def __init__(self, step: int, mark: Path) -> None:
        self._end, self._mark = f"step-{step}", mark

    def before_commit(self, uri: str, metadata: object) -> None:
        if uri.endswith(self._end):
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def values_at(step: int) -> dict[str, Any]:
    """What a state holds after a step, on one rank."""
    weight = torch.arange(ROWS * 5000, dtype=torch.float32).view(ROWS, 5000) + step
    return {"weight": weight, "bias": torch.full((7,), float(step)), "log": list(range(step))}


def job(
    folder: Path | str, world: int = 1, *, run: str | None = None, **given: Any
) -> list[tuple[int, Any]]:
    """Exit codes, and of each rank the step that it restored and whether all it has is of that.

    Args:
        folder: Where the ranks meet.
        world: Their number.
        run: The run; default: one in the folder.
        given: What ``_rank`` takes.
    """
    family = uuid.uuid4().hex
    of_all = {"folder": str(folder), "family": family, "world": world, **given}
    of_all["run"] = run if run is not None else f"{folder}/run"
    ended = together(_rank, [{"rank": rank, **of_all} for rank in range(world)])
    _families.append(family)
    return ended


_families: list[str] = []


def settled() -> bool:
    """Whether all saving processes of the jobs so far have ended; they are waited for."""
    return eventually(lambda: not any(map(processes_of, _families)))


def _rank(
    folder: str,
    family: str,
    rank: int,
    world: int,
    run: str,
    last: int = 0,
    dies_at: int | None = None,
    how: str = "at once",
    victims: Collection[int] = range(4),
    delay: float = 0.0,
    kind: str = "PROCESS",
    differs: bool = False,
    config: Config | None = None,
    **options: Any,
) -> tuple[int | None, bool]:
    """Trains.

    Args:
        folder: Where the ranks meet.
        family: What tells this job's processes from others.
        rank: The number of this one.
        world: How many there are.
        run: The run.
        last: The last step; each that is due is saved.
        dies_at: The step behind which ranks are killed.
        how: ``at once``, when its saving process has all of it; ``at its commit``; or ``soon``,
            when it trains on, but not before its first save.
        victims: The ranks that are killed, if that is ``soon``.
        delay: Seconds until then.
        kind: What saves: ``SYNC``, ``THREAD`` or ``PROCESS``.
        differs: Whether ranks save different values under one name.
        config: The options.
        options: Of the manager.
    """
    os.environ.update(FAMILY=family, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{family}", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    state = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if name == "weight" else value
        for name, value in values_at(0).items()
    }
    state["own"] = own = per_rank(rank)
    mark = Path(folder, f"{family}-commits")
    handed_over, killer = _hand_overs(), threading.Timer(delay, os.kill, (os.getpid(), 9))
    has_saved = False
    hook = Killing(dies_at, mark) if dies_at is not None and how == "at its commit" else None
    with CheckpointManager(
        run,
        preemption=Preemption(signals=()),
        asynchronous=kind != "SYNC",
        checkpointer=CheckpointerConfig(
            commit_hook=hook,
            config=config if config is not None else Config(),
            kind=AsyncCheckpointerType["PROCESS" if kind == "SYNC" else kind],
        ),
        **options,
    ) as manager:
        restored = manager.restore(state)
        saved = {old: 100 + old for old in own.all}
        is_right = _is_at(state, restored or 0) and own.all == saved
        is_right = is_right and own.value == saved.get(rank, rank)
        for step in range((restored or 0) + 1, last + 1):
            dist.barrier()
            for name, value in values_at(step).items():
                if name == "weight":
                    state[name].to_local().copy_(
                        distribute_tensor(value, mesh, [Shard(0)]).to_local()
                    )
                else:
                    state[name] = value
            own.value = 100 + rank  # the same in all steps
            if differs and step == dies_at:
                state["bias"] = torch.full((7,), float(rank))
            is_saved = manager.save(step, state)
            if how == "soon":
                if is_saved and not has_saved:
                    manager.wait_until_finished()  # saving processes wait for others that are late
                    has_saved = True
                if has_saved and rank in victims and step >= (dies_at or last) and not killer.ident:
                    killer.start()
                continue
            if step == dies_at:
                if how == "at its commit":
                    assert eventually(mark.exists)
                    time.sleep(60 if rank == 0 else 0.5)
                assert handed_over.acquire(timeout=60)
                os.kill(os.getpid(), signal.SIGKILL)
            manager.wait_until_finished()
            assert kind != "PROCESS" or not is_saved or handed_over.acquire(timeout=60)
    if killer.ident:
        killer.join()
    return restored, is_right


def _hand_overs() -> threading.Semaphore:
    """Released each time that this process has given a save to its saving process."""
    given, begin = threading.Semaphore(0), _Worker.begin

    def noted(*args: Any) -> None:
        begin(*args)
        given.release()

    _Worker.begin = noted  # type: ignore[method-assign]
    return given


def _is_at(state: dict[str, Any], step: int) -> bool:
    expected = values_at(step)
    weight = state["weight"]
    assert isinstance(weight, DTensor)
    return (
        torch.equal(weight.full_tensor(), expected["weight"])
        and torch.equal(state["bias"], expected["bias"])
        and state["log"] == expected["log"]
    )
