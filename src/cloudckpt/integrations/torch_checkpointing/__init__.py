"""torch_checkpointing: a ``StorageConfig`` by which it saves to URIs and loads from them.

>>> from torch_checkpointing.checkpoint_manager import CheckpointManager  # doctest: +SKIP
>>> config = CheckpointManager.Config(storage_config=CloudStorageConfig())  # doctest: +SKIP
>>> config.build().save("s3://bucket/run/step-1000", {"model": state})  # doctest: +SKIP

torch_checkpointing commits a checkpoint by renaming the folder that all ranks have written to. Here
each file is an object, and the commit is one conditional write of a manifest. The module
``storage`` implements torch_checkpointing's interface, ``folders`` writes, commits and deletes
files and folders, and ``visible`` decides which of them a job sees. Only ``storage`` imports
torch_checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt._lazy import imported_later

if TYPE_CHECKING:
    from cloudckpt.integrations.torch_checkpointing.storage import CloudStorage, CloudStorageConfig

__all__ = ["CloudStorage", "CloudStorageConfig"]

if not TYPE_CHECKING:  # type checkers would accept any name with it
    __getattr__, __dir__ = imported_later(__name__, {"storage": "CloudStorage CloudStorageConfig"})
