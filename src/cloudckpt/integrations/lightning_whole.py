"""Whole checkpoints of Lightning on URIs, for strategies that do not shard.

Nothing here imports Lightning, as in :mod:`.lightning_sharded`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from cloudckpt import api
from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import ConfigError
from cloudckpt.integrations.parts import VALUES, packed, remove, unpacked, uri_of
from cloudckpt.integrations.saves import Saves, close, then

__all__ = ["WholeOnStores", "config_of", "refuse_storage_options"]


class WholeOnStores:
    """Makes Lightning's plugin save to a URI: one process saves, tensor by tensor.

    It goes before a Lightning plugin in the bases, which handles paths.
    """

    def __init__(self, config: Config | None = None, *, asynchronous: bool = False) -> None:
        """
        Args:
            config: Options for saving and loading.
            asynchronous: Whether a save copies the state and continues in the background; only for
                the Trainer, which waits for it at the end. A failure is then raised by the next
                save, on all ranks, or by the first rank at the end.
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
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
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
        """Deletes a checkpoint if it exists."""
        uri = uri_of(path)
        if uri is None:
            super().remove_checkpoint(path)  # type: ignore[misc]
        else:
            then(self._saves, functools.partial(remove, uri, config_of(self)))

    def teardown(self) -> None:
        """Waits for background saves.

        Raises:
            CloudCheckpointError: If a save fails and no other error is being raised.
        """
        close(self._saves)


def config_of(owner: Any) -> Config:
    """The options that a strategy or plugin was given, or those of ``install``."""
    return getattr(owner, "config", None) or chosen_config() or Config()


def refuse_storage_options(options: object, uri: str) -> None:
    """Refuses storage options, which would be ignored.

    Raises:
        ConfigError: If there are any.
    """
    if options is not None:
        raise ConfigError("storage_options= is not for cloudckpt: give config= instead", uri=uri)


def _is_of_tensors(value: object) -> bool:
    """Whether it holds only tensors, numbers and strings in dicts and lists, and some tensor."""
    kinds = {type(leaf) for leaf in torch.utils._pytree.tree_leaves(value)}
    simple = {int, float, bool, str, type(None), torch.nn.Parameter, torch.Tensor}
    return kinds <= simple and not kinds.isdisjoint({torch.Tensor, torch.nn.Parameter})
