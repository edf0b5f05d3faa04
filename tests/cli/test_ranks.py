"""Ranks that a launcher has started divide the work, and one of them speaks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cli.test_tampered import of_tensor

_COMMANDS = """
import os
import pathlib
import sys
import time
from cloudckpt.cli import main

codes = pathlib.Path(sys.argv[2])
for number, command in enumerate(sys.argv[1].split(";")):
    sys.argv, code = ["cloudckpt", *command.split()], 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    (codes / f"{number}.{os.environ['RANK']}").write_text(str(code))
    while len([*codes.glob(f"{number}.*")]) < 2:  # as if each had a torchrun of its own
        time.sleep(0.05)
"""


def test_ranks_of_torchrun_divide_the_work_end_alike_and_the_first_one_speaks(run, tmp_path):
    state = {name: torch.ones(100_000) for name in "abcdefgh"}
    cloudckpt.save(state, checkpoint_id=run / "step-9")
    (tmp_path / "commands.py").write_text(_COMMANDS)
    damaged = tmp_path / "damaged" / "step-5"
    cloudckpt.copy(run / "step-5", damaged)
    of_tensor(damaged)
    copy = tmp_path / "copy"
    commands = f"cp {run} {copy} --json; verify {copy}/step-9; cp {damaged} {copy}-5 --ranks"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "commands.py"), commands, str(tmp_path / "codes")]
    (tmp_path / "codes").mkdir()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    document, _, rest = done.stdout.partition("}\n")
    assert json.loads(document + "}")["checkpoints"] == 5
    assert rest.split("\t")[:2] == ["intact", "8"], (done.stderr, [(f.name, f.read_text()) for f in (tmp_path / "codes").iterdir()], done.stdout)
    assert rest.count("\n") == 1
    assert done.stderr.count("cloudckpt: ") == 1
    assert {(tmp_path / "codes" / f"2.{rank}").read_text() for rank in "01"} == {"4"}
    assert not copy.with_name("copy-5").exists()


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


def test_in_a_pod_of_a_running_job_a_command_works_alone_unless_it_is_told_of_ranks(
    cli, run, tmp_path, in_a_pod, monkeypatch
):
    step = run / "step-5"
    ended = cli("verify", step)
    assert (ended.code, "works alone" in ended.err) == (0, True)
    ended = cli("cp", step, tmp_path / "copy", "--no-ranks")
    assert (ended.code, ended.err) == (0, "")
    assert not in_a_pod
    ended = cli("verify", step, "--ranks")
    assert (ended.code, "did not connect to each other" in ended.err) == (1, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cli("verify", step).code == 1
    assert len(in_a_pod) == 2
    assert cli("verify", step, "--no-ranks").code == 0
    monkeypatch.delenv("WORLD_SIZE")
    ended = cli("verify", step, "--ranks")
    assert (ended.code, "MASTER_ADDR" in ended.err) == (2, True)
    assert len(in_a_pod) == 2
