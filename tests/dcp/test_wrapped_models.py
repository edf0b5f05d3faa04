"""Models that were wrapped when they were saved, or are when they are loaded: said, and mended."""

import itertools
import re

import pytest
import torch
import torch.distributed.checkpoint.state_dict
from torch.nn.parallel import DistributedDataParallel

import cloudckpt
from cloudckpt.errors import MissingKeyError

from .places import Place


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def _of_layers(wrap) -> torch.nn.Module:
    return torch.nn.Sequential(*map(wrap, model()))


WRAPPED = {
    "plain": model,
    "parallel": lambda: DistributedDataParallel(model()),
    "compiled": lambda: torch.compile(model()),
    "layers": lambda: _of_layers(torch.compile),
    "layers of parallel": lambda: DistributedDataParallel(_of_layers(torch.compile)),
}


def _loaded_as_said(place: Place, within: bool) -> None:
    """Each is loaded into each, by the line that the message has."""

    def state_of(state: dict) -> dict:
        return {"model": state} if within else state

    for saved_as, loaded_as in itertools.permutations(WRAPPED, 2):
        saved, loading = WRAPPED[saved_as](), WRAPPED[loaded_as]()
        options = {"checkpoint_id": place.uri, "config": place.config}
        cloudckpt.save(state_of(saved.state_dict()), **options)
        with pytest.raises(MissingKeyError, match="wrapped by") as caught:
            cloudckpt.load(state_of(loading.state_dict()), **options)
        names = {"re": re, "cloudckpt": cloudckpt, "torch": torch, "model": loading}
        names["checkpoint_id"] = place.uri
        before, line = re.search(
            r" use (?:(saved = \{.*\}) and load )?(.*?); saves that", str(caught.value)
        ).groups()
        exec(before or "", names)
        state = eval(line, names)
        cloudckpt.load(state if before else state_of(state), **options)
        for given, found in zip(saved.parameters(), loading.parameters(), strict=True):
            assert torch.equal(given, found), (saved_as, loaded_as)


@pytest.mark.parametrize("within", [True, False], ids=["in a dict", "by itself"])
def test_a_model_that_is_wrapped_otherwise_is_loaded_as_the_message_says(within, ranks, local):
    ranks(1, _loaded_as_said, local, within)
