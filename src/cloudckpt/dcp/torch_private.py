"""The private names of torch.distributed that the adapters need, in this one place."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import (
    _flatten_sharded_tensors as flatten_sharded_tensors,
)
from torch.distributed.checkpoint._traverse import traverse_state_dict
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
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "set_group_timeout",
    "state_dict_being_planned",
    "traverse_state_dict",
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


def state_dict_being_planned() -> tuple[Any, Any] | None:
    """The state dict and the planner of the save that has called the caller, if torch's saver has.

    A storage writer is never shown the state dict, and torch's planner drops it once it is
    flattened: it is only in the variables of the function of torch that calls both. None if this
    torch keeps it elsewhere.
    """
    frame = sys._getframe(1)
    for _ in range(8):  # wrappers and subclasses of the writer may stand between
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            found = frame.f_locals
            if "state_dict" in found and "planner" in found:
                return found["state_dict"], found["planner"]
            return None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
