"""Mix-ins by which Lightning's strategies and plugins save to URIs, in one commit of all ranks.

Put a class of this module before a Lightning strategy or plugin in the base classes; paths that are
not URIs are passed on to it. This module does not import Lightning: so users can also derive from
the classes of ``pytorch_lightning`` and ``lightning_fabric``, which have the same code under other
names.
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.content import PerRank, per_rank
from cloudckpt.dcp.install import chosen_config
from cloudckpt.dcp.meeting import Meeting, collective
from cloudckpt.errors import ConfigError, MissingKeyError
from cloudckpt.integrations.saves import Saves
from cloudckpt.integrations.state import (
    OF_RANKS,
    Parts,
    entries_of_rank,
    is_sharded,
    pickle_values,
    random_state,
    set_random_state,
    unpickle_values,
    uri_of,
)

__all__ = ["FabricOnStores", "PluginOnStores", "TrainerOnStores"]

logger = logging.getLogger("cloudckpt")

_VALUES = "other_values"
"""The name of the item that has all values but models and optimizers, pickled by ``torch.save``."""


class _OnStores:
    """The common part of the mix-ins: options, saves and deletions."""

    _asynchronous = False
    _is_alone = False

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = config

    @property
    def _config(self) -> Config:
        """The options of this object, else those given to ``install``, else of the environment."""
        return self._given or chosen_config() or Config()

    @functools.cached_property
    def _saves(self) -> Saves:
        """The :class:`Saves` of this job, made at first use: the ranks are connected by then."""
        return Saves(self._config, asynchronous=self._asynchronous, no_dist=self._is_alone)

    def _uri(self, path: str | os.PathLike[str]) -> str | None:
        """Returns the path that the first rank was given, if it is a URI; None for a local path."""
        return uri_of(Meeting.of(None, self._is_alone).from_first(path))

    def _save(
        self,
        collect: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
        uri: str,
        storage_options: object,
        step: int | None = None,
    ) -> None:
        """Saves a checkpoint to a URI, or begins to save it in the background.

        Args:
            collect: Returns this rank's part of the state, and the other values of the checkpoint,
                which the first rank pickles.
            uri: The location.
            storage_options: Lightning's argument; must be None.
            step: The training's step, used if the location does not name it; None if unknown.

        Raises:
            ConfigError: If ``storage_options`` were given, or the strategy gathers the state on one
                rank.
            CloudCheckpointError: The error of ``collect``, on all ranks; or the errors of
                :func:`cloudckpt.save`.
        """

        def prepare() -> dict[str, Any]:
            if storage_options is not None:
                raise ConfigError(
                    "cloudckpt takes no storage_options=: give config= to the strategy or plugin",
                    uri=uri,
                )
            if not getattr(self, "_save_distributed_checkpoint", True):
                raise ConfigError(
                    "saves to URIs are sharded, but save_distributed_checkpoint=False gathers the "
                    "state on one rank: leave the option out; any number of ranks can load shards",
                    uri=uri,
                )
            if getattr(self, "_state_dict_type", "sharded") != "sharded":
                raise ConfigError(
                    "FSDP saves to URIs only with state_dict_type='sharded': pass that to the "
                    "strategy",
                    uri=uri,
                )
            parts, values = collect()
            if getattr(self, "is_global_zero", True):
                parts = {**parts, _VALUES: pickle_values(values, _VALUES, uri, self._config)}
            return parts

        # the ranks meet, as the first one may fail alone, when it pickles
        state = Meeting.of(None, self._is_alone).begin(prepare)
        self._saves.save(state, uri, step=step)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint if it exists, once the save in progress is committed.

        A checkpoint at a URI is deleted by the first rank, and errors are only logged. A local path
        is passed on to Lightning.
        """
        uri = uri_of(path)
        if uri is None:
            super().remove_checkpoint(path)  # type: ignore[misc]
        elif getattr(self, "is_global_zero", True):
            self._saves.remove(uri)

    def teardown(self) -> None:
        """Waits for background saves; later saves are synchronous.

        Raises:
            CloudCheckpointError: If a save fails, and no other error is being raised.
        """
        self._asynchronous = False
        if "_saves" in vars(self):
            try:
                self._saves.close()
            finally:
                self._saves.asynchronous = False
        super().teardown()  # type: ignore[misc]


