"""The private names of torch.distributed.checkpoint that the adapters need, in this one place."""

from __future__ import annotations

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)

__all__ = ["ExtensionRegistry", "StreamTransformExtension"]
