import contextlib
import os
import random
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cloudckpt import Config, api
from cloudckpt.checkpoint.torch_private import groups_joined
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    UnsupportedTensorError,
    UnsupportedValueError,
    UntrustedPickleError,
)
from cloudckpt.integrations.lightning_state import FabricOnStores, PluginOnStores
from cloudckpt.integrations.saves import Saves
from cloudckpt.integrations.state import (
    Parts,
    is_sharded,
    map_files,
    map_files_of_ranks,
    pickle_values,
    random_state,
    set_random_state,
    unpickle_values,
)
from cloudckpt.runs.catalog import Run


def _made(**options: float) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    return model, torch.optim.SGD(model.parameters(), 0.1, **options)


def _train(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer, *branches: str) -> None:
    for branch in branches:
        model[branch](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
    return Parts({"model": model}, {"optimizer": (model, optimizer)})


@pytest.mark.parametrize("saved", ["", "a", "ab"])
@pytest.mark.parametrize("loading", ["", "b", "ab"])
def test_an_optimizer_has_the_states_that_were_saved_and_no_others(
    tmp_path: Path, saved: str, loading: str
) -> None:
    uri = f"file://{tmp_path}/step-1"
    model, optimizer = _made(momentum=0.9)
    _train(model, optimizer, *saved)
    api.save(_parts(model, optimizer).state_dicts(), checkpoint_id=uri)

    other, resumed = _made(momentum=0.9)
    _train(other, resumed, *loading)
    _parts(other, resumed).load(uri, Config(), others={})

    found, expected = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        assert torch.equal(found[index]["momentum_buffer"], state["momentum_buffer"])


def test_a_saved_state_that_has_no_place_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"file://{tmp_path}/step-1"
    model, optimizer = _made(momentum=0.9)
    _train(model, optimizer, "a")
    api.save(_parts(model, optimizer).state_dicts(), checkpoint_id=uri)
    _parts(*_made()).load(uri, Config(), others={})
    assert "optimizer.state" in caplog.text


def test_an_optimizer_that_was_not_saved_stays_unless_loading_is_strict(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/step-1"
    model, optimizer = _made(momentum=0.9)
    api.save({"model": model.state_dict()}, checkpoint_id=uri)
    _train(model, optimizer, "a")
    _parts(model, optimizer).load(uri, Config(), others={}, strict=False)
    assert len(optimizer.state) == 2


def test_who_may_read_only_a_step_may_load_it_but_not_save_beside_it(tmp_path, monkeypatch) -> None:
    def deny(run: Run) -> None:
        raise AccessDeniedError("no")

    api.save({"a": 1}, checkpoint_id=f"file://{tmp_path}/step-1")
    monkeypatch.setattr(Run, "owner", deny)
    saves = Saves(Config())
    saves.resumed(f"file://{tmp_path}/step-1")
    with pytest.raises(AccessDeniedError):
        saves.save({"a": 2}, f"file://{tmp_path}/step-2")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_that_has_resumed_nothing_replaces_no_step_of_another(tmp_path, asynchronous) -> None:
    first, second = Saves(Config()), Saves(Config(), asynchronous=asynchronous)
    for value in (1, 2):  # its own step may be replaced
        first.save({"a": value}, uri := f"file://{tmp_path}/step-1")
        first.save({"a": value}, str(tmp_path / "best"))

    def save() -> None:
        second.save({"a": 3}, uri)
        second.finish()

    with contextlib.closing(second):
        for _ in range(2):  # what was refused is refused again
            with pytest.raises(CheckpointExistsError, match="another training has saved this step"):
                save()
        second.save({"a": 4}, str(tmp_path / "best"))
        api.load(state := {"a": 0}, checkpoint_id=uri)
        assert state == {"a": 2}
        second.resumed(uri)
        save()


def _save_in_background(folder: Path) -> int:
    """The number of process groups that this has opened."""
    before = groups_joined()
    saves = Saves(Config(), asynchronous=True)
    saves.save({"a": dist.get_rank()}, f"file://{folder}/step-1")
    saves.close()
    return groups_joined() - before


@pytest.mark.parametrize(("world", "opened"), [(1, 0), (2, 2)])
def test_a_single_rank_saves_without_groups(ranks, tmp_path, world, opened) -> None:
    assert ranks(world, _save_in_background, tmp_path) == [opened] * world


def test_random_generators_go_on_as_they_were() -> None:
    def drawn() -> list[float]:
        return [random.random(), torch.rand(1).item(), numpy.random.rand()]

    state = unpickle_values(pickle_values(random_state(), "", "", Config()), "", "")
    expected = drawn()
    assert drawn() != expected
    set_random_state(state)
    assert drawn() == expected


class _Strategy(FabricOnStores):
    """One of Fabric, of which only the rank is needed."""

    is_global_zero = property(lambda self: dist.get_rank() == 0)


def _save_what_pickle_refuses(folder: Path) -> None:
    state = {"model": torch.nn.Linear(1, 1), "rule": lambda: None}  # the first rank pickles it
    _Strategy().save_checkpoint(f"file://{folder}/step-1", state)


def test_a_value_that_one_rank_cannot_pickle_is_told_to_all(ranks, tmp_path) -> None:
    errors = ranks.errors(2, _save_what_pickle_refuses, tmp_path)
    assert ["rule" in str(error) or "lambda" in str(error) for error in errors] == [True, True]


def _save_averages(folder: Path) -> list[float]:
    def averages(values: torch.Tensor) -> dict[str, object]:
        mesh = init_device_mesh("cpu", (2,))
        return {"weight": distribute_tensor(values, mesh, [Shard(0)]), "updates": int(values[-1])}

    assert not is_sharded(Mock())  # as a configuration that has every attribute
    strategy, model = _Strategy(), torch.nn.Linear(1, 1)
    values = {"step": 1, "averages": averages(torch.arange(4.0))}
    with pytest.raises(UnsupportedTensorError):  # the Trainer gives no tensors to load them into
        pickle_values(values, "", "", Config())
    strategy.save_checkpoint(f"file://{folder}/step-1", {"model": model, **values})
    state = {"model": model, "step": 0, "averages": averages(torch.zeros(4))}
    assert strategy.load_checkpoint(f"file://{folder}/step-1", state) == {}
    assert (state["step"], state["averages"]["updates"]) == (1, 3)
    return state["averages"]["weight"].to_local().tolist()


def test_fabric_saves_the_shards_of_all_ranks_also_of_averages(ranks, tmp_path) -> None:
    assert ranks(2, _save_averages, tmp_path) == [[0.0, 1.0], [2.0, 3.0]]


def test_a_plugin_loads_the_values_that_a_load_of_cloudckpt_accepts(tmp_path) -> None:
    plugin, values = PluginOnStores(), {"best": numpy.float32(0.5), "folder": tmp_path}
    plugin.save_checkpoint(values, f"file://{tmp_path}/step-1")
    assert plugin.load_checkpoint(f"file://{tmp_path}/step-1") == values
    refused = {"rule": torch.nn.ReLU}
    with pytest.raises(UnsupportedValueError):
        PluginOnStores(Config(unloadable="refuse")).save_checkpoint(refused, "file:///a/b")
    plugin.save_checkpoint(refused, uri := f"file://{tmp_path}/step-2")
    with pytest.raises(UntrustedPickleError, match="weights_only=False"):
        plugin.load_checkpoint(uri)
    assert plugin.load_checkpoint(uri, weights_only=False) == {"rule": torch.nn.ReLU}


def _map_files(folders: list[Path]) -> dict[str, str]:
    files = map_files(str(folders[dist.get_rank()]), Meeting.of(None, False))
    return {name: bytes(content.tolist()).decode() for name, content in files.items()}


def test_each_rank_maps_its_share_of_the_files_of_a_folder(ranks, tmp_path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    assert ranks(2, _map_files, [tmp_path] * 2) == [{"a": "a"}, {"b": "b"}]
    with pytest.raises(NotADirectoryError):  # what can't be listed is not passed over
        map_files(str(tmp_path / "a"), Meeting(None))


def test_a_file_that_a_machine_has_from_before_is_not_saved(ranks, tmp_path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / "model").write_text("old" if rank == 0 else "new")
        os.utime(folder / "model", (rank, rank))
    assert ranks(2, _map_files, folders) == [{}, {"model": "new"}]


def _write_files(folder: Path) -> None:
    rank = dist.get_rank()
    own = folder / str(rank)
    own.mkdir()
    (own / "same").write_text("of all")
    (own / "position").write_text(f"of rank {rank}")
    (own / f"only of {rank}").write_text("")
    of_first, of_rank = map_files_of_ranks(str(own), Meeting.of(None, False))
    assert {*of_first} == ({"same", "position", "only of 0"} if rank == 0 else set())
    assert {*of_rank} == (set() if rank == 0 else {"position", "only of 1"})
    if rank == 1:
        assert bytes(of_rank["position"].tolist()) == b"of rank 1"


def test_files_that_differ_from_those_of_the_first_rank_are_of_each_rank(ranks, tmp_path) -> None:
    ranks(2, _write_files, tmp_path)
