from __future__ import annotations

import collections

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


def test_a_file_becomes_a_checkpoint_whatever_it_is_called(cli, file, tmp_path):
    assert cli("convert", file, tmp_path / "new.pt").rows[0][:2] == ["torch", "dcp"]
    assert is_the_state(loaded(tmp_path / "new.pt"))


def test_a_checkpoint_of_torch_becomes_a_file_or_one_with_checksums(cli, stock, tmp_path):
    assert cli("convert", stock, tmp_path / "model.pt", "--quiet").out == ""
    assert is_the_state(torch.load(tmp_path / "model.pt"))
    told = cli("convert", stock, tmp_path / "ours", "--json").json
    assert (told["from"], told["to"]) == ("dcp", "dcp")
    assert cloudckpt.inspect(tmp_path / "ours").has_checksums
    assert is_the_state(loaded(tmp_path / "ours"))


def test_what_nobody_can_tell_is_asked_for(cli, stock, file, tmp_path):
    for source, target, told in (
        (stock, tmp_path / "v1.5", "give --to"),
        *((each, tmp_path / "model.safetensors", "cloudckpt export on") for each in (file, stock)),
    ):
        ended = cli("convert", source, target)
        assert (ended.code, target.exists()) == (2, False)
        assert told in " ".join(ended.err.replace("│", " ").split())
    assert cli("convert", file, tmp_path / "other.pt", "--to", "torch").code == 2
    assert cli("convert", stock, tmp_path / "v1.5", "--to", "torch").code == 0
    assert is_the_state(torch.load(tmp_path / "v1.5"))
    assert cli("convert", file, tmp_path / "model.safetensors", "--to", "dcp").code == 0
    assert cloudckpt.exists(tmp_path / "model.safetensors")


def test_code_in_a_pickle_runs_only_if_it_is_trusted(cli, tmp_path):
    torch.save({"w": torch.ones(3), "of": collections.UserDict()}, tmp_path / "model.pt")
    arguments = ("convert", tmp_path / "model.pt", tmp_path / "new")
    ended = cli(*arguments)
    assert (ended.code, "trust_pickle" in ended.err) == (1, True)
    assert not (tmp_path / "new").exists()
    assert cli(*arguments, "--trust-pickle").code == 0
    assert cloudckpt.exists(tmp_path / "new")


def test_a_source_that_is_none_is_named(cli, run, tmp_path):
    assert cli("convert", tmp_path / "nothing", tmp_path / "new").code == 3
    ended = cli("convert", run, tmp_path / "new")
    assert (ended.code, "step-5" in ended.err) == (3, True)  # did you mean
    (tmp_path / "text.pt").write_text("not a state")
    ended = cli("convert", tmp_path / "text.pt", tmp_path / "new")
    assert (ended.code, "not written by torch.save" in ended.err) == (4, True)


def test_a_checkpoint_is_exported_as_a_model_and_imported_again(cli, stock, tmp_path, caplog):
    model, new = tmp_path / "model", tmp_path / "new"
    told = cli("export", stock, model, "--prefix", "model", "--dtype", "float64", "--json").json
    assert (told["files"], told["left_out"]) == (["model.safetensors"], ["step"])
    assert "converted" not in caplog.text  # as was asked
    assert cli("import", model, new, "--json").json["tensors"] == 1
    ended = cli("import", stock, tmp_path / "newer")
    assert (ended.code, "SOURCE is already a checkpoint" in ended.err) == (2, True)
    assert not (tmp_path / "newer").exists()
    state = {"w": torch.zeros(20, 30)}
    cloudckpt.load(state, checkpoint_id=new)
    assert torch.equal(state["w"], STATE["model"]["w"])
    assert cli("export", stock, model, "--dtype", "int8").code == 2
    assert cli("export", tmp_path / "nothing", model).code == 3
    assert cli("export", stock, tmp_path / "other", "--max-shard-size", "many").code == 2
    ended = cli("export", stock, tmp_path / "model.safetensors")
    assert (ended.code, "the name of a file" in ended.err) == (2, True)
