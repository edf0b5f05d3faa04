"""Ranks that call what others do not call: whoever waits says for whom, and how to mend it."""

import contextlib
import gc
import logging
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from background.waiting import eventually
from cloudckpt.checkpoint.torch_private import store_of_group
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig
from cloudckpt.dcp import meeting as arrivals

SOON = 1.5  # seconds until a rank that waits says so; a rank comes late once all that wait have
PATIENT = 30.0  # and of the ranks that nobody keeps waiting


@contextlib.contextmanager
def lines(folder, first_line=SOON):
    """What is logged about ranks that have not come; the first line comes sooner than usual."""
    found = []

    def emit(record):
        found.append(record.getMessage())
        Path(folder, f"said-{dist.get_rank()}").touch()

    handler = logging.Handler()
    handler.emit = emit
    logger = logging.getLogger("cloudckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "FIRST_LINE", first_line)
        patch.setattr(arrivals, "_MARKED_AFTER", 0.1)
        logger.addHandler(handler)
        try:
            yield found
        finally:
            logger.removeHandler(handler)


def come_late(folder, waiting=1):
    """Waits until so many ranks have said that they wait."""
    assert eventually(lambda: len(list(Path(folder).glob("said-*"))) >= waiting, 100)


def state():
    return {"weights": torch.ones(100), "step": 3}


def _save(folder, group):
    cloudckpt.save(state(), checkpoint_id=f"{folder}/saved", process_group=group)


def _load(folder, group):
    cloudckpt.load(state(), checkpoint_id=f"{folder}/there", process_group=group)


def _async_save(folder, group):
    cloudckpt.async_save(state(), checkpoint_id=f"{folder}/saved", process_group=group).result()
    cloudckpt.checkpointer.close_async_savers()


CALLS = {"cloudckpt.save": _save, "cloudckpt.load": _load, "cloudckpt.async_save": _async_save}


def _call(name, folder, late, members=None):
    """Calls a function on ranks of which some come late; what the rank has logged."""
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return []
    is_late = dist.get_rank() in late
    with lines(folder, PATIENT if is_late else SOON) as found:
        if is_late:
            come_late(folder, len(members or range(dist.get_world_size())) - len(late))
        CALLS[name](folder, group)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_waits_says_which_ranks_have_not_come(ranks, tmp_path, name):
    cloudckpt.save(state(), checkpoint_id=f"{tmp_path}/there", no_dist=True)
    first, *others = ranks(3, _call, name, tmp_path, (1, 2))
    assert others == [[], []]
    assert first
    assert first[0].startswith(f"{name}: rank 0 has waited for ")
    assert "ranks 1-2 have not called it" in first[0]
    assert "`if rank == 0:`" in first[0]


def _make_checkpointer(folder):
    """Over the store of most jobs, whose client serves one call at a time."""
    rank, port = dist.get_rank(), Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port.write_text(str(store.port))
    dist.barrier()
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with lines(folder, PATIENT if rank == 1 else SOON) as found:
        if rank == 1:
            come_late(folder)
        AsyncCheckpointer(CheckpointerConfig(kind=AsyncCheckpointerType.THREAD)).close()
    dist.barrier()  # the store ends with its rank
    return found


def test_a_rank_that_makes_a_checkpointer_alone_says_which_has_not_come(ranks, tmp_path):
    first, late = ranks(2, _make_checkpointer, tmp_path)
    assert late == []
    assert first[0].startswith("AsyncCheckpointer(): rank 0 has waited for ")


def test_ranks_of_a_group_are_named_as_in_the_job(ranks, tmp_path):
    outside, first, late = ranks(3, _call, "cloudckpt.save", tmp_path, (2,), (1, 2))
    assert outside == late == []
    assert "rank 1 has waited for" in first[0]
    assert "rank 2 has not called it" in first[0]


def _slow_at_first(folder):
    class Slow:
        def state_dict(self):
            if dist.get_rank() == 0:  # meanwhile the other one is to look for it
                time.sleep(1.5 * first_line)
            return state()

        def load_state_dict(self, found):
            assert found["step"] == 3

    first_line = 2.5  # long after each has left a mark
    with lines(folder, first_line) as found:
        cloudckpt.save({"slow": Slow()}, checkpoint_id=f"{folder}/saved")
        cloudckpt.load({"slow": Slow()}, checkpoint_id=f"{folder}/saved")
    return found


def test_nothing_is_said_of_ranks_that_have_come_and_are_slow(ranks, tmp_path):
    assert ranks(2, _slow_at_first, tmp_path) == [[], []]


def _marks_after_a_wait(folder):
    is_late = dist.get_rank() == 1
    with lines(folder, PATIENT if is_late else SOON):
        if is_late:
            come_late(folder)
        _save(folder, None)
        store = store_of_group(dist.group.WORLD)
        marks = [f"cloudckpt/cloudckpt.save/{rank}" for rank in range(2)]
        return eventually(lambda: not any(store.check([mark]) for mark in marks), 60)


def test_a_wait_that_is_over_leaves_no_mark(ranks, tmp_path):
    assert ranks(2, _marks_after_a_wait, tmp_path) == [True, True]


_ENDS_WHILE_A_STORE_IS_ASKED = """
import datetime, sys, time
import torch.distributed as dist
from cloudckpt.dcp import meeting as arrivals

arrivals._MARKED_AFTER = arrivals.FIRST_LINE = 0.01
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Slow:
    def set(self, *given):
        dist.HashStore().wait(["what nobody writes"], datetime.timedelta(seconds=2))

arrivals.store_of_group = lambda group: Slow()

@arrivals.collective("call")
def call():
    with arrivals.all_expected(dist.group.WORLD):
        time.sleep(0.5)

call()
"""
_ENDS_AFTER_A_COLLECTIVE = """
import pathlib, sys, time, weakref
import torch, torch.distributed as dist
import cloudckpt.dcp.meeting

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
tasks = pathlib.Path("/proc/self/task")
while sum("pt_gloo" in one.read_text() for one in tasks.glob("*/comm")) < 2:
    time.sleep(0.01)  # they have begun
sys.setswitchinterval(10)  # the thread of gloo gets the GIL only when this one waits

def work(_):
    sys.setswitchinterval(0.001)
    until = time.monotonic() + 1.5  # as if it got the CPU late
    while time.monotonic() < until:
        pass

tensor = torch.ones(1)
kept = weakref.ref(tensor, work)
task = dist.all_reduce(tensor, async_op=True)
del tensor, task
"""


_EACH_IN_A_FORK = """
import os, sys
import torch.distributed, cloudckpt.dcp.meeting

for script in sys.argv[1:]:
    if not (child := os.fork()):
        exec(script)
        sys.exit()
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"{status} by {script}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are asked for by /proc")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python ends no thread there")
def test_an_interpreter_ends_whatever_threads_of_torch_still_do():
    scripts = [_ENDS_WHILE_A_STORE_IS_ASKED, _ENDS_AFTER_A_COLLECTIVE]
    command = [sys.executable, "-c", _EACH_IN_A_FORK, *scripts]
    ended = subprocess.run(command, capture_output=True, timeout=250)
    assert (ended.returncode, b"terminate called" in ended.stderr) == (0, False), ended.stderr


def _is_freed(folder):
    """Whether a group is freed when it is destroyed, right after the ranks have saved with it."""
    group = dist.new_group()
    config = cloudckpt.Config(incremental=True)
    for step in (1, 2):
        where = f"{folder}/step-{step}"
        cloudckpt.save(state(), checkpoint_id=where, process_group=group, config=config)
    dist.barrier(group)
    kept = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return kept() is None


def test_a_group_is_freed_when_it_is_destroyed(ranks, tmp_path):
    """Its end may take long: no thread of ours may have to wait for it, nor hold a lock then."""
    assert ranks(2, _is_freed, tmp_path) == [True, True]


def _stores_asked(folder):
    """Requests to the group's store by a save to which all come."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "store_of_group", asked.append)
        _save(folder, None)
    return len(asked)


def test_a_call_to_which_all_come_asks_the_store_nothing(ranks, tmp_path):
    assert ranks(2, _stores_asked, tmp_path) == [0, 0]
