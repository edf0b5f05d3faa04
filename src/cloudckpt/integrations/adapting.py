"""What frameworks have changed in them, so that they take URIs: when they are imported.

``install`` must not import a framework, and a framework may have been imported before it. So each
module of a framework that is to be changed stands in a table here with the module of this package
that knows how (its function ``changes``); it is changed at once, or as soon as it is imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change
from cloudckpt.fork import late_imports

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("cloudckpt")

_LIGHTNING = (
    "lightning.fabric.plugins.io.torch_io",
    "lightning.fabric.strategies.fsdp",
    "lightning.fabric.strategies.model_parallel",
    "lightning.fabric.strategies.strategy",
    "lightning.pytorch.callbacks.model_checkpoint",
    "lightning.pytorch.core.saving",
    "lightning.pytorch.strategies.fsdp",
    "lightning.pytorch.strategies.model_parallel",
    "lightning.pytorch.strategies.strategy",
)
_ADAPTERS = {
    **dict.fromkeys(_LIGHTNING, "cloudckpt.integrations.lightning_plain"),
    "accelerate.accelerator": "cloudckpt.integrations.accelerate",
    "lightning.fabric.strategies.deepspeed": "cloudckpt.integrations.local_only",
    "lightning.pytorch.strategies.deepspeed": "cloudckpt.integrations.local_only",
    "transformers.modeling_utils": "cloudckpt.integrations.local_only",
    "transformers.tokenization_utils_base": "cloudckpt.integrations.local_only",
    "transformers.trainer": "cloudckpt.integrations.local_only",
    "transformers.training_args": "cloudckpt.integrations.local_only",
    "torchtitan.components.checkpointer.dcp": "cloudckpt.integrations.torchtitan",
}
"""Modules of frameworks, and what knows how to change each."""

_watched: set[str] = set()
_replaced: list[Change] = []


def watch(framework: str = "") -> None:
    """Changes modules of frameworks, now or when they are imported; does nothing the second time.

    One that does not look as those that are known is left as it is, and that is logged.

    Args:
        framework: The package that is changed; all of them by default.
    """
    for name in _ADAPTERS:
        if name in _watched or framework not in ("", name.partition(".")[0]):
            continue
        _watched.add(name)
        if name in sys.modules:
            _adapt(sys.modules[name])
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def unwatch() -> None:
    """Reverts :func:`watch`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    _watched.clear()
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)


class _Watch(MetaPathFinder):
    """Sees modules being imported; those that are watched are changed when they have been run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _watched:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adapt(module: ModuleType) -> None:
    with late_imports:
        adapter: Any = importlib.import_module(_ADAPTERS[module.__name__])
    try:
        changes = list(adapter.changes(module))
    except AttributeError as error:
        logger.warning(
            "this %s is newer than this cloudckpt knows, and is left as it is: %s",
            module.__name__.partition(".")[0],
            error,
        )
        return
    for owner, name, value in changes:
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)
