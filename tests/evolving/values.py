"""Values of a state dict, described: what a description is on a rank, as a whole, and as room."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["FORMS", "PLACEMENTS", "RANDOM", "Each", "Here", "Many", "Own", "Plain", "Tensor"]
__all__ += ["Tied", "Value", "numbers"]


@dataclass(frozen=True)
class Here:
    """Where a value is made.

    Attributes:
        step: The save; values differ from one to the next.
        rank: The rank; None for a reader that has all of a state by itself.
        world: How many ranks there are.
        blank: Whether it is room to be loaded into.
        kept: Tensors of this process, which a training keeps and changes; by name.
        unlike: The names of values that differ from rank to rank.
        saved_by: How many ranks have saved what is loaded; 0 if as many as there are.
    """

    step: int
    rank: int | None
    world: int
    blank: bool = False
    kept: dict[str, tuple[Tensor, torch.Tensor]] | None = None
    unlike: frozenset[str] = frozenset()
    saved_by: int = 0

    @property
    def is_alone(self) -> bool:
        return self.rank is None

    def of_rank(self, rank: int) -> Here:
        """Where values differ from those of other ranks."""
        return dataclasses.replace(self, step=self.step + 1000 * (rank + 1))


def _turned(values: torch.Tensor) -> torch.Tensor:
    if values.dim() < 2:
        return _spaced(values)
    return values.mT.contiguous().mT


def _spaced(values: torch.Tensor) -> torch.Tensor:
    if not values.dim():
        return _inside(values)
    room = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
    room[..., ::2] = values
    return room[..., ::2]


def _inside(values: torch.Tensor) -> torch.Tensor:
    room = values.new_zeros(values.numel() + 5)
    room[3 : 3 + values.numel()] = values.reshape(-1)
    return room[3 : 3 + values.numel()].view(values.shape)


def _stretched(values: torch.Tensor) -> torch.Tensor:
    return values[:1].expand(values.shape) if values.dim() and values.numel() else values


def _channels_last(values: torch.Tensor) -> torch.Tensor:
    if values.dim() != 4:
        return _turned(values)
    return values.contiguous(memory_format=torch.channels_last)


def _negated(values: torch.Tensor) -> torch.Tensor:
    """The same values, as a view of their negatives; of types in which that is but the sign."""
    if values.dtype not in (torch.float32, torch.float64):
        return values
    return torch._neg_view(-values)


def _conjugate(values: torch.Tensor) -> torch.Tensor:
    return values.conj_physical().conj() if values.is_complex() else values


def _parameter(values: torch.Tensor) -> torch.Tensor:
    is_trained = values.is_floating_point() and values.itemsize > 1
    return torch.nn.Parameter(values, requires_grad=is_trained)


FORMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda values: values,
    "turned": _turned,
    "spaced": _spaced,
    "inside": _inside,
    "stretched": _stretched,
    "conjugate": _conjugate,
    "negated": _negated,
    "channels last": _channels_last,
    "parameter": _parameter,
}
"""How values lie in memory."""

PLACEMENTS: Mapping[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicas": (Replicate(),),
    "blocks": (Shard(0), Shard(1)),
    "rows of rows": (Shard(0), Shard(0)),
    "replicas of rows": (Replicate(), Shard(0)),
    "rows of others": (Shard(0),),
}
"""How a tensor is spread over ranks: those of two dimensions over four, those of others over all
but the first."""


@functools.cache
def _mesh(group: object, shape: tuple[int, ...], first: int) -> DeviceMesh:
    ranks = torch.arange(first, first + torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks)


def forget_meshes() -> None:
    """They belong to a process group that is gone."""
    _mesh.cache_clear()


@dataclass(frozen=True)
class Tensor:
    """A tensor, whose bytes follow from its name and the save.

    Attributes:
        shape: Of the whole.
        dtype: Without ``torch.``.
        form: Of `FORMS`.
        placed: Of `PLACEMENTS`; empty: each rank has all of it.
        frozen: Whether its bytes are the same in all saves.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    form: str = ""
    placed: str = ""
    frozen: bool = False

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize

    def made(self, name: str, here: Here) -> torch.Tensor:
        kept = here.kept.get(name) if here.kept is not None else None
        if kept is not None and kept[0] == self and self.form != "stretched":
            made = kept[1]
            local = made._local_tensor if isinstance(made, DTensor) else made
            with torch.no_grad():
                local.copy_(FORMS[self.form](self._local(self._values(name, here), here)[0]))
            return made
        made = self._made(self._values(name, here), here)
        if here.kept is not None:
            here.kept[name] = self, made
        return made

    def _made(self, values: torch.Tensor, here: Here) -> torch.Tensor:
        form = FORMS[self.form if not here.blank or self.form != "stretched" else ""]
        local, mesh, placements = self._local(values, here)
        if mesh is None:
            return form(local)
        return DTensor.from_local(
            form(local),
            mesh,
            placements,
            run_check=False,
            shape=values.shape,
            stride=values.stride(),
        )

    def _values(self, name: str, here: Here) -> torch.Tensor:
        """All of it, in row-major order."""
        dtype = getattr(torch, self.dtype)
        if here.blank:
            raw = torch.full((self.nbytes,), 113, dtype=torch.uint8)
        else:
            step = 0 if self.frozen else here.step
            raw = _noise(zlib.crc32(f"{name} {step}".encode()), self.nbytes)
        if dtype == torch.bool:
            return (raw & 1).bool().reshape(self.shape)
        values = raw.view(dtype).reshape(self.shape)
        return _stretched(values).contiguous() if self.form == "stretched" else values

    def _local(
        self, values: torch.Tensor, here: Here
    ) -> tuple[torch.Tensor, DeviceMesh | None, tuple[Placement, ...]]:
        """What a rank has of it, and how it is spread."""
        if not self.placed or here.rank is None:
            return values, None, ()
        placements = PLACEMENTS[self.placed]
        if len(placements) == 2 and here.world != 4:
            placements = placements[-1:]
        placements = tuple(_fitting(each, values) for each in placements)
        # torch's from_local takes the shape () for none
        first = int(self.placed == "rows of others" and here.world > 1 and values.dim() > 0)
        shape = (2, 2) if len(placements) == 2 else (here.world - first,)
        mesh = _mesh(dist.group.WORLD, shape, first)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return values.new_empty(0), mesh, placements
        for number, count, placement in zip(coordinate, shape, placements, strict=True):
            if isinstance(placement, Shard):
                parts = values.chunk(count, placement.dim)
                rest = values.narrow(placement.dim, 0, 0)
                values = parts[number] if number < len(parts) else rest
        return values.contiguous().clone(), mesh, placements


