"""torch_checkpointing on URIs: a ``StorageConfig`` for our stores.

>>> from torch_checkpointing.checkpoint_manager import CheckpointManager  # doctest: +SKIP
>>> config = CheckpointManager.Config(storage_config=CloudStorageConfig())  # doctest: +SKIP
>>> config.build().save("s3://bucket/run/step-1000", {"model": state})  # doctest: +SKIP

torch_checkpointing commits a checkpoint by renaming the folder that all ranks have written to. Here
each file goes to an object of its own, and the commit is one conditional write of a manifest:
``storage`` is what torch_checkpointing calls, ``folders`` has files and folders, and their commit,
and ``visible`` what a job sees of them. Only ``storage`` imports torch_checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt._lazy import imported_later

if TYPE_CHECKING:
    from cloudckpt.integrations.torch_checkpointing.storage import CloudStorage, CloudStorageConfig

__all__ = ["CloudStorage", "CloudStorageConfig"]

if not TYPE_CHECKING:  # which would take any name for one of ours
    __getattr__, __dir__ = imported_later(__name__, {"storage": "CloudStorage CloudStorageConfig"})
