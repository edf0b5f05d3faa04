"""Makes Lightning's own classes do on URIs, after ``install``, what ours of the same name do.

Plain strategies, the plugin that saves whole checkpoints, the checkpoint callback, and
``load_from_checkpoint`` take URIs; paths are handled by Lightning. This serves both ``lightning``
and ``pytorch_lightning``, which have the same code under two names; neither is imported. The first
rank saves a whole checkpoint and reports a failure to the others, which would otherwise wait for it
at a barrier.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import CheckpointNotFoundError, InvalidURIError
from cloudckpt.integrations.adapters import base_weights, without_base
from cloudckpt.integrations.lightning_folder import may_be_removed, newest_in
from cloudckpt.integrations.lightning_sharded import FabricOnStores, TrainerOnStores
from cloudckpt.integrations.lightning_whole import WholeOnStores, config_of
from cloudckpt.integrations.parts import uri_of
from cloudckpt.integrations.shapes import function
from cloudckpt.uri import CheckpointURI

__all__ = ["changes"]

_STRATEGIES = {"model_parallel": "ModelParallelStrategy", "fsdp": "FSDPStrategy"}
_PATHS = {"fabric": ("path", "path"), "trainer": ("filepath", "checkpoint_path")}
"""The names of strategies' parameters for the path to save to and the path to load from."""


def changes(module: ModuleType) -> Iterator[Change]:
    """The changes to one of Lightning's modules.

    Raises:
        UnknownShapeError: If the module does not look as expected.
    """
    kind: Any
    file = module.__name__.rpartition(".")[2]
    is_fabric = module.__name__.startswith(("lightning.fabric.", "lightning_fabric."))
    saved_to, loaded_from = _PATHS["fabric" if is_fabric else "trainer"]
    if file == "strategy":
        save = function(module, "Strategy.save_checkpoint", saved_to)
        if is_fabric:
            yield module.Strategy, "save_checkpoint", _told_to_all(save, saved_to)
            return
        load = function(module, "Strategy.load_checkpoint", loaded_from)
        function(module, "Strategy.save_checkpoint", "checkpoint")
        without = _without_base(save, saved_to)
        yield module.Strategy, "save_checkpoint", _told_to_all(without, saved_to)
        yield module.Strategy, "load_checkpoint", _with_base(load, loaded_from)
    elif file in _STRATEGIES:
        name, ours = _STRATEGIES[file], FabricOnStores if is_fabric else TrainerOnStores
        save = function(module, f"{name}.save_checkpoint", saved_to)
        load = function(module, f"{name}.load_checkpoint", loaded_from)
        kind = getattr(module, name)
        yield kind, "save_checkpoint", _led(save, saved_to, ours.save_checkpoint)
        yield kind, "load_checkpoint", _led(load, loaded_from, ours.load_checkpoint)
    elif file == "torch_io":
        for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"):
            original = function(module, f"TorchCheckpointIO.{name}", "path")
            yield module.TorchCheckpointIO, name, _led(original, "path", _of_plugin(name), True)
    elif file == "saving":
        ours_of_plugin = _of_plugin("load_checkpoint")
        load = function(module, "pl_load", "path_or_url")
        by_ours = functools.partial(ours_of_plugin, None)
        yield module, "pl_load", _led(load, "path_or_url", by_ours, True)
    else:
        yield from _of_callback(module)


def _of_callback(module: ModuleType) -> Iterator[Change]:
    kind: Any = module.ModelCheckpoint
    resolve = function(module, "ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir", "trainer")
    setup = function(module, "ModelCheckpoint.setup", "trainer")
    find = function(module, "ModelCheckpoint._find_last_checkpoints", "trainer")
    name = "_should_remove_checkpoint"
    judge = function(module, f"ModelCheckpoint.{name}", "trainer", "previous", "current")
    yield kind, "setup", _setting_up(setup, resolve)
    yield kind, "_find_last_checkpoints", _finding(find, resolve)
    yield kind, name, _removing_own(judge)


