"""Models and optimizers of a framework as one checkpoint, with the small values beside them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import CheckpointNotFoundError, CloudCheckpointError
from cloudckpt.integrations import optimizer_states
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.deleting import delete
from cloudckpt.runs.steps import Retention
from cloudckpt.uri import CheckpointURI, text_of, unfolded

__all__ = ["VALUES", "Parts", "keep_newest", "packed", "remove", "unpacked", "uri_of"]

logger = logging.getLogger("cloudckpt")

VALUES = "other_values"
"""The item with everything but models and optimizers, as the bytes of ``torch.save``."""


class Parts:
    """The part of a training state that is saved tensor by tensor, each rank its shards.

    Its names are those of parameters, which resharding does not change.
    """

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
        """What to save of each, by name; a collective call."""
        found: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        for name, (model, optimizer) in self._optimizers.items():
            found[name] = optimizer_states.taken(model, optimizer)
        return found

    def load(
        self,
        uri: str,
        config: Config,
        *,
        beside: Mapping[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads them in place, on any number of ranks; a collective call.

        Args:
            uri: The checkpoint.
            config: Options.
            beside: What else to load, instead of the values.
            strict: Whether all of them must be in the checkpoint.
            weights_only: With False, pickles in the checkpoint may run any code.

        Returns:
            The values saved beside them, if these were loaded.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks some of them.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        buffer = io.BytesIO()
        meeting = Meeting.of(None, False)
        there = meeting.broadcast_from_first(
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
                stack.enter_context(optimizer_states.restored_on_failure(optimizer))
                saved = _below(f"{name}.state.", there)
                wanted[name] = optimizer_states.to_fill(model, optimizer, saved)
            if strict:
                meeting.begin(lambda: self._check_optimizers(wanted, there, uri))
            wanted |= {VALUES: buffer} if beside is None else beside
            options = CheckpointerConfig(config=config, trust_pickle=weights_only is False)
            with make_sync_checkpointer(options) as checkpointer:
                loaded = checkpointer.load(uri, wanted, strict=strict)
            for name, model in self._models.items():
                set_model_state_dict(model, loaded[name], options=StateDictOptions(strict=strict))
            for name, (model, optimizer) in optimizers.items():
                optimizer_states.put(model, optimizer, loaded[name])
        found = loaded.get(VALUES)
        return unpacked(None if found is buffer else found, weights_only)

    def _check_optimizers(self, wanted: dict[str, Any], there: Collection[str], uri: str) -> None:
        """Refuses to leave out what was saved of an optimizer that is loaded.

        Raises:
            ConfigError: If an optimizer can't have all of the state that was saved.
        """
        for name, (_, optimizer) in self._optimizers.items():
            saved = _below(f"{name}.state.", there)
            optimizer_states.check_room(wanted[name], optimizer, saved, uri, name)


def _below(prefix: str, names: Collection[str]) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def packed(values: Mapping[str, Any]) -> io.BytesIO:
    """Values as the bytes of ``torch.save``, which load like a framework's own small files."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    buffer.seek(0)
    return buffer


def unpacked(buffer: io.BytesIO | None, weights_only: bool | None = None) -> dict[str, Any]:
    """The values that :func:`packed` packed; empty if other software saved the checkpoint."""
    if buffer is None:
        return {}
    buffer.seek(0)
    return dict(torch.load(buffer, map_location="cpu", weights_only=weights_only is not False))


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
        logger.error("%s: old checkpoints stay until the next save: %s", run.root, error)
