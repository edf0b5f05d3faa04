"""Patches frameworks so that they take URIs, now or as soon as they are imported.

``install`` must not import a framework, and a framework may have been imported before it. So a
table here maps each framework module to the module of this package that knows how to change it (its
function ``changes``); the change is made at once, or as soon as the framework module is imported.

A framework is changed in all of its modules or in none: if one of them has an unknown shape, the
earlier changes are reverted and all of its modules refuse URIs (:mod:`.shapes`). This never makes
the import of a framework fail.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change
from cloudckpt.fork import late_imports
from cloudckpt.integrations.shapes import UnknownShapeError, refusals

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("cloudckpt")

_LIGHTNING = (
    "fabric.plugins.io.torch_io",
    "fabric.strategies.fsdp",
    "fabric.strategies.model_parallel",
    "fabric.strategies.strategy",
    "pytorch.callbacks.model_checkpoint",
    "pytorch.core.saving",
    "pytorch.strategies.fsdp",
    "pytorch.strategies.model_parallel",
    "pytorch.strategies.strategy",
)
_LIGHTNING_LOCAL_ONLY = (
    "fabric.loggers.csv_logs",
    "fabric.loggers.tensorboard",
    "fabric.strategies.deepspeed",
    "fabric.strategies.xla_fsdp",
    "pytorch.profilers.profiler",
    "pytorch.strategies.deepspeed",
)
_LOCAL_ONLY = (
    "accelerate.tracking",
    "accelerate.utils.dataclasses",
    "peft.config",
    "peft.peft_model",
    "ray.train._checkpoint",
    "torch_checkpointing.storage.filesystem",
    "torchtitan.trainer",
    "transformers.configuration_utils",
    "transformers.feature_extraction_utils",
    "transformers.generation.configuration_utils",
    "transformers.image_processing_base",
    "transformers.modeling_utils",
    "transformers.pipelines.base",
    "transformers.processing_utils",
    "transformers.tokenization_mistral_common",
    "transformers.tokenization_utils_base",
    "transformers.trainer",
    "transformers.training_args",
    "transformers.video_processing_utils",
)
_ALONE = {"fabric": "lightning_fabric", "pytorch": "pytorch_lightning"}
"""Parts of ``lightning``, and the standalone packages with the same code."""


def _in_both_packages(modules: Iterable[str]) -> Iterator[str]:
    for name in modules:
        part, _, rest = name.partition(".")
        yield from (f"lightning.{name}", f"{_ALONE[part]}.{rest}")


_ADAPTERS = {
    **dict.fromkeys(_in_both_packages(_LIGHTNING), "cloudckpt.integrations.lightning_plain"),
    **dict.fromkeys(
        [*_in_both_packages(_LIGHTNING_LOCAL_ONLY), *_LOCAL_ONLY],
        "cloudckpt.integrations.local_only",
    ),
    "accelerate.accelerator": "cloudckpt.integrations.accelerate",
    "torchtitan.components.checkpointer.dcp": "cloudckpt.integrations.torchtitan",
    "torchtitan.components.checkpointer.torch_checkpointing": (
        "cloudckpt.integrations.torchtitan_manager"
    ),
}
"""Framework modules, and the module here that knows how to change each."""

_PART_OF = {_ALONE["fabric"]: _ALONE["pytorch"]}
"""Packages that are changed together with another one."""

_ABSENT = object()
"""Marks an attribute that a class inherited rather than defined."""

_watched: set[str] = set()
_replaced: dict[str, list[Change]] = {}
"""By framework: the originals."""
_unknown: dict[str, str] = {}
"""Frameworks with an unknown shape, and what is unknown about each."""


def watch(framework: str = "") -> None:
    """Changes framework modules, now or when they are imported; does nothing the second time.

    Args:
        framework: The package to change; all of them by default.
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
    """Reverts :func:`watch`: restores the original contents of each module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    _watched.clear()
    _unknown.clear()
    for framework in [*_replaced]:
        _revert(framework)


class _Watch(MetaPathFinder):
    """Observes imports; changes each watched module once it has been executed."""

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
                if module.__name__ == name:  # one loader may load a whole archive
                    _adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adapt(module: ModuleType) -> None:
    """Changes a module, or makes its framework refuse URIs; never raises."""
    framework = _framework_of(module.__name__)
    if framework in _unknown:
        _refuse(module, framework)
        return
    try:
        with late_imports:
            adapter: Any = importlib.import_module(_ADAPTERS[module.__name__])
        _replace(framework, list(adapter.changes(module)))
    except Exception as error:  # noqa: BLE001 - the import of a framework must not fail for us
        unlike = error if isinstance(error, UnknownShapeError) else repr(error)
        _unknown[framework] = str(unlike)
        _revert(framework)
        for name in _watched:
            if _framework_of(name) == framework and name in sys.modules:
                _refuse(sys.modules[name], framework)


def _refuse(module: ModuleType, framework: str) -> None:
    try:
        _replace(framework, list(refusals(module, _unknown[framework])))
    except Exception:
        logger.exception("%s can't be kept from making local folders of URIs", module.__name__)


def _framework_of(module: str) -> str:
    package = module.partition(".")[0]
    return _PART_OF.get(package, package)


def _replace(framework: str, changes: list[Change]) -> None:
    for owner, name, value in changes:
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        _replaced.setdefault(framework, []).append((owner, name, before))


def _revert(framework: str) -> None:
    replaced = _replaced.pop(framework, [])
    while replaced:
        owner, name, before = replaced.pop()
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
