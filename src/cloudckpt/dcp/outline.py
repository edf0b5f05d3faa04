"""Whether a state dict has the structure of one that was planned before.

A plan follows from the keys of a state dict, from the positions of its values, and from the shapes,
types and placements of its tensors; not from what is in them. An :class:`Outline` holds all of this
in a form that is fast to make and compare. Outlines are compared by equality, not by a digest, so
that no structure is ever mistaken for another. A state dict that contains anything whose effect on
a plan is uncertain has no outline, and is planned anew at each save.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cloudckpt.checkpoint.torch_private import (
    PLANS_ITSELF,
    StridedShard,
    declared_shards,
    declares_shards,
)

__all__ = ["PLAIN", "Outline"]

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
"""The classes of tensors that are bytes in memory and nothing else."""

_PLACEMENTS = frozenset((Partial, Replicate, Shard, StridedShard))
_DICTS = frozenset((dict, OrderedDict, defaultdict))
_KEYS = frozenset((bool, float, bytes, type(None)))  # besides str and int
_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, tuple))
_VALUE = "a pickled value"  # whatever it is: its plan is the same


class _UnknownError(Exception):
    """A value whose effect on a plan is uncertain."""


class Outline:
    """The structure of a state dict, and its values in the order in which torch flattens it.

    Attributes:
        leaves: The values; None if they were dropped.
    """

    __slots__ = ("_meshes", "_signature", "leaves")

    def __init__(self) -> None:
        self.leaves: list[Any] | None = []
        self._signature: list[Any] = [torch.is_grad_enabled()]  # DTensor.to_local() heeds it
        self._meshes: dict[int, tuple[int, Any]] = {}

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Outline | None:
        """The outline of a state dict; None if it has none."""
        made = cls()
        try:
            made._dict(state_dict)
        except (_UnknownError, RuntimeError):  # of tensors that have no shape, for example
            return None
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outline):
            return NotImplemented
        return self._signature == other._signature and [
            mesh for _, mesh in self._meshes.values()
        ] == [mesh for _, mesh in other._meshes.values()]

    __hash__ = None  # type: ignore[assignment]

    def without_leaves(self) -> Outline:
        """A copy to keep, without the values."""
        kept = Outline()
        kept.leaves, kept._signature, kept._meshes = None, self._signature, self._meshes
        return kept

    def _dict(self, value: dict[Any, Any]) -> None:
        if type(value) not in _DICTS:
            raise _UnknownError
        told = self._signature.append
        told(type(value))
        told(len(value))
        assert self.leaves is not None
        leaf = self.leaves.append
        for key, entry in value.items():
            if type(key) is str or type(key) is int:
                told(key)
            elif type(key) in _KEYS:  # as torch names it: True equals 1, and 0.0 equals -0.0
                told((type(key), str(key)))
            else:
                raise _UnknownError
            kind = type(entry)
            if kind in PLAIN:
                told(_tensor(entry))
                leaf(entry)
            elif kind is DTensor:
                told(self._dtensor(entry))
                leaf(entry)
            elif kind in _VALUES:
                told(_VALUE)
                leaf(entry)
            else:
                self._other(entry)

    def _other(self, value: Any) -> None:
        """A list entry, or a rare kind of dict entry."""
        assert self.leaves is not None
        kind = type(value)
        if kind in _DICTS:
            self._dict(value)
            return
        if isinstance(value, list) and self._is_flattened(value):
            if kind is not list:
                raise _UnknownError
            self._signature += (list, len(value))
            for entry in value:
                self._other(entry)
            return
        if kind in PLAIN:
            told: Any = _tensor(value)
        elif kind is DTensor:
            told = self._dtensor(value)
        elif (
            isinstance(value, (torch.Tensor, Mapping))  # of which some have any attribute
            or hasattr(value, "__create_write_items__")
        ):
            raise _UnknownError
        else:
            told = _VALUE
        self._signature.append(told)
        self.leaves.append(value)

    def _is_flattened(self, value: list[Any]) -> bool:
        """Whether torch flattens a list: not if it has neither tensors nor dicts at any depth."""
        return any(
            isinstance(entry, (torch.Tensor, Mapping))
            or (isinstance(entry, list) and self._is_flattened(entry))
            for entry in value
        )

    def _dtensor(self, tensor: DTensor) -> tuple[Any, ...]:
        spec, local = tensor._spec, tensor._local_tensor
        mesh, placements = spec.mesh, spec.placements
        kinds = tuple(map(type, placements))
        if type(mesh) is not DeviceMesh or not _PLACEMENTS.issuperset(kinds):
            raise _UnknownError
        number, _ = self._meshes.setdefault(id(mesh), (len(self._meshes), mesh))
        return (
            number,
            kinds,  # torch 2.9 takes a StridedShard for equal to the Shard of its dimension
            placements,
            tensor.shape,
            tensor.requires_grad,
            _attributes(tensor),
            _tensor(local),
        )


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What determines the plan of a tensor in memory, and the location of its bytes.

    Not whether it is pinned: torch's metadata record it, but no reader uses it, and asking releases
    the GIL, which takes milliseconds per tensor next to a busy trainer.
    """
    kind = type(tensor)
    if kind not in PLAIN or tensor.layout is not torch.strided:
        raise _UnknownError
    return (
        kind,
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_contiguous(),
        tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()),
        _attributes(tensor),
    )


def _attributes(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What somebody's attributes of a tensor say about its plan; None if it is as without them."""
    attributes = vars(tensor)
    if not attributes:
        return None
    if not PLANS_ITSELF.isdisjoint(attributes):
        raise _UnknownError
    if not declares_shards(tensor):
        return None
    try:
        return declared_shards(tensor)
    except TypeError as exc:
        raise _UnknownError from exc
