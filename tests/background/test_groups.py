"""The process groups of savers: made whatever groups a rank is in, kept, and used again."""

import contextlib
import datetime
import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import BackgroundOptions, events
from cloudckpt.background import async_save, groups
from cloudckpt.background.groups import give_back, open_group
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig
from cloudckpt.errors import ProcessGroupError
from dcp.children import in_a_child
from dcp.places import Place
from faults.states import SMALL, filled

from .saves import PATIENCE, begin, of_rank, step_at
from .waiting import eventually, open_files


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _opened(parent: dist.ProcessGroup | None = None, seconds: float = PATIENCE):
    return open_group(parent, start_timeout=seconds, collective_timeout=PATIENCE)


def _together(group: dist.ProcessGroup) -> None:
    seen = torch.tensor([1])
    dist.all_reduce(seen, group=group)
    assert seen.item() == dist.get_world_size(group)


# ---- closed and opened again


def _cycles(place: Place) -> tuple[int, int]:
    """Files and threads that many savers have added to those of the first."""
    config = place.having(background=BackgroundOptions(when_busy="skip")).config  # two groups each
    options = CheckpointerConfig(config=config, kind=AsyncCheckpointerType.THREAD)
    for cycle in range(13):
        with AsyncCheckpointer(options) as checkpointer:
            checkpointer.save(place.uri, of_rank(cycle))[1].result(PATIENCE)
        gc.collect()
        dist.barrier()
        if cycle == 0:
            before = open_files(), _threads()
    return open_files() - before[0], _threads() - before[1]


def test_twelve_savers_leave_no_more_files_and_threads_than_one(ranks, local):
    for files, threads in ranks(2, _cycles, local):
        assert files <= 1
        assert threads <= 1
    assert step_at(local, ranks=2) == 12


def _closed_in_any_order() -> list[str]:
    rank = dist.get_rank()
    both = [_opened(), _opened()]
    give_back(both[rank])  # the ranks have one free group each, and not the same
    third = _opened()
    _together(third)
    give_back(both[1 - rank])
    give_back(third)
    again = [_opened() for _ in range(3)]
    for group in again:
        _together(group)
    assert {group.group_name for group in again} == {g.group_name for g in (*both, third)}
    return [group.group_name for group in (third, *again)]


def test_ranks_that_close_in_another_order_open_the_same_group(ranks):
    first, second = ranks(2, _closed_in_any_order)
    assert first == second


def _worlds(place: Place, store: str) -> list[int]:
    """Savers that are there behind a save of each of several default groups."""
    size, rank, found = dist.get_world_size(), dist.get_rank(), list[int]()
    for number in range(3):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{store}{number}", size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=PATIENCE),
        )
        options = {"checkpoint_id": place.uri, "config": place.config}
        cloudckpt.async_save(of_rank(number), **options).result(PATIENCE)
        found.append(len(async_save._savers))
    cloudckpt.checkpointer.close_async_savers()
    dist.barrier()
    return found


def test_async_save_keeps_nothing_for_groups_that_are_gone(ranks, local, tmp_path):
    assert ranks(2, _worlds, local, str(tmp_path / "store")) == [[1, 1, 1]] * 2
    assert step_at(local, ranks=2) == 2


# ---- which ranks


def _some_of_the_ranks(place: Place) -> None:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.new_group([1, 2])  # which only the second of the pair counts among its groups
    alone = dist.new_group([rank], use_local_synchronization=True)
    for step in range(3 if rank < 2 else 0):
        with AsyncSaver(process_group=alone) as apart, AsyncSaver(process_group=pair) as both:
            own = place.at(f"of-{rank}").writer()
            apart.save(filled(step, SMALL), own).written.result(PATIENCE)
            begin(both, step, place.at("of-both")).result(PATIENCE)
            assert dist.get_process_group_ranks(both._group) == [0, 1]
        assert dist.get_world_size(_opened(alone)) == 1


def test_some_of_the_ranks_save_and_groups_of_others_are_not_mixed_up(ranks, local):
    ranks(3, _some_of_the_ranks, local)
    assert [step_at(local.at(name)) for name in ("of-0", "of-1")] == [2, 2]
    assert step_at(local.at("of-both"), ranks=2) == 2


def _absent(folder: str) -> None:
    done = os.path.join(folder, "done")
    if dist.get_rank() == 0:
        with pytest.raises(ProcessGroupError, match="did not all make a group"):
            _opened(seconds=0.3)
        open(done, "w").close()
    assert eventually(lambda: os.path.exists(done), PATIENCE)
    _together(_opened())  # when all come, it works


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(ranks, tmp_path):
    ranks(2, _absent, str(tmp_path))


# ---- forks


def test_a_child_forked_while_a_lock_is_held_can_save(local):
    """It has no thread that would ever release it."""
    locks = [async_save._lock, groups._lock, events._lock]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        in_a_child("fork", _save_in_the_background, local)
    assert step_at(local) == 1


def _save_in_the_background(place: Place) -> None:
    cloudckpt.async_save(filled(1, SMALL), checkpoint_id=place.uri, no_dist=True).result(PATIENCE)
    cloudckpt.checkpointer.close_async_savers()
