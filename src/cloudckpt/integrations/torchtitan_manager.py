"""torchtitan's manager on torch_checkpointing: ``install()``, and ``--checkpoint.folder s3://…``.

The manager takes a storage, yet refuses URIs. ``install`` makes its options build a subclass, which
passes it our storage when given a URI, and sets the URI afterwards. The manager of torchtitan 0.3
does not save yet and takes no storage: it is made to refuse URIs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.integrations.shapes import function, refusals
from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from cloudckpt.uri import CheckpointURI

__all__ = ["changes"]


def changes(module: ModuleType) -> Iterator[Change]:
    """Makes the manager of ``torchtitan.components.checkpointer.torch_checkpointing`` take URIs.

    Raises:
        UnknownShapeError: If it takes a storage, but does not otherwise look as expected.
    """
    build = function(module, "TorchCheckpointingManager.__init__", "config", "base_folder")
    if "storage_config" not in inspect.signature(build).parameters:
        yield from refusals(module, "its TorchCheckpointingManager takes no storage")
        return
    function(module.filesystem, "join")
    function(module, "TorchCheckpointingManager.Config.build")
    manager = module.TorchCheckpointingManager
    yield manager.Config, "_owner", _on_uris(module)


def _is_ours(folder: str | None) -> bool:
    text = (folder or "").strip()
    return bool(text) and CheckpointURI.accepts(text) and CheckpointURI.parse(text).is_cloud


def _on_uris(module: ModuleType) -> type:
    """A subclass of the manager, with the manager's options."""
    base: Any = module.TorchCheckpointingManager

    class TorchCheckpointingManager(base):  # type: ignore[misc]
        def __init__(
            self, config: Any, *, base_folder: str = "", storage_config: Any = None, **rest: Any
        ) -> None:
            folder = module.filesystem.join(base_folder, config.folder)
            begun_with = config.initial_load_path
            if not (_is_ours(folder) or _is_ours(begun_with)):
                super().__init__(
                    config, base_folder=base_folder, storage_config=storage_config, **rest
                )
                return
            local = copy.copy(config)  # which it does not refuse
            local.folder, local.initial_load_path = "checkpoint", None
            storage = storage_config or CloudStorageConfig(chosen_config())
            super().__init__(local, base_folder=base_folder, storage_config=storage, **rest)
            self.folder, self.initial_load_path = folder, begun_with

    TorchCheckpointingManager.__qualname__ = base.__qualname__
    TorchCheckpointingManager.__module__ = base.__module__
    return TorchCheckpointingManager
