"""The private names of torch.distributed that the adapters need, in this one place."""

from __future__ import annotations

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

__all__ = ["ExtensionRegistry", "StreamTransformExtension", "set_element", "set_group_timeout"]
