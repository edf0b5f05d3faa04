"""Checkpoints of Lightning on URIs: all ranks save what they have, in one commit.

The classes here go before a Lightning strategy or plugin in the bases and pass paths on to it.
Nothing here imports Lightning: a user may derive from the classes of ``pytorch_lightning`` and
``lightning_fabric``, which have the same code under other names.
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.content import PerRank, per_rank
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import ConfigError, MissingKeyError
from cloudckpt.integrations.parts import Parts, remove, uri_of
from cloudckpt.integrations.ranks import (
    OF_RANKS,
    entries_of_rank,
    packed,
    put_random,
    random_state,
    unpacked,
)
from cloudckpt.integrations.saves import Saves

__all__ = ["FabricOnStores", "PluginOnStores", "TrainerOnStores"]

logger = logging.getLogger("cloudckpt")

_VALUES = "other_values"
"""The item with everything but models and optimizers, as the bytes of ``torch.save``."""


class _OnStores:
    """Options, saves and deletions of a strategy or a plugin."""

    config: Config | None = None
    _asynchronous = False
    _is_alone = False
    _saves: Saves | None = None  # since the first save, until the end

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config is not None:
            self.config = config

    @property
    def _config(self) -> Config:
        """The options that were given, or those of ``install``."""
        return self.config or chosen_config() or Config()

    def _save(self, state: dict[str, Any], uri: str, storage_options: object) -> None:
        if storage_options is not None:
            raise ConfigError(
                "cloudckpt does not use storage_options=: pass config= to the strategy instead",
                uri=uri,
            )
        if self._saves is None:
            self._saves = Saves(
                self._config, asynchronous=self._asynchronous, no_dist=self._is_alone
            )
        self._saves.save(state, uri)

    def _finish(self) -> None:
        if self._saves is not None:
            self._saves.finish()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint if it exists, once the save under way is committed."""
        uri = uri_of(path)
        if uri is None:
            super().remove_checkpoint(path)  # type: ignore[misc]
        elif getattr(self, "is_global_zero", True):
            act = functools.partial(remove, uri, self._config)
            act() if self._saves is None else self._saves.then(act)

    def teardown(self) -> None:
        """Waits for background saves; later ones are made at once.

        Raises:
            CloudCheckpointError: If a save fails and no other error is being raised.
        """
        saves, self._saves, self._asynchronous = self._saves, None, False
        if saves is not None:
            saves.close()
        super().teardown()  # type: ignore[misc]


class _StrategyOnStores(_OnStores):
    def _uri(self, path: str | os.PathLike[str]) -> str | None:
        """The URI of the first rank; None for a path."""
        return uri_of(self.broadcast(path))  # type: ignore[attr-defined]

    def _check_sharded(self, uri: str) -> None:
        """Refuses to save state that a strategy gathers on one rank.

        Raises:
            ConfigError: If the strategy is set to do so, or does so by default.
        """
        if not getattr(self, "_save_distributed_checkpoint", True):
            raise ConfigError(
                "save_distributed_checkpoint=False gathers the state on one rank: leave it "
                "out; a sharded checkpoint can be loaded on any number of ranks",
                uri=uri,
            )
        if getattr(self, "_state_dict_type", "sharded") != "sharded":
            raise ConfigError(
                "FSDP saves to URIs only with state_dict_type='sharded': pass that to the strategy",
                uri=uri,
            )

    def _with_values(self, parts: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state to save: values are those of the first rank."""
        return {**parts, _VALUES: packed(values)} if self.is_global_zero else parts  # type: ignore[attr-defined]


class FabricOnStores(_StrategyOnStores):
    """Makes Fabric's strategies save to a URI: each rank its shards, in one commit.

    Dataloaders in the state, and what is marked by :func:`cloudckpt.per_rank`, are saved once a
    rank, and come back to their rank.
    """

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
        uri = self._uri(path)
        if uri is None:
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        self._check_sharded(uri)
        if filter is not None:
            raise ConfigError("filter= works with local paths only: leave it out", uri=uri)
        parts = _parts(state, uri).state_dicts() | entries_of_rank(state)
        values = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if key not in parts
        }
        self._save(self._with_values(parts, values), uri, storage_options)

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
        uri = self._uri(path)
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(path, state, strict, **more))  # type: ignore[misc]
        if not isinstance(state, dict) or not state:
            raise ConfigError(
                "the checkpoint has no model to load into: pass a dict with it, as in "
                "fabric.load(uri, {'model': model})",
                uri=uri,
            )
        own = entries_of_rank(state)
        loaded = _parts(state, uri).load(
            uri,
            self._config,
            beside={_VALUES: io.BytesIO(), **own},
            strict=strict,
            trust_pickle=weights_only is False,
        )
        values = _values_in(loaded, weights_only)
        for key, value in state.items():
            if isinstance(value, (Module, Optimizer)) or key in loaded:
                continue
            if key in values:
                found = values.pop(key)
                if callable(load := getattr(value, "load_state_dict", None)):
                    load(found)
                else:
                    state[key] = found
            elif strict:
                raise MissingKeyError(
                    f"{key!r} is not in the checkpoint, which has the values {sorted(values)}; "
                    "leave it out of the state, or pass strict=False",
                    uri=uri,
                    item=key,
                )
        return values


class TrainerOnStores(_StrategyOnStores):
    """Makes the Trainer's strategies save to a URI: each rank its shards, in one commit.

    Each rank also saves its random generators, and where its dataloaders are that can say so.
    """

    _is_ours = False  # whether the checkpoint that is being restored is on a URI

    def __init__(
        self, *args: Any, config: Config | None = None, asynchronous: bool = False, **kwargs: Any
    ) -> None:
        """
        Args:
            *args: Lightning's.
            config: Options for saving and loading.
            asynchronous: Whether a save copies the state and continues in the background. A failure
                is then raised by the next save, or at the end, on all ranks.
            **kwargs: Lightning's.
        """
        super().__init__(*args, config=config, **kwargs)
        self._asynchronous = asynchronous

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
        uri = self._uri(filepath)
        if uri is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        self._check_sharded(uri)
        values = dict(checkpoint)
        parts = {"state_dict": values.pop("state_dict")}
        if "optimizer_states" in values:  # else only the weights are wanted
            del values["optimizer_states"]
            parts |= Parts({}, self._named_optimizers()).state_dicts()
            own = {"random": random_state(), "loaders": _fit_loop(values).get("combined_loader")}
            parts[OF_RANKS] = per_rank(packed(own))
        self._save(self._with_values(parts, values), uri, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model, and when fitting the optimizers, on any number of ranks.

        Returns:
            Everything else that the trainer had saved.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = self._uri(checkpoint_path)
        self._is_ours = uri is not None
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(checkpoint_path, **more))  # type: ignore[misc]
        self._finish()
        module = self.lightning_module  # type: ignore[attr-defined]
        is_fitting = module.trainer.state.fn == "fit"
        own: PerRank[Any] = per_rank(None)
        loaded = Parts(
            {"state_dict": self.model},  # type: ignore[attr-defined]
            self._named_optimizers() if is_fitting else {},
        ).load(
            uri,
            self._config,
            beside={_VALUES: io.BytesIO()} | ({OF_RANKS: own} if is_fitting else {}),
            strict=module.strict_loading,
            trust_pickle=weights_only is False,
        )
        values = _values_in(loaded, weights_only)
        if own.is_loaded:
            found = unpacked(own.value)
            put_random(found["random"])
            if found["loaders"] is not None:
                _fit_loop(values)["combined_loader"] = found["loaders"]
        elif OF_RANKS in loaded and "combined_loader" in _fit_loop(values):
            logger.warning(
                "no position of the dataloaders was saved for this rank, so it starts at that "
                "of the first rank"
            )
        return values

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning loads when optimizers exist; they are loaded with the model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers itself, which it does from paths."""
        return not self._is_ours and bool(super().lightning_restore_optimizer)  # type: ignore[misc]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restores the model from a path; :meth:`load_checkpoint` has done so from a URI."""
        if not self._is_ours:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]

    def _named_optimizers(self) -> dict[str, tuple[Module, Optimizer]]:
        model, optimizers = self.model, self.optimizers  # type: ignore[attr-defined]
        return {f"optimizer_{index}": (model, one) for index, one in enumerate(optimizers)}


