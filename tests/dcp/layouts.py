"""How a state dict is spread over ranks: meshes and placements with a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from .values import assert_same, numbered

__all__ = ["LAYOUTS", "Layout", "check_local_parts", "full_state", "spread"]


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks and what each of its dimensions does to a tensor."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def world(self) -> int:
        return math.prod(self.mesh)


LAYOUTS = {
    "one rank": Layout((1,), (Shard(0),)),
    "2 rows": Layout((2,), (Shard(0),)),
    "2 columns": Layout((2,), (Shard(1),)),
    "3 rows": Layout((3,), (Shard(0),)),
    "4 rows": Layout((4,), (Shard(0),)),
    "4 columns": Layout((4,), (Shard(1),)),
    "4 replicas": Layout((4,), (Replicate(),)),
    "2x2 blocks": Layout((2, 2), (Shard(0), Shard(1))),
    "2 replicas of 2 rows": Layout((2, 2), (Replicate(), Shard(0))),
    "2 columns, replicated": Layout((2, 2), (Shard(1), Replicate())),
}


def full_state() -> dict[str, torch.Tensor]:
    """Shapes that no number of ranks divides, some smaller than the number of ranks."""
    return {
        "even": numbered(16, 12),
        "uneven": numbered(7, 5, dtype=torch.float64),
        "fewer rows than ranks": numbered(2, 9, dtype=torch.int32),
        "one row": numbered(1, 9, dtype=torch.int64),
        "vector": numbered(11, dtype=torch.bfloat16),
        "three dimensions": numbered(5, 3, 4, dtype=torch.int64),
        "one element": numbered(1, dtype=torch.float32, first=42),
        "large": numbered(301, 257, dtype=torch.float32),
    }


def spread(
    state: Mapping[str, torch.Tensor], layout: Layout, *, blank: bool = False
) -> dict[str, DTensor]:
    """The state as this rank holds it; or, if ``blank``, room for it."""
    mesh = init_device_mesh("cpu", layout.mesh)
    return {name: _spread(tensor, mesh, layout, blank) for name, tensor in state.items()}


def _spread(tensor, mesh, layout: Layout, blank: bool) -> DTensor:
    placements = [_fitting(placement, tensor) for placement in layout.placements]
    source = torch.full_like(tensor, 113) if blank else tensor
    return distribute_tensor(source, mesh, placements, src_data_rank=None)


def _fitting(placement: Placement, tensor: torch.Tensor) -> Placement:
    """Vectors have no columns to shard."""
    if isinstance(placement, Shard) and placement.dim >= tensor.dim():
        return Replicate()
    return placement


def check_local_parts(loaded: Mapping[str, DTensor], layout: Layout) -> None:
    """Whether this rank holds exactly what it would hold of the full state."""
    expected = spread(full_state(), layout)
    for name, tensor in loaded.items():
        assert tensor.placements == expected[name].placements
        assert_same(tensor.to_local(), expected[name].to_local(), name)
