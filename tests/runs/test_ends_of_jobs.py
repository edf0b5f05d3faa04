"""Jobs that schedulers end: what was trained is saved before, by all ranks alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import cloudckpt
from background.waiting import eventually, is_running, processes_of
from runs.jobs import train_until_told
from support.forks import child

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def job(tmp_path, request):
    """A job of two ranks under torchrun, and what saves in it; nothing of it is left behind."""
    family = uuid.uuid4().hex
    paths = filter(None, [TESTS, os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "FAMILY": family,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "runs.jobs", str(tmp_path), request.param, "SIGTERM"]
    with open(tmp_path / "log", "wb") as log:
        started = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=log, stderr=log
        )
    try:
        yield started
    finally:
        for pid in {started.pid, *processes_of(family)}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        started.wait()
        print((tmp_path / "log").read_text())


def pids(folder: Path) -> list[int]:
    """The processes of both ranks, once they train."""
    marks = [folder / "rank-0", folder / "rank-1"]
    assert eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    return [int(mark.read_text()) for mark in marks]


def saved(folder: Path) -> int:
    """The one step that both ranks have stopped at, and that is the only one in the run."""
    [step, other] = [int((folder / f"rank-{rank}-saved").read_text()) for rank in range(2)]
    assert step == other
    run = str(folder / "run")
    assert [one.step for one in cloudckpt.list_checkpoints(run) if one.is_committed] == [step]
    found = {"w": torch.zeros(1000), "step": 0}
    cloudckpt.load(found, checkpoint_id=f"{run}/step-{step}", no_dist=True)
    assert found["step"] == step
    assert found["w"].unique().tolist() == [step]
    assert cloudckpt.runs.find_leftovers(run, older_than=0).objects == ()
    return step


@pytest.mark.parametrize("job", ["PROCESS"], indirect=True)
def test_torchrun_that_is_told_to_end_has_the_step_saved_by_all_ranks(job, tmp_path) -> None:
    pids(tmp_path)
    job.send_signal(signal.SIGTERM)
    job.wait(120)
    assert saved(tmp_path) > 0


@pytest.mark.parametrize("job", ["THREAD"], indirect=True)
def test_one_rank_that_is_told_to_end_takes_the_others_with_it(job, tmp_path) -> None:
    os.kill(pids(tmp_path)[1], signal.SIGTERM)
    assert job.wait(120) == 0
    assert saved(tmp_path) > 0


def test_a_signal_to_all_processes_of_a_job_leaves_those_that_save(tmp_path) -> None:
    """Slurm sends the signal of ``--signal=USR1@120`` to all that a step of a job has started."""
    family = uuid.uuid4().hex
    with ExitStack() as running:
        ranks = [
            running.enter_context(
                child(_rank_of_a_job, folder=str(tmp_path), rank=rank, family=family)
            )
            for rank in range(2)
        ]
        for pid in (*pids(tmp_path), *processes_of(family)):
            os.kill(pid, signal.SIGUSR1)
        assert [rank.wait()[0] for rank in ranks] == [0, 0]
    assert saved(tmp_path) > 0


def _rank_of_a_job(folder: str, rank: int, family: str) -> None:
    os.environ.update(FAMILY=family, GLOO_SOCKET_IFNAME="lo")
    group = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    train_until_told(folder, "PROCESS", signal.SIGUSR1, **group)
