"""torchtitan on URIs: ``install()``, and ``--checkpoint.folder s3://…``.

torchtitan (0.3 and later) saves and loads by torch's functions, which ``install`` leads here, and
lists and removes by fsspec, which :mod:`cloudckpt.integrations.fsspec` serves. What is left is the
last save in Hugging Face's format, which it refuses on what is not local, since torch's writer of
that format knows files only: :func:`adapt` has :func:`cloudckpt.hf.save` write it, and takes the
refusal back.

It is applied when torchtitan's module is imported, whether before ``install`` or after it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from cloudckpt.config import Config
from cloudckpt.hf import save as save_model
from cloudckpt.uri import CheckpointURI

__all__ = ["adapt", "watch", "unwatch"]

logger = logging.getLogger("cloudckpt")

_MODULE = "torchtitan.components.checkpointer.dcp"

_replaced: list[tuple[Any, str, Any]] = []
_config: Config | None = None


def watch(config: Config | None = None) -> None:
    """Adapts torchtitan, now or when it is imported; ``config`` has options for models saved."""
    global _config
    _config = config
    if _replaced or any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    if _MODULE in sys.modules:
        adapt(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Watch())


def unwatch() -> None:
    """Reverts :func:`watch`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)


class _Watch(MetaPathFinder):
    """Sees the module being imported; that is all it is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def adapt(module: ModuleType) -> None:
    """Has the managers of ``torchtitan.components.checkpointer.dcp`` save models to URIs.

    If they do not look as those of 0.3 they are left alone: then torchtitan refuses, as before.
    """
    try:
        manager = module.CheckpointManager
        config = module.BaseCheckpointManager.Config
        changes = [
            (config, "__post_init__", _accepting(config.__post_init__)),
            (manager, "dcp_save", _saving_models(manager.dcp_save)),
        ]
    except AttributeError as error:
        logger.warning(
            "this torchtitan is newer than this cloudckpt knows (%s): it saves no models in "
            "Hugging Face's format to URIs",
            error,
        )
        return
    for owner, name, value in changes:
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


def _is_ours(folder: str) -> bool:
    return CheckpointURI.accepts(folder) and CheckpointURI.parse(folder).is_cloud


def _accepting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The check of the options, which refuses the last save in this format on any URI."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:  # noqa: N807
        is_possible = self.last_save_model_only and _is_ours(self.folder)
        wanted = self.last_save_in_hf
        self.last_save_in_hf = wanted and not is_possible
        try:
            original(self)
        finally:
            self.last_save_in_hf = wanted

    return __post_init__


def _saving_models(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dcp_save(
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        *args: Any,
        to_hf: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not (to_hf and _is_ours(checkpoint_id)):
            return original(self, state_dict, checkpoint_id, *args, to_hf=to_hf, **kwargs)
        adapter = self.sd_adapter
        save_model(
            adapter.to_hf(state_dict),
            checkpoint_id,
            fqn_to_file=adapter.fqn_to_index_mapping or None,
            config=_config,
        )
        return None

    return dcp_save
