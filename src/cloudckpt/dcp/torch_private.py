"""The private names of torch.distributed that the adapters need, in this one place."""

from __future__ import annotations

import importlib
import logging

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.distributed_c10d import (
    _get_object_coll_device as device_for_collectives,
)

try:
    from torch.distributed import set_timeout as set_group_timeout  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # before torch 2.14
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

__all__ = [
    "ExtensionRegistry",
    "StreamTransformExtension",
    "create_chunk_list",
    "dcp_logger",
    "device_for_collectives",
    "flatten_state_dict",
    "set_element",
    "set_group_timeout",
]


def dcp_logger() -> logging.Logger | None:
    """The logger of torch's checkpointing; None if this torch has none, or keeps it elsewhere.

    It is looked up at each call, since a module that is reloaded with another handler has another.
    """
    try:
        module = importlib.import_module("torch.distributed.checkpoint.logger")
    except ImportError:
        return None
    found = getattr(module, "_dcp_logger", None)
    return found if isinstance(found, logging.Logger) else None
