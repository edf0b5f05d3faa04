from __future__ import annotations

import collections
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt

STATE = {"model": {"w": torch.arange(600.0).reshape(20, 30)}, "step": 7}


def loaded(location) -> dict:
    state = {"model": {"w": torch.zeros(20, 30)}, "step": 0}
    cloudckpt.load(state, checkpoint_id=location)
    return state


def is_the_state(state: dict) -> bool:
    return state["step"] == 7 and torch.equal(state["model"]["w"], STATE["model"]["w"])


@pytest.fixture
def file(tmp_path):
    """A file of torch.save whose name does not tell what it is."""
    path = tmp_path / "from a friend.zip"
    torch.save(STATE, path)
    return path


@pytest.fixture
def stock(tmp_path):
    """A checkpoint that torch's own writer has made."""
    dcp.save(STATE, checkpoint_id=tmp_path / "stock.pt")
    return tmp_path / "stock.pt"


def test_a_file_becomes_a_checkpoint_whatever_it_is_called(cli, capsys, file, tmp_path):
    assert cli("convert", str(file), str(tmp_path / "new.pt")) == 0
    assert "file of torch.save) is now" in capsys.readouterr().out
    assert is_the_state(loaded(tmp_path / "new.pt"))


def test_a_checkpoint_becomes_a_file_of_the_name_that_such_files_have(cli, stock, tmp_path):
    assert cli("convert", str(stock), str(tmp_path / "model.pt"), "--quiet") == 0
    assert is_the_state(torch.load(tmp_path / "model.pt"))


def test_a_checkpoint_of_torch_becomes_one_with_checksums(cli, capsys, stock, tmp_path):
    assert cli("convert", str(stock), str(tmp_path / "ours"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["to"]) == ("dcp", "dcp")
    assert cloudckpt.inspect(tmp_path / "ours").has_checksums
    assert is_the_state(loaded(tmp_path / "ours"))


def test_metrics_are_kept(cli, run, tmp_path):
    assert cli("convert", str(run / "step-4"), str(tmp_path / "copy"), "--quiet") == 0
    assert cloudckpt.inspect(tmp_path / "copy").notes == cloudckpt.inspect(run / "step-4").notes


def test_a_file_goes_to_a_bucket_and_back(cli, file, bucket, s3_url, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    assert cli("convert", str(file), f"s3://{bucket}/run/step-1", "-q") == 0
    assert cli("convert", f"s3://{bucket}/run/step-1", str(tmp_path / "back.pt"), "-q") == 0
    assert is_the_state(torch.load(tmp_path / "back.pt"))


def test_what_nobody_can_tell_is_asked_for(cli, capsys, stock, file, tmp_path):
    assert cli("convert", str(stock), str(tmp_path / "v1.5")) == 2
    assert "give --to" in capsys.readouterr().err
    assert not (tmp_path / "v1.5").exists()
    assert cli("convert", str(stock), str(tmp_path / "v1.5"), "--to", "torch", "-q") == 0
    assert is_the_state(torch.load(tmp_path / "v1.5"))
    assert cli("convert", str(file), str(tmp_path / "other.pt"), "--to", "torch") == 2
    model = tmp_path / "model.safetensors"
    assert cli("convert", str(file), str(model)) == 2
    assert "export that" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not model.exists()
    assert cli("convert", str(file), str(model), "--to", "dcp", "-q") == 0
    assert cloudckpt.exists(model)


def test_what_is_there_stays_unless_it_may_be_overwritten(cli, capsys, stock, file, tmp_path):
    kept = tmp_path / "kept.pt"
    kept.write_bytes(b"mine")
    assert cli("convert", str(stock), str(kept)) == 1
    assert "exists" in capsys.readouterr().err
    assert kept.read_bytes() == b"mine"
    assert cli("convert", str(file), str(stock), "-q") == 1
    assert not cloudckpt.inspect(stock).has_checksums
    assert cli("convert", str(stock), str(kept), "--overwrite", "-q") == 0
    assert is_the_state(torch.load(kept))


@pytest.mark.parametrize("command", ["convert", "export", "import", "adopt"])
def test_the_folder_of_a_run_becomes_no_checkpoint(cli, capsys, run, stock, command):
    before = cloudckpt.list_checkpoints(run)
    source = [] if command == "adopt" else [str(stock)]
    if command == "import":
        assert cli("export", str(stock), str(stock.parent / "model")) == 0
        source = [str(stock.parent / "model")]
    assert cli(command, *source, str(run)) != 0
    assert "folder of a run" in " ".join(capsys.readouterr().err.split())
    assert cloudckpt.list_checkpoints(run) == before


def test_code_in_a_pickle_runs_only_if_it_is_trusted(cli, capsys, tmp_path):
    torch.save({"w": torch.ones(3), "of": collections.UserDict()}, tmp_path / "model.pt")
    arguments = ("convert", str(tmp_path / "model.pt"), str(tmp_path / "new"), "-q")
    assert cli(*arguments) == 1
    assert "trust_pickle" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert cli(*arguments, "--trust-pickle") == 0
    assert cloudckpt.exists(tmp_path / "new")


def test_nothing_but_the_result_is_printed(file, tmp_path):
    command = [sys.executable, "-m", "cloudckpt", "convert", str(file), str(tmp_path / "new")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert ended.stderr == ""
    assert ended.stdout.count("\n") == 1


def test_a_source_that_is_none_is_named(cli, capsys, run, tmp_path):
    assert cli("convert", str(tmp_path / "nothing"), str(tmp_path / "new")) == 3
    assert cli("convert", str(run), str(tmp_path / "new")) == 3
    assert "step-5" in capsys.readouterr().err  # did you mean
    (tmp_path / "text.pt").write_text("not a state")
    assert cli("convert", str(tmp_path / "text.pt"), str(tmp_path / "new")) == 4
    assert "not one of torch.save" in capsys.readouterr().err
    assert cli("convert", str(run / "step-2"), str(tmp_path / "new")) == 3  # torn


def test_a_checkpoint_is_exported_as_a_model_and_imported_again(
    cli, capsys, stock, tmp_path, caplog
):
    model, new = str(tmp_path / "model"), str(tmp_path / "new")
    options = ("--prefix", "model", "--dtype", "float64", "--json")
    assert cli("export", str(stock), model, *options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["model.safetensors"]
    assert told["left_out"] == ["step"]
    assert "converted" not in caplog.text  # as was asked
    assert cli("import", model, new, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1
    assert cli("import", str(stock), str(tmp_path / "newer")) == 2
    assert "SOURCE is a checkpoint already" in capsys.readouterr().err
    assert not (tmp_path / "newer").exists()
    state = {"w": torch.zeros(20, 30)}
    cloudckpt.load(state, checkpoint_id=new)
    assert torch.equal(state["w"], STATE["model"]["w"])
    assert cli("export", str(stock), model, "-q") == 1  # it is there
    assert cli("export", str(stock), model, "-q", "--overwrite", "--dtype", "int8") == 2
    assert cli("export", str(tmp_path / "nothing"), model, "-q", "--overwrite") == 3
    assert cli("export", str(stock), str(tmp_path / "other"), "--max-shard-size", "many") == 2
    assert cli("export", str(stock), str(tmp_path / "model.safetensors")) == 2
    assert "named like a file" in capsys.readouterr().err
    assert cli("export", str(stock), str(tmp_path / "other")) == 0
    assert "; left out: step" in capsys.readouterr().out
