"""The private names of torch that the stored format consists of, in this one place."""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as OldTensorProperties,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["CURRENT_DCP_VERSION", "OldTensorProperties", "StorageInfo"]
