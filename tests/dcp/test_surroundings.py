"""Modes of torch that a caller may be in."""

import pytest
import torch

from .children import in_a_child
from .places import Place
from .values import assert_same

MODES = {
    "no_grad": lambda: torch.no_grad().__enter__(),
    "inference_mode": lambda: torch.inference_mode().__enter__(),
    "autocast": lambda: torch.autocast("cpu").__enter__(),
    "a default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    # stands for "cuda": memory that the processor can't read
    "a default device": lambda: torch.set_default_device("meta"),
}


def _round_trip_in(mode: str, place: Place) -> None:
    """In a child: it ends with its mode, and a wrong envelope would stay in the cache."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=dtype, device="cpu").view(shape)

    MODES[mode]()
    state = {
        "large": tensor(200, 300),
        "small": tensor(4),
        "strided": tensor(500, 400).t(),
        "read strided": tensor(60, 50),
        "converted": tensor(70, 50),
        "value": [1, 2],
    }
    room = {
        "large": tensor(200, 300).zero_(),
        "small": tensor(4).zero_(),
        "strided": tensor(400, 500).zero_(),
        "read strided": tensor(50, 60).zero_().t(),
        "converted": tensor(70, 50, dtype=torch.float64).zero_(),
        "value": [0, 0],
    }
    place.save(state)
    place.load(room)
    assert_same(room, {**state, "converted": state["converted"].double()})


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_that_the_caller_is_in_does_not_matter(mode, local):
    in_a_child("fork", _round_trip_in, mode, local)