def _fitting(placement: Placement, values: torch.Tensor) -> Placement:
    if isinstance(placement, Shard) and placement.dim >= values.dim():
        return Replicate()
    return placement


def _noise(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes; the same for a seed."""
    period = 65_521  # a prime, so that no alignment hides that bytes are elsewhere
    made = torch.randint(
        0,
        256,
        (min(nbytes, period),),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return made.repeat(-(-nbytes // period))[:nbytes] if nbytes > period else made


@dataclass(frozen=True)
class Plain:
    """A value as it is."""

    value: Any = None

    def made(self, name: str, here: Here) -> Any:
        return self._room(self.value) if here.blank else copy.deepcopy(self.value)

    def _room(self, value: Any) -> Any:
        return {key: self._room(of) for key, of in value.items()} if type(value) is dict else None


MAKERS: Mapping[str, Callable[[int, int], Any]] = {
    "numbers": lambda count, step: [step + n / 7 for n in range(count)],  # as the losses so far
    "text": lambda count, step: chr(97 + step % 26) * count,
    "bytes": lambda count, step: bytes([97 + step % 26]) * count,
    "array": lambda count, step: np.arange(count, dtype="float64") + step,
    "matrix": lambda count, step: np.full((2, count), step, dtype="int32"),
    "scalar": lambda _, step: np.float64(step),
    "random of python": lambda _, step: random.Random(step).getstate(),
    "random of torch": lambda _, step: torch.Generator().manual_seed(step).get_state(),
    "random of numpy": lambda _, step: np.random.RandomState(step).get_state(),
}
"""Values, by their size and the save."""

RANDOM = tuple(kind for kind in MAKERS if kind.startswith("random"))
"""States of generators of random numbers."""


@dataclass(frozen=True)
class Value:
    """A value that differs from save to save.

    Attributes:
        kind: Of `MAKERS`.
        count: Its size.
    """

    kind: str
    count: int = 0

    def made(self, name: str, here: Here) -> Any:
        made = MAKERS[self.kind](self.count, here.step)
        if not here.blank:
            return made
        return torch.zeros_like(made) if isinstance(made, torch.Tensor) else None


def numbers(count: int) -> Value:
    """A list of floats."""
    return Value("numbers", count)


@dataclass(frozen=True)
class Many:
    """A dict of small tensors, or of small values."""

    count: int
    of_values: bool = False

    def made(self, name: str, here: Here) -> Any:
        one = Plain(here.step) if self.of_values else Tensor((3,))
        return {f"{n:04}": one.made(f"{name}.{n}", here) for n in range(self.count)}


@dataclass(frozen=True)
class Tied:
    """A dict of tensors that share memory, as tied weights do."""

    count: int

    def made(self, name: str, here: Here) -> Any:
        base = Tensor((self.count,)).made(f"{name}.all", dataclasses.replace(here, kept=None))
        rows = base[: self.count // 2 * 2].view(-1, 2)
        return {"all": base, "again": base, "half": base[self.count // 2 :], "columns": rows[:, 1]}


@dataclass(frozen=True)
class Own:
    """What only some ranks have: an entry of a dict that the others lack."""

    ranks: tuple[int, ...]
    of: Any


@dataclass(frozen=True)
class Each:
    """What each rank has a value of its own of."""

    of: Any
