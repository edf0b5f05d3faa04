"""The private names of torch.distributed that the adapters need, in this one place."""

from __future__ import annotations

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    _EmptyStateDictLoadPlanner as EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.distributed_c10d import (
    _get_object_coll_device as device_for_collectives,
)
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

__all__ = [
    "EmptyStateDictLoadPlanner",
    "ExtensionRegistry",
    "StreamTransformExtension",
    "create_chunk_list",
    "device_for_collectives",
    "flatten_state_dict",
    "set_element",
    "set_group_timeout",
]
