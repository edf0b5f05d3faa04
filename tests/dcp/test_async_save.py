"""``async_save`` in a thread and in a process, on one rank and on two."""

import os
import traceback
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, _async_process_executor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import cloudckpt
from cloudckpt.errors import CheckpointExistsError, RanksFailedError

from .layouts import Layout, spread
from .places import Place
from .values import assert_same, blank_like, numbered

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
_PATIENCE = 150.0  # seconds


class Refusing(DefaultSavePlanner):
    """Fails on the last rank, when its data is asked for."""

    def resolve_data(self, write_item):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("the dog ate it")
        return super().resolve_data(write_item)


def _state(step: int) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Layout((world,), (dist.tensor.Shard(0),))
    return {
        **spread({"sharded": numbered(101, 400, first=step)}, layout),
        f"of rank {rank}": numbered(30, first=step),
        "step": step,
        f"list {rank}": [rank, "x"],
    }


def _check(step: int, place: Place) -> None:
    state = _state(step)
    loaded = {**blank_like({k: v for k, v in state.items() if k != "sharded"})}
    whole = {"sharded": torch.zeros(101, 400)}
    cloudckpt.load({**loaded, **whole}, checkpoint_id=place.uri, config=place.config)
    cloudckpt.load(loaded, checkpoint_id=place.uri, config=place.config)
    assert_same(loaded, {k: v for k, v in state.items() if k != "sharded"})
    assert_same(whole["sharded"], numbered(101, 400, first=step))


def _save(state: dict, place: Place, kind, **options) -> Future:
    return cloudckpt.async_save(
        state,
        checkpoint_id=place.uri,
        config=place.config,
        async_checkpointer_type=kind,
        **options,
    )


# Each check runs on all ranks, one after the other in one launch: a process that saves is costly.


def serves_torch_with_our_writer(place: Place, kind) -> None:
    future = dcp.async_save(_state(6), storage_writer=place.writer(), async_checkpointer_type=kind)
    assert isinstance(future.result(_PATIENCE), Metadata)
    _check(6, place)


def takes_a_stager_of_the_callers(place: Place, kind) -> None:
    stager = DefaultStager(StagingOptions(False, True, False, False))
    for step in (7, 8):
        _save(_state(step), place, kind, async_stager=stager).result(_PATIENCE)
        _check(step, place)
    stager.close()


def takes_an_asynchronous_stager(place: Place, kind) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    response = _save(_state(9), place, kind, async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result(_PATIENCE)
    assert isinstance(response.upload_completion.result(_PATIENCE), Metadata)
    _check(9, place)
    stager.close()


def refuses_to_overwrite_on_every_rank(place: Place, kind) -> None:
    _save(_state(1), place, kind).result(_PATIENCE)
    dist.barrier()
    before = place.names()
    error = _save(_state(2), place.having(overwrite=False), kind).exception(_PATIENCE)
    assert isinstance(error, CheckpointExistsError), repr(error)
    dist.barrier()
    assert place.names() == before
    _check(1, place)


def tells_every_rank_why_one_failed_and_saves_again(place: Place, kind) -> None:
    error = _save(_state(1), place, kind, planner=Refusing()).exception(_PATIENCE)
    assert isinstance(error, RanksFailedError), repr(error)
    assert "ArithmeticError: the dog ate it" in str(error)
    assert f"rank {dist.get_world_size() - 1}" in str(error)
    dist.barrier()
    assert place.names() == []
    assert place.unfinished() == []
    dist.barrier()
    _save(_state(2), place, kind).result(_PATIENCE)
    _check(2, place)


CHECKS = [
    serves_torch_with_our_writer,
    takes_a_stager_of_the_callers,
    takes_an_asynchronous_stager,
    refuses_to_overwrite_on_every_rank,
    tells_every_rank_why_one_failed_and_saves_again,
]


def _run_all(place: Place, kind) -> dict[str, str]:
    """What went wrong, by check."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where the saving processes meet
    found = {}
    try:
        for check in CHECKS:
            wrong = None
            try:
                check(place.at(check.__name__), kind)
            except Exception:  # noqa: BLE001 - told by the test of this check
                wrong = traceback.format_exc()
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, wrong)
            if any(everywhere):
                found[check.__name__] = "\n".join(filter(None, everywhere))
    finally:
        del os.environ["MASTER_ADDR"]
        _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it
    return found


_found: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize(
    ("kind", "world"),
    [(THREAD, 1), (THREAD, 2), (PROCESS, 2)],
    ids=["thread-one rank", "thread-two ranks", "process-two ranks"],
)
def test_async_save(kind, world, check, places, ranks):
    if (kind, world) not in _found:
        _found[kind, world] = ranks(world, _run_all, places("s3"), kind, deadline=280)[0]
    wrong = _found[kind, world].get(check)
    if wrong is not None:
        del _found[kind, world]  # the next test has a launch of its own
        raise AssertionError(wrong)
