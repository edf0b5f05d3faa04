"""State dicts whose every element is the step, so that a mix of two steps shows."""

import os
from collections import Counter

import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.config import MIB

from .dialects import Endpoint, vendor_options

BIG = 6 * MIB  # two parts of 5 and 1 MiB
SMALL = 128 * 1024  # a single PUT
ATTEMPTS = 4


def silence() -> dict[str, float]:
    """Options by which a second of silence is enough, or more on a machine that is busy: there a
    server that does what it is asked is silent for as long."""
    seconds = min(max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1))), 6.0)
    return dict.fromkeys(("read_timeout", "stall_timeout"), seconds)


def filled(step: int, nbytes: int = BIG) -> dict:
    return {
        "weight": torch.full((nbytes // 4,), float(step)),
        "bias": torch.full((1000,), step),
        "step": step,
    }


def step_of(state: dict) -> int:
    """The one step that all of a state dict is of."""
    steps = {int(value) for value in (*state["weight"].aminmax(), *state["bias"].aminmax())}
    assert steps == {state["step"]}, f"a mix of steps: {steps}, {state['step']}"
    return state["step"]


def load_step(uri: str, config: Config, nbytes: int = BIG) -> int:
    state = filled(-1, nbytes)
    cloudckpt.load(state, checkpoint_id=uri, config=config)
    return step_of(state)


def enough_tries(tries: Counter[str]) -> bool:
    """Whether a fault that lasts was met by as many tries, by target, as the options say."""
    return 1 <= max(tries.values()) <= ATTEMPTS


def impatient(endpoint: Endpoint, **options) -> Config:
    """Options that lead to an endpoint and give up after few tries, with short pauses.

    Each try has the time that a server on a busy machine may need: a test of silence, `silence`.
    """
    settings = {
        "connections": 4,
        "part_size": 5 * MIB,
        "conditional_writes": "on",
        "connect_timeout": 30.0,
        "read_timeout": 30.0,
        "stall_timeout": 30.0,
        "retry": RetryPolicy(attempts=ATTEMPTS, base=0.01, cap=0.05, deadline=60.0),
        **vendor_options(endpoint),
        **options,
    }
    return Config(**settings)