class PluginOnStores(_OnStores):
    """Makes Lightning's plugin save to a URI: one process saves, tensor by tensor."""

    _is_alone = True

    def __init__(self, config: Config | None = None, *, asynchronous: bool = False) -> None:
        """
        Args:
            config: Options for saving and loading.
            asynchronous: Whether a save copies the state and continues in the background; only for
                the Trainer, which waits for it at the end. A failure is then raised by the next
                save, or at the end.
        """
        super().__init__(config=config)
        self._asynchronous = asynchronous

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves to a URI, or where Lightning would.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        uri = uri_of(path)
        if uri is None:
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
            return
        trees = {key: value for key, value in checkpoint.items() if _is_of_tensors(value)}
        values = {key: value for key, value in checkpoint.items() if key not in trees}
        self._save({**trees, _VALUES: packed(values)}, uri, storage_options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns what was saved, unchanged.

        Args:
            path: The checkpoint.
            map_location: Lightning's; tensors from a URI are loaded to the host.
            weights_only: With False, pickles in the checkpoint may run any code.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = uri_of(path)
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            if map_location != "cpu":
                more["map_location"] = map_location
            return dict(super().load_checkpoint(path, **more))  # type: ignore[misc]
        self._finish()
        options = CheckpointerConfig(
            config=self._config, no_dist=True, trust_pickle=weights_only is False
        )
        with make_sync_checkpointer(options) as checkpointer:
            loaded = checkpointer.load(uri)
        values = _values_in(loaded, weights_only)
        return {**loaded, **values}


def _values_in(loaded: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
    """Takes the values out of what was loaded; none if other software saved it."""
    buffer = loaded.pop(_VALUES, None)
    return {} if buffer is None else unpacked(buffer, weights_only)


def _fit_loop(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the Trainer keeps of its loop: the positions of dataloaders are ``combined_loader``."""
    loop = values.get("loops", {}).get("fit_loop", {})
    return loop.get("state_dict", {}) if isinstance(loop, dict) else {}


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
            f"the state has {len(models)} models: save each with its optimizers to its own URI",
            uri=uri,
        )
    model = next(iter(models.values()))
    return Parts(models, {key: (model, optimizer) for key, optimizer in optimizers.items()})


def _is_of_tensors(value: object) -> bool:
    """Whether it holds only tensors, numbers and strings in dicts and lists, and some tensor."""
    kinds = {type(leaf) for leaf in torch.utils._pytree.tree_leaves(value)}
    simple = {int, float, bool, str, type(None), torch.nn.Parameter, torch.Tensor}
    return kinds <= simple and not kinds.isdisjoint({torch.Tensor, torch.nn.Parameter})
