"""Lightning Fabric's checkpoints on URIs: its strategies, and the plugin that its Trainer has, too.

>>> from cloudckpt.integrations.fabric import CloudModelParallelStrategy  # doctest: +SKIP
>>> fabric = Fabric(strategy=CloudModelParallelStrategy(parallelize))  # doctest: +SKIP
>>> fabric.save("s3://bucket/run/step-10", state)  # doctest: +SKIP
>>> fabric.load("s3://bucket/run/step-10", state)  # doctest: +SKIP

Paths that are no URIs go Lightning's way. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt import api
from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import (
    ConfigError,
    MissingDependencyError,
    MissingKeyError,
)
from cloudckpt.integrations.adapting import watch
from cloudckpt.integrations.parts import VALUES, Parts, packed, remove, unpacked, uri_of
from cloudckpt.integrations.saves import Saves, close, then

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.fabric and .lightning need Lightning: pip install 'lightning>=2.5'"
    ) from exc

__all__ = ["CloudCheckpointIO", "CloudFSDPStrategy", "CloudModelParallelStrategy"]


class CloudCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Saves whole checkpoints to URIs, and loads them: for strategies that do not shard.

    >>> trainer = Trainer(plugins=[CloudCheckpointIO()])  # doctest: +SKIP

    One process saves, tensor by tensor. Strategies that shard (``ModelParallelStrategy``,
    ``FSDPStrategy``) ask no plugin; take those of this package.
    """

    def __init__(self, config: Config | None = None, *, asynchronous: bool = False) -> None:
        """
        Args:
            config: The options of saving and loading.
            asynchronous: Whether a save copies the state and goes on in the background, for the
                Trainer, which waits for it at its end. What fails then is raised by the next save,
                on all ranks, or by the first rank at the end.
        """
        super().__init__()
        self.config = config
        self._saves: Saves | None = None
        if asynchronous:
            self._saves = Saves(config_of(self), asynchronous=True, no_dist=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves to a URI, or where Lightning would.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        uri = uri_of(path)
        if uri is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_storage_options(storage_options, uri)
        trees = {key: value for key, value in checkpoint.items() if _is_of_tensors(value)}
        values = {key: value for key, value in checkpoint.items() if key not in trees}
        state = {**trees, VALUES: packed(values)}
        if self._saves is None:
            api.save(state, checkpoint_id=uri, config=config_of(self), no_dist=True)
        else:
            self._saves.save(state, uri)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What was saved, as it was.

        Args:
            path: Where.
            map_location: Lightning's; tensors of a URI come to the host.
            weights_only: With False, pickles in the checkpoint may run any code.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = uri_of(path)
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            if map_location != "cpu":
                more["map_location"] = map_location
            return dict(super().load_checkpoint(path, **more))
        if self._saves is not None:
            self._saves.finish()
        options = CheckpointerConfig(
            config=config_of(self), no_dist=True, trust_pickle=weights_only is False
        )
        with make_sync_checkpointer(options) as checkpointer:
            trees = checkpointer.load(uri)
        values = unpacked(trees.pop(VALUES, None), weights_only)
        return {**trees, **values}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint, if it is there."""
        uri = uri_of(path)
        if uri is None:
            super().remove_checkpoint(path)
        else:
            then(self._saves, functools.partial(remove, uri, config_of(self)))

    def teardown(self) -> None:
        """Waits for what is saved in the background.

        Raises:
            CloudCheckpointError: If that fails, and nothing else has.
        """
        close(self._saves)


class _OnStores:
    """What Fabric's strategies that shard do otherwise on a URI: all ranks save their shards to it,
    in one commit.
    """

    config: Config | None = None

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        """
        Args:
            *args: Lightning's.
            config: The options of saving and loading.
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
        check_sharded(self, uri)
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
            The values that were saved, and are not in ``state``.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks what ``state`` has.
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
        values = parts.load(uri, config_of(self), strict=strict, weights_only=weights_only)
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


class CloudModelParallelStrategy(_OnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), which saves to URIs, too."""


class CloudFSDPStrategy(_OnStores, FSDPStrategy):  # type: ignore[misc]
    """Fabric's ``FSDPStrategy`` (FSDP1), which saves to URIs, too."""


def config_of(owner: Any) -> Config:
    """The options that a strategy or plugin was given, or those of ``install``."""
    return getattr(owner, "config", None) or chosen_config() or Config()


def check_sharded(strategy: Any, uri: str) -> None:
    """Refuses to save what a strategy gathers on one rank.

    Raises:
        ConfigError: If it was told to do so, or does it by default.
    """
    if not getattr(strategy, "_save_distributed_checkpoint", True):
        raise ConfigError(
            "save_distributed_checkpoint=False gathers the state on one rank: leave it out; what "
            "every rank saves loads on any number of ranks",
            uri=uri,
        )
    if getattr(strategy, "_state_dict_type", "sharded") != "sharded":
        raise ConfigError("FSDP is to be given state_dict_type='sharded' for URIs", uri=uri)


def refuse_storage_options(options: object, uri: str) -> None:
    """Refuses what would be ignored.

    Raises:
        ConfigError: If there are any.
    """
    if options is not None:
        raise ConfigError("storage_options= is not for cloudckpt: give config= instead", uri=uri)


def _parts(state: Mapping[str, Any], uri: str) -> Parts:
    """The models and optimizers in ``state``.

    Raises:
        ConfigError: If there are optimizers and not just one model, whose names those take.
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


def _is_of_tensors(value: object) -> bool:
    """Whether it consists of tensors, numbers and strings in dicts and lists, with tensors."""
    kinds = {type(leaf) for leaf in torch.utils._pytree.tree_leaves(value)}
    simple = {int, float, bool, str, type(None), torch.nn.Parameter, torch.Tensor}
    return kinds <= simple and not kinds.isdisjoint({torch.Tensor, torch.nn.Parameter})


watch("lightning")
