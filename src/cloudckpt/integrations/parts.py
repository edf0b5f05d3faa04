"""Models and optimizers of a framework as one checkpoint, with what it keeps beside them.

Optimizers are saved by the names of parameters, which resharding does not change. torch makes the
state of a fresh optimizer by a step with zero gradients and a learning rate of 0. That is right
before a load, which replaces it. A save must not do it: the step would count.
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
    """The part of a training state that is saved tensor by tensor, each rank its shards."""

    def __init__(
        self, models: Mapping[str, Module], optimizers: Mapping[str, tuple[Module, Optimizer]]
    ) -> None:
        """
        Args:
            models: By their names in a checkpoint.
            optimizers: Likewise; each with the model whose parameters it optimizes.
        """
        self._models = models
        self._optimizers = optimizers

    def state_dicts(self) -> dict[str, Any]:
        """What to save of each, by name; they stay as they are. A collective call."""
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
        """Loads them in place, on any number of ranks; a collective call.

        An optimizer has the states that were saved afterwards, and no others. What was saved of one
        and has no place here, for example as its options differ, is named in a warning.

        Args:
            uri: The checkpoint.
            config: Options.
            beside: What else to load, by name; what the checkpoint lacks is left out.
            strict: Whether all models and optimizers must be in the checkpoint.
            trust_pickle: Whether pickles in the checkpoint may run any code.

        Returns:
            What was loaded of ``beside``.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks some of them.
            CloudCheckpointError: As :func:`cloudckpt.load`.
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
        with contextlib.ExitStack() as stack:
            for name, (model, optimizer) in optimizers.items():
                stack.enter_context(_restored_on_failure(optimizer))
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
    """The state to load into: of the parameters whose state was saved, such as `weight.exp_avg`."""
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
def _restored_on_failure(optimizer: Optimizer) -> Iterator[None]:
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


def _below(prefix: str, names: Collection[str]) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def uri_of(path: str | os.PathLike[str]) -> str | None:
    """The URI, or None for a path.

    Raises:
        InvalidURIError: If it is not a valid location, or ``pathlib`` has collapsed its slashes:
            what is saved there would be lost with the machine.
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
    """Deletes the checkpoints of a run that need not be kept; failures are left to the next call.

    Checkpoints later than this job's belong to a training that was abandoned when the job went back
    to an earlier step: they do not count, and stay.

    Args:
        run: The run.
        retention: Which checkpoints are kept.
        saved: The step that the job has just saved.
        kept: Other steps to keep, for example the one that the job resumed from.
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
