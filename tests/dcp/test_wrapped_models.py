"""Models that were wrapped when they were saved, or are when they are loaded: said, and mended."""

import re

import pytest
import torch
import torch.distributed.checkpoint.state_dict

import cloudckpt
from cloudckpt.errors import MissingKeyError


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def wrapped(how: str) -> torch.nn.Module:
    """What DistributedDataParallel and torch.compile do to names, without ranks and compilers."""
    made = torch.nn.Module()
    made.add_module(how, model())
    return made


WRAPPERS = [("module", "DistributedDataParallel"), ("_orig_mod", "torch.compile")]
wrappers = pytest.mark.parametrize(("how", "name"), WRAPPERS, ids=["ddp", "compile"])


@wrappers
def test_a_wrapped_model_is_told_to_load_what_it_wraps(tmp_path, how, name) -> None:
    saved, loading = model(), wrapped(how)
    cloudckpt.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError, match=rf"wrapped by {name}.*model\.{how}\.state_dict\(\)"):
        cloudckpt.load({"model": loading.state_dict()}, checkpoint_id=tmp_path)
    inner = getattr(loading, how).state_dict()  # as the message says
    cloudckpt.load({"model": inner}, checkpoint_id=tmp_path)
    assert torch.equal(inner["weight"], saved.weight)


@wrappers
def test_what_was_saved_of_a_wrapped_model_is_loaded_as_the_message_says(
    tmp_path, how, name
) -> None:
    saved, loading = wrapped(how), model()
    cloudckpt.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError, match=rf'wrapped by {name}.*\{{"{how}": model\.state'):
        cloudckpt.load({"model": loading.state_dict()}, checkpoint_id=tmp_path)
    state = loading.state_dict()
    cloudckpt.load({"model": {how: state}}, checkpoint_id=tmp_path)
    assert torch.equal(state["weight"], getattr(saved, how).weight)


# how layers and models are wrapped: the name that is missing, and the one that was saved
NESTED = [
    ("model.layers.0.w", "model.layers.0._checkpoint_wrapped_module.w"),
    ("model.layers.0._checkpoint_wrapped_module.w", "model.layers.0.w"),
    ("model.module._orig_mod.layers.0.w", "model.layers.0.w"),
    ("model.layers.0.w", "model.module._orig_mod.layers.0.w"),
    ("model.module.layers.0.w", "model._orig_mod.layers.0._orig_mod.w"),
    ("model._orig_mod.module.w", "model.module.w"),
]


def test_the_line_for_layers_that_were_wrapped_loads_them(tmp_path) -> None:
    saved = torch.nn.Sequential(wrapped("_checkpoint_wrapped_module"))
    cloudckpt.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    loading = torch.nn.Sequential(model())
    with pytest.raises(MissingKeyError, match="checkpoint_wrapper") as caught:
        cloudckpt.load({"model": loading.state_dict()}, checkpoint_id=tmp_path)
    names = {"re": re, "cloudckpt": cloudckpt, "checkpoint_id": tmp_path, "model": loading}
    names |= {"torch": torch}
    lines = r"write (saved = \{.*\}) and load (\{.*\}); "
    first, then = re.search(lines, str(caught.value)).groups()
    exec(first, names)  # as the message says
    state = eval(then, names)
    cloudckpt.load(state, checkpoint_id=tmp_path)
    assert torch.equal(loading[0].weight, saved[0]._checkpoint_wrapped_module.weight)


def test_another_key_that_is_missing_has_nothing_to_do_with_wrappers(tmp_path) -> None:
    cloudckpt.save({"model": wrapped("module").state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError, match="strict=False") as caught:
        cloudckpt.load({"model": {"scale": torch.zeros(2)}}, checkpoint_id=tmp_path)
    assert "wrapped" not in str(caught.value)
