"""Ranks that a launcher has started divide the work, and one of them speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cli.test_tampered import of_tensor
from support.emulators import free_port


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on two ranks; it ends with 1 if one of them does not with 0."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *command, "-m", "cloudckpt", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_ranks_of_torchrun_divide_a_copy_and_the_first_one_speaks(run, tmp_path):
    state = {name: torch.ones(100_000) for name in "abcdefgh"}
    config = cloudckpt.Config(part_size=5 * 2**20)
    cloudckpt.save(state, checkpoint_id=run / "step-9", config=config)
    done = torchrun("cp", str(run), str(tmp_path / "copy"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == 5
    found = torchrun("verify", str(tmp_path / "copy" / "step-9"))
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\t")[:2] == ["intact", "8"]


def test_ranks_end_with_the_same_code_and_one_says_why(run, tmp_path):
    of_tensor(run / "step-5")
    command = ["-m", "cloudckpt", "cp", "--ranks", str(run / "step-5"), str(tmp_path / "copy")]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [child.communicate(timeout=250)[1] for child in children]
    assert [child.returncode for child in children] == [4, 4], told
    assert ["cloudckpt: " in text for text in told] == [True, False]
    assert not list(tmp_path.glob("copy/*"))


@pytest.fixture
def in_a_pod(monkeypatch):
    """The environment of a training job, and what happens if somebody goes to its store."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("signal.signal", lambda *handler: None)  # of ranks, for their processes
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("the store of the running job was asked")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    return asked


def test_in_a_pod_of_a_running_job_a_command_works_alone(cli, run, tmp_path, in_a_pod):
    ended = cli("verify", run / "step-5")
    assert (ended.code, "works alone" in ended.err) == (0, True)
    ended = cli("cp", run / "step-5", tmp_path / "copy", "--no-ranks")
    assert (ended.code, ended.err) == (0, "")
    assert not in_a_pod


def test_torchrun_or_a_flag_says_that_there_are_ranks(cli, run, in_a_pod, monkeypatch):
    ended = cli("verify", run / "step-5", "--ranks")
    assert (ended.code, "did not connect to each other" in ended.err) == (1, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cli("verify", run / "step-5").code == 1
    assert len(in_a_pod) == 2
    assert cli("verify", run / "step-5", "--no-ranks").code == 0
    monkeypatch.delenv("WORLD_SIZE")
    ended = cli("verify", run / "step-5", "--ranks")
    assert (ended.code, "MASTER_ADDR" in ended.err) == (2, True)
    assert len(in_a_pod) == 2
