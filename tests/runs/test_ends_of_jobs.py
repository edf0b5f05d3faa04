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


def pids(folder: Path) -> list[int]:
    """The processes of both ranks, once they train."""
    marks = [folder / "rank-0", folder / "rank-1"]
    assert eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    return [int(mark.read_text()) for mark in marks]


def check_saved(folder: Path) -> None:
    """Both ranks have stopped at one step, which is the only one in the run."""
    [step, other] = [int((folder / f"rank-{rank}-saved").read_text()) for rank in range(2)]
    assert step == other > 0
    run = str(folder / "run")
    assert [one.step for one in cloudckpt.list_checkpoints(run) if one.is_committed] == [step]
    found = {"w": torch.zeros(1000), "step": 0}
    cloudckpt.load(found, checkpoint_id=f"{run}/step-{step}", no_dist=True)
    assert found["step"] == step
    assert found["w"].unique().tolist() == [step]
    assert cloudckpt.runs.find_leftovers(run, older_than=0).objects == ()


def test_torchrun_that_is_told_to_end_has_the_step_saved_by_all_ranks(tmp_path) -> None:
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
    command += ["-m", "runs.jobs", str(tmp_path), "PROCESS", "SIGTERM"]
    started = subprocess.Popen([sys.executable, *command], env=environment)
    try:
        pids(tmp_path)
        started.send_signal(signal.SIGTERM)
        started.wait(120)
    finally:
        for pid in {started.pid, *processes_of(family)}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        started.wait()
    check_saved(tmp_path)


def _rank_of_a_job(folder: str, rank: int, family: str, kind: str) -> None:
    os.environ.update(FAMILY=family, GLOO_SOCKET_IFNAME="lo")
    group = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    train_until_told(folder, kind, signal.SIGUSR1, **group)


@pytest.mark.parametrize(("kind", "told"), [("PROCESS", "all"), ("THREAD", "one rank")])
def test_a_signal_to_any_or_all_processes_of_a_job_has_the_step_saved(tmp_path, kind, told) -> None:
    """Slurm sends the signal of ``--signal=USR1@120`` to all that a step of a job has started."""
    family = uuid.uuid4().hex
    job = {"folder": str(tmp_path), "family": family, "kind": kind}
    with ExitStack() as running:
        ranks = [
            running.enter_context(child(_rank_of_a_job, rank=rank, **job)) for rank in range(2)
        ]
        _, second = pids(tmp_path)
        for pid in {second, *processes_of(family)} if told == "all" else [second]:
            os.kill(pid, signal.SIGUSR1)
        assert [rank.wait()[0] for rank in ranks] == [0, 0]
    check_saved(tmp_path)