class FabricOnStores(_OnStores):
    """Mix-in by which Fabric's strategies save to URIs, each rank its shards, in one commit.

    Dataloaders in the state, and values marked by :func:`cloudckpt.per_rank`, are saved for each
    rank, and loaded by the same rank. Values with sharded tensors, such as averaged weights, are
    saved by all ranks, each its shards, and loaded in place; of other values the first rank's are
    saved.
    """

    @collective("Fabric.save")
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves a state to a URI on all ranks; a path is passed on to Lightning.

        Raises:
            ConfigError: If the strategy gathers the state on one rank, ``filter`` or
                ``storage_options`` are given, or ``state`` has no model, or has optimizers and
                several models.
            CloudCheckpointError: The errors of :func:`cloudckpt.save`.
        """
        uri = self._uri(path)
        if uri is None:
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return

        def collect() -> tuple[dict[str, Any], dict[str, Any]]:
            if filter is not None:
                raise ConfigError("filter= works with local paths only: leave it out", uri=uri)
            parts = _parts(state, uri).state_dicts() | entries_of_rank(state)
            values = {
                key: value.state_dict() if hasattr(value, "state_dict") else value
                for key, value in state.items()
                if key not in parts
            }
            sharded = [key for key, value in values.items() if is_sharded(value)]
            return parts | {key: values.pop(key) for key in sharded}, values

        self._save(collect, uri, storage_options)

    @collective("Fabric.load")
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads models, optimizers and other values of ``state`` in place, on any number of ranks.

        Args:
            path: The URI, or a local path, which is passed on to Lightning with the other
                arguments.
            state: A dict with the model, and the other objects and values to load.
            strict: Whether each key of ``state`` must be in the checkpoint; if False, missing keys
                keep their values.
            weights_only: If False, pickles in the checkpoint may run any code.

        Returns:
            The saved values that are not in ``state``.

        Raises:
            ConfigError: If ``state`` is not a dict with a model, or has optimizers and several
                models.
            MissingKeyError: If ``strict``, and the checkpoint lacks a key of ``state``.
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        uri = self._uri(path)
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(path, state, strict, **more))  # type: ignore[misc]
        if not isinstance(state, dict) or not state:
            raise ConfigError(
                "a checkpoint is loaded into a dict that has the model: pass one, as in "
                "fabric.load(uri, {'model': model})",
                uri=uri,
            )
        own = entries_of_rank(state)
        others = {
            key: one for key, one in state.items() if not isinstance(one, (Module, Optimizer))
        }
        loaded = _parts(state, uri).load(
            uri,
            self._config,
            others={**others, **own, _VALUES: io.BytesIO()},
            strict=strict,
            trust_pickle=weights_only is False,
        )
        values = _values_in(loaded, uri, weights_only)
        for key, value in others.items():
            if key in loaded:
                state[key] = value if key in own else loaded[key]
            elif key in values:
                saved = values.pop(key)
                if callable(load := getattr(value, "load_state_dict", None)):
                    load(saved)
                else:
                    state[key] = saved
            elif strict:
                raise MissingKeyError(
                    f"{key!r} is not in the checkpoint (its other values: {sorted(values)}); "
                    "leave it out of the state, or pass strict=False",
                    uri=uri,
                    item=key,
                )
        self._saves.resumed(uri)
        return values


class TrainerOnStores(_OnStores):
    """Mix-in by which the Trainer's strategies save to URIs, each rank its shards, in one commit.

    Each rank also saves the states of its random generators, and of its stateful dataloaders.
    """

    _is_ours = False  # whether the checkpoint being restored was given as a URI

    def __init__(
        self, *args: Any, config: Config | None = None, asynchronous: bool = False, **kwargs: Any
    ) -> None:
        """
        Args:
            *args: Arguments of Lightning's strategy.
            config: Options for saving and loading; None uses those given to ``install``, or
                else the environment.
            asynchronous: Whether a save stages the state and continues in the background. A failure
                is then raised by the next save, or at the end of training, on all ranks.
            **kwargs: Keyword arguments of Lightning's strategy.
        """
        super().__init__(*args, config=config, **kwargs)
        self._asynchronous = asynchronous

    @collective("Trainer.save_checkpoint")
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves a checkpoint to a URI on all ranks; a path is passed on to Lightning.

        Raises:
            ConfigError: If the strategy gathers the state on one rank, or ``storage_options`` are
                given.
            CloudCheckpointError: The errors of :func:`cloudckpt.save`.
        """
        uri = self._uri(filepath)
        if uri is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        values = dict(checkpoint)

        def collect() -> tuple[dict[str, Any], dict[str, Any]]:
            parts = {"state_dict": values.pop("state_dict")}
            if "optimizer_states" in values:  # missing if the Trainer saves weights only
                del values["optimizer_states"]
                parts |= Parts({}, self._named_optimizers()).state_dicts()
                loaders = _fit_loop(values).get("combined_loader")
                own = {"random": random_state(), "loaders": loaders}
                parts[OF_RANKS] = per_rank(pickle_values(own, OF_RANKS, uri, self._config))
            return parts, values

        self._save(collect, uri, storage_options, values.get("global_step"))

    @collective("Trainer.fit")
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model in place from a URI; a path is passed on to Lightning.

        In ``fit``, the optimizers, the random state and the dataloaders' positions are loaded, too.

        Args:
            checkpoint_path: The URI, or a local path.
            weights_only: If False, pickles in the checkpoint may run any code.

        Returns:
            The Trainer's checkpoint: the model's state dict, loops, callbacks, hyperparameters, and
            what else was saved. Changes of the state dict in it, in ``on_load_checkpoint`` for
            example, change the model's tensors only if made in place.

        Raises:
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        uri = self._uri(checkpoint_path)
        self._is_ours = uri is not None
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(checkpoint_path, **more))  # type: ignore[misc]
        self._saves.finish()
        module = self.lightning_module  # type: ignore[attr-defined]
        is_fitting = module.trainer.state.fn == "fit"
        own: PerRank[Any] = per_rank(None)
        loaded = Parts(
            {"state_dict": self.model},  # type: ignore[attr-defined]
            self._named_optimizers() if is_fitting else {},
        ).load(
            uri,
            self._config,
            others={_VALUES: io.BytesIO()} | ({OF_RANKS: own} if is_fitting else {}),
            strict=module.strict_loading,
            trust_pickle=weights_only is False,
        )
        values = {**_values_in(loaded, uri, weights_only), "state_dict": loaded["state_dict"]}
        if own.is_loaded:
            saved = unpickle_values(own.value, OF_RANKS, uri, weights_only)
            set_random_state(saved["random"])
            if saved["loaders"] is not None:
                _fit_loop(values)["combined_loader"] = saved["loaders"]
        elif OF_RANKS in loaded and "combined_loader" in _fit_loop(values):
            logger.warning(
                "%s has no dataloader positions of this rank, so this rank's dataloaders start at "
                "the first rank's positions",
                uri,
            )
        if is_fitting:
            self._saves.resumed(uri)
        return values

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always True, so that Lightning makes the optimizers before :meth:`load_checkpoint`."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizers itself: only from local checkpoints."""
        return not self._is_ours and bool(super().lightning_restore_optimizer)  # type: ignore[misc]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restores the model from a local checkpoint; does nothing for a checkpoint at a URI.

        For a URI, :meth:`load_checkpoint` has already restored the model.
        """
        if not self._is_ours:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]

    def _named_optimizers(self) -> dict[str, tuple[Module, Optimizer]]:
        """Returns each optimizer with the model, by the optimizer's name in a checkpoint."""
        model, optimizers = self.model, self.optimizers  # type: ignore[attr-defined]
        return {f"optimizer_{index}": (model, one) for index, one in enumerate(optimizers)}


