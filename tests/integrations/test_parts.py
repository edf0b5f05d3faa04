from pathlib import Path

import pytest
import torch

from cloudckpt import Config, api
from cloudckpt.errors import ConfigError
from cloudckpt.integrations.parts import Parts


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
    _parts(other, resumed).load(uri, Config(), beside={})

    found, expected = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        assert torch.equal(found[index]["momentum_buffer"], state["momentum_buffer"])


def test_a_saved_state_that_would_be_left_out_is_refused_and_the_optimizer_stays(
    tmp_path: Path,
) -> None:
    uri = f"file://{tmp_path}/step-1"
    model, optimizer = _made(momentum=0.9)
    _train(model, optimizer, "a")
    api.save(_parts(model, optimizer).state_dicts(), checkpoint_id=uri)

    with pytest.raises(ConfigError, match=r"'a\.bias\.momentum_buffer' was saved, and SGD"):
        _parts(*_made()).load(uri, Config(), beside={})

    without = _made(momentum=0.9)
    api.save(
        {"optimizer": {"state": {"a.weight": {"momentum_buffer": torch.ones(2, 2)}}}},
        checkpoint_id=uri,
    )
    with pytest.raises(KeyError):
        _parts(*without).load(uri, Config(), beside={})
    assert not without[1].state


def test_an_optimizer_that_was_not_saved_stays_unless_loading_is_strict(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/step-1"
    model, optimizer = _made(momentum=0.9)
    api.save({"model": model.state_dict()}, checkpoint_id=uri)
    _train(model, optimizer, "a")
    _parts(model, optimizer).load(uri, Config(), beside={}, strict=False)
    assert len(optimizer.state) == 2