def _of_plugin(name: str) -> Callable[..., Any]:
    def act(_: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(WholeOnStores(chosen_config()), name)(*args, **kwargs)

    return act


def _led(
    original: Callable[..., Any],
    path: str,
    ours: Callable[..., Any],
    may_be_a_file: bool = False,
) -> Callable[..., Any]:
    """Redirects calls with a URI to our function.

    Args:
        original: Lightning's function.
        path: Its path parameter.
        ours: The function to call instead.
        may_be_a_file: Whether the original also knows single files on URIs, saved by Lightning
            itself: it is called where there is no checkpoint.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not _gives_uri(signature.bind(*args, **kwargs), path):
            return original(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except CheckpointNotFoundError as missing:
            if not may_be_a_file:
                raise
            try:
                return original(*args, **kwargs)
            except (FileNotFoundError, IsADirectoryError):
                raise missing from None

    return method


def _gives_uri(given: inspect.BoundArguments, path: str) -> bool:
    """Whether Lightning's method gets a URI as its path; web addresses are left to Lightning."""
    place = given.arguments.get(path)
    if place is None or (str(place).startswith("http") and not CheckpointURI.accepts(place)):
        return False
    return uri_of(place) is not None


def _told_to_all(original: Callable[..., None], path: str) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        if not _gives_uri(signature.bind(*args, **kwargs), path):
            original(*args, **kwargs)
        else:
            Meeting.of(None, False).begin(lambda: original(*args, **kwargs))

    return save_checkpoint


def _without_base(original: Callable[..., None], path: str) -> Callable[..., None]:
    """Saves a PEFT model without its base, as sharded strategies do."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        checkpoint = given.arguments.get("checkpoint")
        if _gives_uri(given, path) and isinstance(checkpoint, dict) and "state_dict" in checkpoint:
            plugin = self.checkpoint_io
            config = config_of(getattr(plugin, "checkpoint_io", plugin))
            state = without_base(self.lightning_module, checkpoint["state_dict"], config)
            given.arguments["checkpoint"] = {**checkpoint, "state_dict": state}
        original(*given.args, **given.kwargs)

    return save_checkpoint


def _with_base(original: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Fills in the base that a PEFT model was saved without: the model already has it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = original(self, *args, **kwargs)
        if _gives_uri(signature.bind(self, *args, **kwargs), path) and "state_dict" in checkpoint:
            state, mine = checkpoint["state_dict"], self.lightning_module.state_dict()
            for name in base_weights(self.lightning_module) & mine.keys():
                state.setdefault(name, mine[name])
        return checkpoint

    return load_checkpoint


def _setting_up(original: Callable[..., None], resolve: Callable[..., Any]) -> Callable[..., None]:
    """Refuses a mangled URI as the folder before the first step, not at the first save; if the
    first rank can't list the folder, all ranks raise.
    """

    @functools.wraps(original)
    def setup(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        folder = resolve(self, trainer)
        if f"{os.sep}file:{os.sep}" in str(folder):
            raise InvalidURIError(
                "Lightning takes a file:// URI as dirpath for a path below the working directory: "
                "write the path without file://, or use CloudModelCheckpoint",
                uri=str(folder),
            )
        if uri_of(folder) is None:
            original(self, trainer, *args, **kwargs)
        else:
            Meeting.of(None, False).begin(lambda: original(self, trainer, *args, **kwargs))

    return setup


def _finding(original: Callable[..., Any], resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Resolves ``ckpt_path="last"``, where Lightning loses the bucket of a URI."""

    @functools.wraps(original)
    def _find_last_checkpoints(self: Any, trainer: Any) -> set[str]:
        root = uri_of(resolve(self, trainer))
        if root is None:
            return set(original(self, trainer))
        return newest_in(root, chosen_config(), self.CHECKPOINT_NAME_LAST)

    return _find_last_checkpoints


def _removing_own(original: Callable[..., bool]) -> Callable[..., bool]:
    """Keeps what another run saved, which Lightning would delete unless it is on a local disk."""

    @functools.wraps(original)
    def _should_remove_checkpoint(self: Any, trainer: Any, previous: str, current: str) -> bool:
        if not CheckpointURI.accepts(previous) or uri_of(previous) is None:
            return original(self, trainer, previous, current)
        return previous != current and may_be_removed(previous, self.dirpath, trainer.ckpt_path)

    return _should_remove_checkpoint
