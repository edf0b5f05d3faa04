"""Lightning's own classes on URIs, after ``install``: what ours of the same name do.

Plain strategies, the plugin that saves whole checkpoints, ``ckpt_path="last"`` of its callback, and
``load_from_checkpoint`` take URIs; paths go Lightning's way. A whole checkpoint is saved by the
first rank: that this failed is told to the others, which would wait for it at a barrier.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import CheckpointNotFoundError
from cloudckpt.integrations.parts import uri_of

__all__ = ["changes"]

_PATHS = ("path", "filepath", "checkpoint_path", "path_or_url")
_STRATEGIES = {"model_parallel": "ModelParallelStrategy", "fsdp": "FSDPStrategy"}


def changes(module: ModuleType) -> Iterator[Change]:
    """What is changed in a module of Lightning's.

    Raises:
        AttributeError: If it does not look as expected.
    """
    kind: Any
    _, room, *_, file = module.__name__.split(".")
    if file == "strategy":
        kind = module.Strategy
        yield kind, "save_checkpoint", _told_to_all(kind.save_checkpoint)
    elif file in _STRATEGIES:
        kind = getattr(module, _STRATEGIES[file])
        for name in ("save_checkpoint", "load_checkpoint"):
            yield kind, name, _led(getattr(kind, name), _of_strategy(room, _STRATEGIES[file], name))
    elif file == "torch_io":
        kind = module.TorchCheckpointIO
        for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"):
            yield kind, name, _led(getattr(kind, name), _of_plugin(name))
    elif file == "saving":
        load = _of_plugin("load_checkpoint")
        yield module, "pl_load", _led(module.pl_load, lambda *args, **kw: load(None, *args, **kw))
    else:
        kind = module.ModelCheckpoint
        resolve = kind._ModelCheckpoint__resolve_ckpt_dir
        yield kind, "setup", _setting_up(kind.setup, resolve)
        yield kind, "_find_last_checkpoints", _finding(kind._find_last_checkpoints, resolve)


def _ours(module: str) -> Any:
    """A module of ours, which imports Lightning: not before that is all there."""
    return importlib.import_module(f"cloudckpt.integrations.{module}")


def _of_strategy(room: str, kind: str, name: str) -> Callable[..., Any]:
    def act(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _ours("fabric" if room == "fabric" else "lightning")
        return getattr(getattr(ours, f"Cloud{kind}"), name)(self, *args, **kwargs)

    return act


def _of_plugin(name: str) -> Callable[..., Any]:
    def act(_: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_ours("fabric").CloudCheckpointIO(chosen_config()), name)(*args, **kwargs)

    return act


def _led(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Leads calls with a URI to ours, but for single files that Lightning itself has saved."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not _gives_uri(signature.bind(*args, **kwargs)):
            return original(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except CheckpointNotFoundError as missing:
            try:
                return original(*args, **kwargs)
            except FileNotFoundError:
                raise missing from None

    return method


def _gives_uri(given: inspect.BoundArguments) -> bool:
    """Whether a method of Lightning's is given a URI for a path."""
    paths = (given.arguments[name] for name in _PATHS if name in given.arguments)
    return any(uri_of(path) is not None for path in paths)


def _told_to_all(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        if not _gives_uri(signature.bind(*args, **kwargs)):
            original(*args, **kwargs)
        else:
            Meeting.of(None, False).begin(lambda: original(*args, **kwargs))

    return save_checkpoint


def _setting_up(original: Callable[..., None], resolve: Callable[..., Any]) -> Callable[..., None]:
    """Refuses a folder that was a URI once before the first step, and not at the first save; that
    the first rank can't list it is told to all.
    """

    @functools.wraps(original)
    def setup(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if uri_of(resolve(self, trainer)) is None:
            original(self, trainer, *args, **kwargs)
        else:
            Meeting.of(None, False).begin(lambda: original(self, trainer, *args, **kwargs))

    return setup


def _finding(original: Callable[..., Any], resolve: Callable[..., Any]) -> Callable[..., Any]:
    """What is behind ``ckpt_path="last"``, which loses the bucket of a URI."""

    @functools.wraps(original)
    def _find_last_checkpoints(self: Any, trainer: Any) -> set[str]:
        root = uri_of(resolve(self, trainer))
        if root is None:
            return set(original(self, trainer))
        return set(_ours("lightning").newest_in(root, chosen_config()))

    return _find_last_checkpoints
