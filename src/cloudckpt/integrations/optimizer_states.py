"""The state of optimizers, by the names of parameters: taken for a save, and made for a load.

torch makes the state of a fresh optimizer by a step with zero gradients and a learning rate of 0.
That is right before a load, which replaces it. A save must not do it: the step would count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt.checkpoint.torch_private import flatten_state_dict
from cloudckpt.errors import ConfigError

__all__ = ["check_room", "put", "restored_on_failure", "taken", "to_fill"]


def taken(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """What to save of an optimizer, which stays as it is; a collective call."""
    with _without_a_step(optimizer):
        return get_optimizer_state_dict(model, optimizer)


def to_fill(model: Module, optimizer: Optimizer, saved: Collection[str]) -> dict[str, Any]:
    """The state to load into: of the parameters whose state was saved; a collective call.

    Args:
        model: The model whose parameters it optimizes.
        optimizer: The optimizer, which gets a state for each parameter that can have one.
        saved: The names of the saved values, such as ``weight.exp_avg``.
    """
    found: dict[str, Any]
    if not saved:
        found = taken(model, optimizer)
        found["state"] = {}
        return found
    with _with_all_states(optimizer):
        found = dict(get_optimizer_state_dict(model, optimizer))
    are_there = _beginnings(saved)
    found["state"] = {name: one for name, one in found["state"].items() if name in are_there}
    return found


def check_room(
    wanted: dict[str, Any], optimizer: Optimizer, saved: Collection[str], uri: str, item: str
) -> None:
    """Refuses to leave out something that was saved of a parameter that this optimizer trains.

    Args:
        wanted: What :func:`to_fill` returned.
        optimizer: The optimizer.
        saved: The names of the saved values.
        uri: The checkpoint.
        item: The name of the optimizer in it.

    Raises:
        ConfigError: If there is such a value.
    """
    has_room = flatten_state_dict(wanted["state"])[0].keys()
    trained = _trained(wanted, optimizer)
    for name in sorted(saved):
        if name not in has_room and not trained.isdisjoint(_beginnings([name])):
            raise ConfigError(
                f"{name!r} was saved, and {type(optimizer).__name__} has no such state with its "
                "options here: make the optimizer as it was when the checkpoint was saved",
                uri=uri,
                item=f"{item}.state.{name}",
            )


def put(model: Module, optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Makes the loaded state the optimizer's; parameters without one have none afterwards."""
    loaded.setdefault("state", {})
    with _without_a_step(optimizer):
        set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(strict=False))


@contextlib.contextmanager
def restored_on_failure(optimizer: Optimizer) -> Iterator[None]:
    """Removes the states that a load has made if it fails."""
    before = dict(optimizer.state)
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise


@contextlib.contextmanager
def _without_a_step(optimizer: Optimizer) -> Iterator[None]:
    """Keeps torch from making a state, which it does not do where a parameter has a gradient."""
    parameters = _parameters(optimizer)
    if optimizer.state or not parameters or any(one.grad is not None for one in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextlib.contextmanager
def _with_all_states(optimizer: Optimizer) -> Iterator[None]:
    """Lets torch make the states of all parameters unless they are there; gradients stay."""
    parameters = _parameters(optimizer)
    if any(one.requires_grad and one not in optimizer.state for one in parameters):
        optimizer.state.clear()
    gradients = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _trained(state: dict[str, Any], optimizer: Optimizer) -> set[str]:
    """The names of parameters that have gradients, as far as this can be known: FSDP1 makes one
    parameter of several.
    """
    names: set[str] = set()
    for named, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        parameters = group["params"]
        if len(parameters) != len(named["params"]):
            names.update(named["params"])
        else:
            pairs = zip(named["params"], parameters, strict=True)
            names.update(name for name, one in pairs if one.requires_grad)
    return names


def _beginnings(names: Collection[str]) -> set[str]:
    """All that the names begin with and that ends before a dot."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found