class PluginOnStores(_OnStores):
    """Mix-in by which Lightning's plugin saves to URIs: one process saves, tensor by tensor."""

    _is_alone = True

    def __init__(self, config: Config | None = None, *, asynchronous: bool = False) -> None:
        """
        Args:
            config: Options for saving and loading; None uses those given to ``install``, or
                else the environment.
            asynchronous: Whether a save stages the state and continues in the background; only for
                the Trainer, which waits for it at the end. A failure is then raised by the next
                save, or at the end of training.
        """
        super().__init__(config=config)
        self._asynchronous = asynchronous

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint to a URI; a path is passed on to Lightning.

        Raises:
            ConfigError: If ``storage_options`` are given.
            CloudCheckpointError: The errors of :func:`cloudckpt.save`.
        """
        uri = self._uri(path)
        if uri is None:
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
            return

        def collect() -> tuple[dict[str, Any], dict[str, Any]]:
            trees = {key: value for key, value in checkpoint.items() if _is_of_tensors(value)}
            return trees, {key: value for key, value in checkpoint.items() if key not in trees}

        self._save(collect, uri, storage_options, checkpoint.get("global_step"))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint, and returns the dict that was saved.

        Args:
            path: The URI of the checkpoint, or a path, which is passed on to Lightning.
            map_location: Used for paths only; tensors from a URI are loaded to host memory.
            weights_only: If False, pickles in the checkpoint may run any code.

        Raises:
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        uri = self._uri(path)
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            if map_location != "cpu":
                more["map_location"] = map_location
            return dict(super().load_checkpoint(path, **more))  # type: ignore[misc]
        self._saves.finish()
        options = CheckpointerConfig(
            config=self._config, no_dist=True, trust_pickle=weights_only is False
        )
        with make_sync_checkpointer(options) as checkpointer:
            loaded = checkpointer.load(uri)
        self._saves.resumed(uri)
        values = _values_in(loaded, uri, weights_only)
        return {**loaded, **values}


def _values_in(loaded: dict[str, Any], uri: str, weights_only: bool | None) -> dict[str, Any]:
    """Removes the pickled values from a loaded state, and returns them; empty if there are none."""
    buffer = loaded.pop(_VALUES, None)
    return {} if buffer is None else unpickle_values(buffer, _VALUES, uri, weights_only)


def _fit_loop(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of the Trainer's fit loop; empty if there is none.

    The dataloaders' positions are under the key ``combined_loader``.
    """
    loop = values.get("loops", {}).get("fit_loop", {})
    return loop.get("state_dict", {}) if isinstance(loop, dict) else {}


def _parts(state: Mapping[str, Any], uri: str) -> Parts:
    """Returns the models and optimizers in ``state``.

    Raises:
        ConfigError: If ``state`` has no model, or has optimizers and several models: it would not
            be known to which model an optimizer belongs.
    """
    models = {key: value for key, value in state.items() if isinstance(value, Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    if not models or (optimizers and len(models) > 1):
        advice = "use one URI for each, with its optimizers" if models else "add the model"
        raise ConfigError(f"the state has {len(models)} models, not one: {advice}", uri=uri)
    model = next(iter(models.values()))
    return Parts(models, {key: (model, optimizer) for key, optimizer in optimizers.items()})


def _is_of_tensors(value: object) -> bool:
    """Returns whether a value has tensors, and otherwise only numbers, strings and None."""
    kinds = {type(leaf) for leaf in torch.utils._pytree.tree_leaves(value)}
    simple = {int, float, bool, str, type(None), torch.nn.Parameter, torch.Tensor}
    return kinds <= simple and not kinds.isdisjoint({torch.Tensor, torch.nn.Parameter})
