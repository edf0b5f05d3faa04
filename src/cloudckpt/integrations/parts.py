"""Saves and loads the models and optimizers of a framework, with its other values beside them.

The states of an optimizer are saved by parameter names, which resharding does not change. To create
the states of a fresh optimizer, torch makes a step with zero gradients and a learning rate of 0.
Before a load that is right, as the load replaces the states. In a save it must not happen: the step
would be counted by the optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import CheckpointNotFoundError, CloudCheckpointError
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.deleting import delete
from cloudckpt.runs.steps import Retention
from cloudckpt.uri import CheckpointURI, text_of, unfolded

__all__ = ["Parts", "keep_newest", "remove", "uri_of"]

logger = logging.getLogger("cloudckpt")


class Parts:
    """The models and optimizers of a training, saved tensor by tensor, each rank its shards."""

    def __init__(
        self, models: Mapping[str, Module], optimizers: Mapping[str, tuple[Module, Optimizer]]
    ) -> None:
        """
        Args:
            models: The models, by their names in a checkpoint.
            optimizers: The optimizers, by their names in a checkpoint, each with its model.
        """
        self._models = models
        self._optimizers = optimizers

    def state_dicts(self) -> dict[str, Any]:
        """Returns the state dicts to save, by name, without changing an optimizer; collective."""
        found: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        for name, (model, optimizer) in self._optimizers.items():
            with _without_a_step(optimizer):
                found[name] = get_optimizer_state_dict(model, optimizer)
        return found

    def load(
        self,
        uri: str,
        config: Config,
        *,
        beside: Mapping[str, Any],
        strict: bool = True,
        trust_pickle: bool = False,
    ) -> dict[str, Any]:
        """Loads the models and optimizers in place, on any number of ranks; a collective call.

        Afterwards an optimizer has exactly the states that were saved. Saved states that the
        optimizer can't take, for example because its options differ, are named in a warning.

        Args:
            uri: The location of the checkpoint.
            config: Options.
            beside: Other values to load, by name; names that the checkpoint lacks are left out.
            strict: Whether all models and optimizers must be in the checkpoint.
            trust_pickle: Whether pickles in the checkpoint may run any code.

        Returns:
            The loaded values of ``beside``.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks a model or an optimizer.
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        there = Meeting.of(None, False).broadcast_from_first(
            lambda: {item.name for item in inspect(uri, config=config).items}
        )
        wanted: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        optimizers = {
            name: pair
            for name, pair in self._optimizers.items()
            if strict or _below(f"{name}.", there)
        }
        for name, (model, optimizer) in optimizers.items():
            wanted[name] = _to_fill(model, optimizer, _below(f"{name}.state.", there))
        more = {
            name: value
            for name, value in beside.items()
            if name in there or _below(f"{name}.", there)
        }
        options = CheckpointerConfig(config=config, trust_pickle=trust_pickle)
        with make_sync_checkpointer(options) as checkpointer:
            loaded = checkpointer.load(uri, wanted | more, strict=strict)
        for name, model in self._models.items():
            set_model_state_dict(model, loaded[name], options=StateDictOptions(strict=strict))
        for name, (model, optimizer) in optimizers.items():
            loaded[name].setdefault("state", {})
            with _without_a_step(optimizer):
                some = StateDictOptions(strict=False)
                set_optimizer_state_dict(model, optimizer, loaded[name], options=some)
        return {name: loaded[name] for name in more}


def _to_fill(model: Module, optimizer: Optimizer, saved: Collection[str]) -> dict[str, Any]:
    """Makes the optimizer state to load into, of the parameters whose states were saved.

    ``saved`` has the names of saved states, such as ``weight.exp_avg``.
    """
    prepared = _with_all_states if saved else _without_a_step
    with prepared(optimizer):
        found = dict(get_optimizer_state_dict(model, optimizer))
    has_state = {
        ".".join(names[:count])
        for names in (name.split(".") for name in saved)
        for count in range(1, len(names))
    }
    states: Any = found["state"]
    found["state"] = {name: one for name, one in states.items() if name in has_state}
    return found


@contextlib.contextmanager
def _without_a_step(optimizer: Optimizer) -> Iterator[None]:
    """Keeps torch from creating states for a fresh optimizer during the block.

    torch creates them only if no parameter has a gradient, so this sets the gradient of one.
    """
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
    """Makes torch create the states of all parameters, if any is missing; restores gradients."""
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
    """Returns all parameters of an optimizer."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _below(prefix: str, names: Collection[str]) -> set[str]:
    """Returns the names that begin with a prefix, without the prefix."""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def uri_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the URI that a framework was given; None if it was given a local path.

    Raises:
        InvalidURIError: If it is a URI, but not a valid location, or if ``pathlib`` has collapsed
            its slashes: a save to that local path would be lost with the machine.
    """
    text = text_of(path) or ""
    if "://" in text or unfolded(text) is not None:
        return str(CheckpointURI.parse(text))
    return None


def remove(uri: str, config: Config) -> None:
    """Deletes a checkpoint if it exists."""
    with contextlib.suppress(CheckpointNotFoundError):
        delete(uri, config=config)


def keep_newest(
    run: Run, retention: Retention, saved: int, kept: Collection[int | None] = ()
) -> None:
    """Deletes the checkpoints of a run that ``retention`` does not keep; errors are only logged.

    Steps after ``saved`` belong to a training that was abandoned when the job went back to an
    earlier step: they don't count, and stay. The next call deletes what could not be deleted.

    Args:
        run: The run.
        retention: The rules by which checkpoints are kept.
        saved: The step that the job has just saved.
        kept: Other steps to keep, for example the step that the job resumed from.
    """
    if retention.max_to_keep is None:
        return
    try:
        for step in retention.unneeded([step for step in run.committed() if step <= saved]):
            if step not in kept:
                remove(str(run.uri(step)), run.config)
    except CloudCheckpointError as error:
        logger.error(
            "%s: old checkpoints could not be deleted, and stay until the next save: %s",
            run.root,
            error,
        )
