"""The private names of torch that the stored format and the adapters need."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import _weights_only_unpickler as _weights_only
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import (
    _flatten_sharded_tensors as flatten_sharded_tensors,
)
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MemoryFormat,  # noqa: N811 - it is a class
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.planner_helpers import _init_state_dict as init_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper as Collectives
from torch.distributed.distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _get_object_coll_device as device_for_collectives
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

try:
    from torch.distributed import set_timeout as set_group_timeout  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # before torch 2.14
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
try:
    from torch.distributed.checkpoint import protocol as _protocol  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # before torch 2.14
    _protocol = None

__all__ = [
    "CURRENT_DCP_VERSION",
    "PLANS_ITSELF",
    "Collectives",
    "ExtensionRegistry",
    "MemoryFormat",
    "StorageInfo",
    "Store",
    "StreamTransformExtension",
    "StridedShard",
    "allowed_by_torch",
    "allowed_by_user",
    "create_chunk_list",
    "declare_as",
    "declared_shards",
    "declares_shards",
    "default_store",
    "device_for_collectives",
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "forget_plans",
    "groups_joined",
    "init_state_dict",
    "is_filled",
    "set_group_timeout",
    "state_dict_being_planned",
    "store_of_group",
    "whole_shape",
]

allowed_by_torch: Callable[[], dict[str, Any]] = _weights_only._get_allowed_globals
"""Returns the classes, functions and constants that ``weights_only`` allows, by full names."""
allowed_by_user: Callable[[], dict[str, Any]] = _weights_only._get_user_allowed_globals
"""Returns the classes that ``torch.serialization.add_safe_globals`` allows, by full names."""

PLANS_ITSELF = frozenset(
    ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
)
"""The methods by which an object describes its own items to torch's planner.

They may be attributes of the object itself instead of its class.
"""

_FIELDS = () if _protocol is None else tuple(_protocol.CheckpointableTensor.__annotations__)


def declares_shards(value: object) -> bool:
    """Returns whether a tensor's attributes declare which parts of a larger tensor it holds.

    This is torch's protocol ``CheckpointableTensor``: ``global_shape``, ``global_offsets``,
    ``local_offsets`` and ``local_sizes``. Before torch 2.14 they have no meaning.
    """
    if not _FIELDS or not isinstance(value, torch.Tensor) or not hasattr(value, _FIELDS[0]):
        return False
    # torch's own check takes some microseconds
    return vars(value).keys() >= set(_FIELDS) or _protocol._is_checkpointable_tensor(value)


def declared_shards(tensor: object) -> tuple[Any, ...]:
    """Returns the attributes by which a tensor declares shards, as nested tuples of integers.

    Raises:
        TypeError: If an attribute contains anything but integers.
    """
    return tuple([_numbers(getattr(tensor, name)) for name in _FIELDS])


def _numbers(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, (tuple, list)) or getattr(value, "ndim", False):
        return tuple([_numbers(each) for each in value])
    return operator.index(value)


def declare_as(made: torch.Tensor, original: torch.Tensor) -> None:
    """Copies the attributes by which a tensor declares shards, if any, to a copy of the tensor."""
    if not declares_shards(original):
        return
    for name in vars(original).keys() & set(_FIELDS):  # a subclass may have the others
        value = vars(original)[name]
        with contextlib.suppress(TypeError):  # the planner refuses it
            value = _numbers(value)  # a list may change later
        setattr(made, name, value)


def whole_shape(value: Any) -> tuple[int, ...]:
    """Returns a tensor's shape, or that of the larger tensor whose parts it declares to hold."""
    return tuple(value.global_shape if declares_shards(value) else value.size())


def groups_joined() -> int:
    """Returns the number of process groups of this rank, which torch uses to name new groups."""
    return len(dist.distributed_c10d._world.pg_names)


def is_filled(plans: list[SavePlan], metadata: Metadata) -> bool:
    """Returns whether, by torch's own check, each tensor's chunks cover it without overlaps.

    torch's check returns a boolean in older versions (such as 2.9), a list of errors in newer
    ones.
    """
    found: Any = _validate_global_plan(plans, metadata)
    return found is True or found == []


def forget_plans(planner: SavePlanner) -> None:
    """Drops the plans that torch's planner keeps of earlier saves with ``enable_plan_caching``.

    If a save fails while it plans, torch 2.9, for example, may have kept a rank's local plan, but
    not its final one. The next save would use the final plan of an earlier state as its own, and
    send other bytes than its metadata describes.
    """
    key = getattr(planner, "_cached_plans_key", None)
    for name, kept in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(kept, dict):
            kept.pop(key, None)


def store_of_group(group: dist.ProcessGroup) -> Store | None:
    """Returns the key-value store of a process group, which adds the group's prefix to each key.

    Returns None if the group was destroyed or has no store, or if this version of torch keeps the
    store elsewhere.
    """
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    found = getattr(world, "pg_map", {}).get(group, (None, None))[1]
    return found if isinstance(found, Store) else None


def state_dict_being_planned() -> tuple[Any, Any] | None:
    """Returns the state dict and planner of torch's save on the call stack; None if there is none.

    torch does not pass the state dict to a storage writer, and the planner drops it after
    flattening. So it is taken from the local variables of torch's function. The result is also None
    if this version of torch keeps the state dict elsewhere.
    """
    frame = sys._getframe(1)
    for _ in range(8):  # wrappers and subclasses of the writer may be between
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            found = frame.f_locals
            if "state_dict" in found and "planner" in found:
                return found["state_dict"], found["planner"]
            return None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
