from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from emulators import free_port


def test_verify_tells_whole_ones_and_damaged_ones_apart(cli, capsys, run):
    assert cli("verify", str(run / "step-5")) == 0
    assert "all of it is as it was written (2 items" in capsys.readouterr().out
    [data] = (run / "step-5").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
    assert cli("verify", str(run / "step-5"), "--quiet") == 4
    out, err = capsys.readouterr()
    assert "do not match their checksum" in err
    item, uri, start, stop, what = out.rstrip("\n").split("\t")
    assert (item, uri, what) == ("w", data.as_uri(), "does not match its checksum")
    assert int(start) <= 2000 < int(stop)
    assert cli("verify", str(run / "step-5"), "--json") == 4
    [damage] = json.loads(capsys.readouterr().out)["damages"]
    assert damage == {
        "item": item,
        "object": uri,
        "start": int(start),
        "stop": int(stop),
        "what": what,
    }
    assert cli("verify", str(run / "step-2")) == 3


def test_cp_copies_checkpoints_and_runs_and_says_so(cli, capsys, run, tmp_path):
    source, target = str(run / "step-5"), str(tmp_path / "copy of one")
    assert cli("cp", source, target) == 0
    assert capsys.readouterr().out.startswith(f"{target}: copied 1 checkpoint (1 objects, 8")
    assert cli("cp", source, target, "--quiet") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--overwrite" in err
    assert cli("cp", source, target, "--overwrite", "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert cli("cp", str(run), str(tmp_path / "all"), "--json") == 0
    copied = json.loads(capsys.readouterr().out)
    assert (copied["checkpoints"], copied["already_there"]) == (4, 0)
    assert cli("cp", str(run), str(tmp_path / "all")) == 0
    assert "4 there already" in capsys.readouterr().out
    assert cli("verify", str(tmp_path / "all" / "step-5")) == 0


def test_cp_of_what_is_damaged_or_not_there_has_its_exit_code(cli, capsys, run, tmp_path):
    [data] = (run / "step-5").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
    assert cli("cp", str(run / "step-5"), str(tmp_path / "copy")) == 4
    assert "do not match their checksum" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists() or not list((tmp_path / "copy").iterdir())
    assert cli("cp", str(run / "step-2"), str(tmp_path / "copy")) == 3
    assert cli("cp", str(run / "step-4"), str(run / "step-4")) == 2
    assert cli("cp", str(run / "step-4")) == 2


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


def test_ranks_of_torchrun_divide_a_copy_and_the_first_one_speaks(cli, run, tmp_path):
    state = {name: torch.ones(100_000) for name in "abcdefgh"}
    config = cloudckpt.Config(part_size=5 * 2**20)
    cloudckpt.save(state, checkpoint_id=run / "step-9", config=config)
    done = torchrun("cp", str(run), str(tmp_path / "copy"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == 5
    found = torchrun("verify", str(tmp_path / "copy" / "step-9"))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("all of it is as it was written (8 items") == 1


def test_ranks_end_with_the_same_code_and_one_says_why(run, tmp_path):
    [data] = (run / "step-5").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
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


def test_in_a_pod_of_a_running_job_a_command_works_alone(cli, capsys, run, tmp_path, in_a_pod):
    assert cli("verify", str(run / "step-5")) == 0
    assert "works alone" in capsys.readouterr().err
    assert cli("cp", str(run / "step-5"), str(tmp_path / "copy"), "--no-ranks") == 0
    out, err = capsys.readouterr()
    assert "copied 1 checkpoint" in out
    assert "alone" not in err
    assert not in_a_pod


def test_torchrun_or_a_flag_says_that_there_are_ranks(cli, capsys, run, in_a_pod, monkeypatch):
    step = str(run / "step-5")
    assert cli("verify", step, "--ranks") == 1
    assert "did not find each other" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cli("verify", step) == 1
    assert len(in_a_pod) == 2
    assert cli("verify", step, "--no-ranks") == 0
    monkeypatch.delenv("WORLD_SIZE")
    assert cli("verify", step, "--ranks") == 2
    assert "MASTER_ADDR" in capsys.readouterr().err
    assert len(in_a_pod) == 2
