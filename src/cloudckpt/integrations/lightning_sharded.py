"""Sharded checkpoints of Lightning on URIs: all ranks save their shards, in one commit.

The classes here go before a Lightning strategy in the bases and pass paths on to it. Nothing here
imports Lightning: a user may derive from the classes of ``pytorch_lightning`` and
``lightning_fabric``, which have the same code under other names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt import api
from cloudckpt.config import Config
from cloudckpt.errors import ConfigError, MissingKeyError
from cloudckpt.integrations.lightning_whole import config_of, refuse_storage_options
from cloudckpt.integrations.parts import VALUES, Parts, packed, remove, uri_of
from cloudckpt.integrations.saves import Saves, close, then

__all__ = ["FabricOnStores", "TrainerOnStores"]


class FabricOnStores:
    """Makes Fabric's sharded strategies save to a URI: each rank its shards, in one commit."""

    config: Config | None = None

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        """
        Args:
            *args: Lightning's.
            config: Options for saving and loading.
            **kwargs: Lightning's.
        """
        super().__init__(*args, **kwargs)
        if config is not None:
            self.config = config

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves on all ranks; to a URI, or where Lightning would.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        uri = uri_of(self.broadcast(path))  # type: ignore[attr-defined]
        if uri is None:
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        refuse_storage_options(storage_options, uri)
        _check_sharded(self, uri)
        if filter is not None:
            raise ConfigError("filter= is not for sharded checkpoints: leave it out", uri=uri)
        parts = _parts(state, uri).state_dicts()
        values = {key: _asked(value) for key, value in state.items() if key not in parts}
        if self.is_global_zero:  # type: ignore[attr-defined]
            parts[VALUES] = packed(values)
        api.save(parts, checkpoint_id=uri, config=config_of(self))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads into the models, optimizers and other values of ``state``, on any number of ranks.

        Returns:
            The saved values that are not in ``state``.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks something in ``state``.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = uri_of(self.broadcast(path))  # type: ignore[attr-defined]
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(path, state, strict, **more))  # type: ignore[misc]
        if not isinstance(state, dict) or not state:
            raise ConfigError(
                "a sharded checkpoint is loaded into what was saved: give a dict with the model, "
                "as fabric.load(uri, {'model': model})",
                uri=uri,
            )
        parts = _parts(state, uri)
        values = parts.load(
            uri,
            config_of(self),
            strict=strict,
            weights_only=weights_only,
        )
        for key, value in state.items():
            if isinstance(value, (Module, Optimizer)):
                continue
            if key in values:
                found = values.pop(key)
                if callable(load := getattr(value, "load_state_dict", None)):
                    load(found)
                else:
                    state[key] = found
            elif strict:
                raise MissingKeyError(
                    f"{key!r} is not in the checkpoint, whose values are {sorted(values)}; leave "
                    "it out of the state, or pass strict=False",
                    uri=uri,
                    item=key,
                )
        return values


class TrainerOnStores:
    """Makes the Trainer's sharded strategies save to a URI: each rank its shards, in one commit."""

    config: Config | None = None
    saves: Saves | None = None  # in the background

    def __init__(
        self,
        *args: Any,
        config: Config | None = None,
        asynchronous: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            *args: Lightning's.
            config: Options for saving and loading.
            asynchronous: Whether a save copies the state and continues in the background. A failure
                is then raised by the next save, or at the end, on all ranks.
            **kwargs: Lightning's.
        """
        super().__init__(*args, **kwargs)
        if config is not None:
            self.config = config
        if asynchronous:
            self.saves = Saves(config_of(self), asynchronous=True)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves on all ranks; to a URI, or where Lightning would.

        Raises:
            ConfigError: If the strategy is set to gather the state on one rank.
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        uri = uri_of(self.broadcast(filepath))  # type: ignore[attr-defined]
        if uri is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        refuse_storage_options(storage_options, uri)
        _check_sharded(self, uri)
        values = dict(checkpoint)
        model = values.pop("state_dict")
        parts: dict[str, Any] = {"state_dict": model}
        for index, state in enumerate(values.pop("optimizer_states", [])):
            parts[f"optimizer_{index}"] = state
        if self.is_global_zero:  # type: ignore[attr-defined]
            parts[VALUES] = packed(values)
        if self.saves is None:
            api.save(parts, checkpoint_id=uri, config=config_of(self))
        else:
            self.saves.save(parts, uri)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model, and when fitting the optimizers, on any number of ranks.

        Returns:
            Everything else that the trainer had saved.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = uri_of(self.broadcast(checkpoint_path))  # type: ignore[attr-defined]
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(checkpoint_path, **more))  # type: ignore[misc]
        if self.saves is not None:
            self.saves.finish()
        module = self.lightning_module  # type: ignore[attr-defined]
        model = self.model  # type: ignore[attr-defined]
        is_fitting = module.trainer.state.fn == "fit"
        optimizers = self.optimizers if is_fitting else []  # type: ignore[attr-defined]
        parts = Parts(
            {"state_dict": model},
            {f"optimizer_{index}": (model, one) for index, one in enumerate(optimizers)},
        )
        return parts.load(
            uri,
            config_of(self),
            strict=module.strict_loading,
            weights_only=weights_only,
        )

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint if it exists; only the first rank does so."""
        uri = uri_of(filepath)
        if uri is None:
            super().remove_checkpoint(filepath)  # type: ignore[misc]
        elif self.is_global_zero:  # type: ignore[attr-defined]
            then(self.saves, functools.partial(remove, uri, config_of(self)))

    def teardown(self) -> None:
        """Waits for background saves.

        Raises:
            CloudCheckpointError: If a save fails and no other error is being raised.
        """
        close(self.saves)
        super().teardown()  # type: ignore[misc]


def _check_sharded(strategy: Any, uri: str) -> None:
    """Refuses to save state that a strategy gathers on one rank.

    Raises:
        ConfigError: If the strategy is set to do so, or does so by default.
    """
    if not getattr(strategy, "_save_distributed_checkpoint", True):
        raise ConfigError(
            "save_distributed_checkpoint=False gathers the state on one rank: leave it out; what "
            "every rank saves loads on any number of ranks",
            uri=uri,
        )
    if getattr(strategy, "_state_dict_type", "sharded") != "sharded":
        raise ConfigError("FSDP is to be given state_dict_type='sharded' for URIs", uri=uri)


def _parts(state: Mapping[str, Any], uri: str) -> Parts:
    """The models and optimizers in ``state``.

    Raises:
        ConfigError: If there are optimizers but not exactly one model, whose parameter names they
            use.
    """
    models = {key: value for key, value in state.items() if isinstance(value, Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    if not models or (optimizers and len(models) > 1):
        raise ConfigError(
            f"the state has {len(models)} models: save each with its optimizers, at its own URI",
            uri=uri,
        )
    model = next(iter(models.values()))
    return Parts(models, {key: (model, optimizer) for key, optimizer in optimizers.items()})


def _asked(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
