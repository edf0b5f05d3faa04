"""Plans what a rank saves, and keeps the plans of the last saves for ones of the same structure.

A kept plan is this rank's part of a plan that all ranks have made together and committed a save
with. The coordinator drew its number at random, so ranks whose plans have the same number can use
them without exchanging anything else.

A plan follows from the keys of a state dict, from the positions of its values, and from the shapes,
types and placements of its tensors; not from their contents. An :class:`Outline` holds all of this
in a form that is fast to make and compare. Outlines are compared by equality, not by a digest, so
that no structure is ever mistaken for another. A state dict that contains anything whose effect on
a plan is uncertain has no outline, and is planned anew at each save.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.manifest import Planned
from cloudckpt.checkpoint.object_plan import StoredForm
from cloudckpt.checkpoint.record import Extents
from cloudckpt.checkpoint.shard import (
    check_placements,
    check_shards,
    check_supported,
    small_form_of,
)
from cloudckpt.checkpoint.structure import Flat, Structure, check_nesting, is_flattened
from cloudckpt.checkpoint.torch_private import (
    PLANS_ITSELF,
    StridedShard,
    declared_shards,
    declares_shards,
    flatten_sharded_tensors,
)
from cloudckpt.dcp.copies import Copies
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.saving import SmallTensors, expected_size
from cloudckpt.fork import module_lock
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.memory import PLAIN

__all__ = [
    "CloudSavePlanner",
    "GroupRef",
    "KnownPlan",
    "OfAllRanks",
    "Outline",
    "drop",
    "find",
    "flags_of",
    "forget",
    "lost_by_flattening",
    "new_number",
    "ref_to",
    "remember",
]


class CloudSavePlanner(DefaultSavePlanner):
    """Plans as torch does, in about half the time, with errors that name the item."""

    @classmethod
    def like(cls, planner: SavePlanner) -> SavePlanner:
        """Returns a planner with the flags of one of torch's; any other planner as it is."""
        if type(planner) is not DefaultSavePlanner or _is_changed(planner):
            return planner
        return cls(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict as torch's planner does.

        Without ``flatten_state_dict``, containers are saved unchanged. torch rebuilds them: keys
        become strings, of two keys with the same string one is lost, and so are empty containers.

        Raises:
            KeyCollisionError: If two entries of the state dict would have the same name.
            UnsupportedValueError: If a container contains itself.
        """
        check_nesting(state_dict)
        self.is_coordinator, self.state_dict = is_coordinator, state_dict
        if self.flatten_state_dict:
            uri = None if storage_meta is None else storage_meta.checkpoint_id
            flat = Flat(state_dict, None if uri is None else str(uri))
            self.state_dict, self.mappings = flat.values, flat.paths
        if not self.flatten_sharded_tensors:
            return
        rebuilt = flatten_sharded_tensors(self.state_dict)
        if self.flatten_state_dict:
            self.state_dict = rebuilt
            return
        self.state_dict = {}
        for key, value in state_dict.items():
            if isinstance(value, (Mapping, list)):
                self.state_dict[key] = value
            elif str(key) in rebuilt:  # a rank may have no shard of a tensor
                self.state_dict[str(key)] = rebuilt[str(key)]

    def create_local_plan(self) -> SavePlan:
        """Plans this rank's items as torch's planner does.

        Raises:
            UnsupportedTensorError: If a tensor is nested (and so has no size to plan for), has a
                partial placement, or declares invalid shards.
        """
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                check_placements(value, name)
            else:
                check_shards(value, name)
            # torch's ShardedTensor has no is_nested, and other classes may not either
            is_asked = type(value) is torch.Tensor or is_traceable_wrapper_subclass(value)
            if is_asked and value.is_nested:
                check_supported(value, name)
        with paused_gc():
            return super().create_local_plan()


def lost_by_flattening(state_dict: dict[str, Any], planner: object, uri: str) -> Structure:
    """Returns the nesting that flattening has lost of a state dict, as far as it is known.

    The planner's paths are compared with the state dict. For planners that do not derive from
    torch's, and ones that save another state dict than they were given, this is empty.

    Args:
        state_dict: The state dict that is being saved.
        planner: The planner that has planned the save.
        uri: The checkpoint, for messages.

    Raises:
        KeyCollisionError: If two entries of the state dict would have the same name.
    """
    if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
        return Structure()
    with paused_gc():
        flat = Flat(state_dict, uri)
        structure = flat.structure()
    return structure if flat.paths == planner.mappings else Structure()


_PLACEMENTS = frozenset((Partial, Replicate, Shard, StridedShard))
_DICTS = frozenset((dict, OrderedDict, defaultdict))
_KEYS = frozenset((bool, float, bytes, type(None)))  # besides str and int
_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, tuple))
_VALUE = "a pickled value"  # its plan does not depend on the value


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
        self._signature: list[Any] = [torch.is_grad_enabled()]  # DTensor.to_local() depends on it
        self._meshes: dict[int, tuple[int, Any]] = {}

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Outline | None:
        """Returns the outline of a state dict; None if a value's effect on a plan is uncertain."""
        made = cls()
        try:
            made._dict(state_dict)
        except (_UnknownError, RuntimeError):  # tensors without a shape raise the latter
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
        """Returns a copy to keep, without the values."""
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
            # torch writes them as text, while True equals 1, and 0.0 equals -0.0
            elif type(key) in _KEYS:
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
        """Adds a list entry, or a rare type of dict entry."""
        assert self.leaves is not None
        kind = type(value)
        if kind in _DICTS:
            self._dict(value)
            return
        if isinstance(value, list) and is_flattened(value):
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
            isinstance(value, (torch.Tensor, Mapping))  # some of these have any attribute
            or hasattr(value, "__create_write_items__")
        ):
            raise _UnknownError
        else:
            told = _VALUE
        self._signature.append(told)
        self.leaves.append(value)

    def _dtensor(self, tensor: DTensor) -> tuple[Any, ...]:
        spec, local = tensor._spec, tensor._local_tensor
        mesh, placements = spec.mesh, spec.placements
        kinds = tuple(map(type, placements))
        if type(mesh) is not DeviceMesh or not _PLACEMENTS.issuperset(kinds):
            raise _UnknownError
        number, _ = self._meshes.setdefault(id(mesh), (len(self._meshes), mesh))
        return (
            number,
            kinds,  # in torch 2.9, a StridedShard equals the Shard of its dimension
            placements,
            tensor.shape,
            tensor.requires_grad,
            _attributes(tensor),
            _tensor(local),
        )


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns all properties of a tensor that affect its plan, or the layout of its bytes.

    Not whether it is pinned: torch's metadata record it, but no reader uses it, and this check
    releases the GIL, which takes milliseconds per tensor next to a busy trainer.
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
    """Returns the shards that a tensor declares by attributes; None if they change no plan.

    Raises:
        _UnknownError: If their effect on a plan is uncertain.
    """
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


_MOST = 4
"""Maximum entries: enough, for example, for a model and its averages, or two engines."""

GroupRef: TypeAlias = "weakref.ref[dist.ProcessGroup] | None"


def ref_to(group: dist.ProcessGroup | None) -> GroupRef:
    """Returns a reference to a group that does not keep it alive; None for a process alone."""
    return None if group is None else weakref.ref(group)


@dataclass(frozen=True, eq=False)
class OfAllRanks:
    """The plan and the locations of all ranks, which the coordinator keeps for later saves.

    Attributes:
        planned: The plan of all ranks.
        digests: The digest of each rank's plan, by rank; empty before the first save by it.
        extents: The locations of each rank's items in the last save, by rank.
    """

    planned: Planned
    digests: tuple[bytes, ...] = ()
    extents: tuple[Extents, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlan:
    """This rank's plan of a save, kept for later saves of the same structure.

    Attributes:
        number: The plan's number, the same on all ranks.
        group: The ranks, as :func:`ref_to` returns it, so that a destroyed group is freed.
        flags: The flags of the planner, see :func:`flags_of`, and the store's checksum algorithm.
        outline: The outline of this rank's state dict, without its values; None if it has none.
        structure: The nesting that flattening has lost.
        plan: The plan of the items that this rank writes.
        copies: The items that this rank has in common with others.
        of_all: On the coordinator, the plan and the locations of all ranks.
        names: The flat names of the values, in the outline's order.
        mappings: The paths of the values, by their names.
        digest: The digest of ``plan``.
        expected: About how many bytes this rank will write.
        leaves: For each item, the number of its value.
        forms: For each item, its form in an object; None unless it is a small tensor in host
            memory.
        extents: The locations of the items in the last save.
        saves: How many saves have used the plan.
        record: The plan as a record without locations; None until it is needed.
    """

    number: int
    group: GroupRef
    flags: tuple[Any, ...]
    outline: Outline | None
    structure: Structure
    plan: SavePlan
    copies: Copies
    of_all: OfAllRanks | None
    names: tuple[str, ...] = ()
    mappings: dict[str, Any] = field(default_factory=dict)
    digest: bytes = b""
    expected: int = 0
    leaves: Sequence[int] = ()
    forms: Sequence[StoredForm | None] = ()
    extents: Extents = field(default_factory=Extents.none)
    saves: int = 0
    record: bytes | None = None

    def finished(self, planner: DefaultSavePlanner) -> KnownPlan:
        """Returns the plan as the planner finishes it, with the data that later saves need."""
        plan = planner.finish_plan(self.plan)
        made = replace(self, plan=plan, expected=expected_size(plan.items))
        if self.outline is None:
            return made  # it is not kept
        values = planner.state_dict
        numbers = {name: number for number, name in enumerate(values)}
        return replace(
            made,
            names=tuple(values),
            mappings=planner.mappings,
            digest=_digest_of(plan),
            leaves=[numbers[item.index.fqn] for item in plan.items],
            forms=[
                None
                if item.tensor_data is None
                else _form(item.index.fqn, values[item.index.fqn], item.tensor_data.chunk.sizes)
                for item in plan.items
            ],
        )

    def restore(self, planner: DefaultSavePlanner, outline: Outline, *, coordinates: bool) -> None:
        """Sets a planner up as it was when it made the plan, with the values of an outline."""
        assert outline.leaves is not None
        planner.state_dict = dict(zip(self.names, outline.leaves, strict=True))
        planner.mappings, planner.plan = self.mappings, self.plan
        planner.is_coordinator = coordinates

    def small_tensors(self, planner: DefaultSavePlanner) -> SmallTensors:
        """Returns the small tensors of the items, whose data need not come from the planner."""
        if not self.forms:
            return ()
        values = [*planner.state_dict.values()]
        return [
            None if form is None else (form, _local(values[leaf]))
            for leaf, form in zip(self.leaves, self.forms, strict=True)
        ]


_entries: list[KnownPlan] = []  # the last used one first
_lock = module_lock()


def find(
    group: dist.ProcessGroup | None, flags: tuple[Any, ...], outline: Outline
) -> KnownPlan | None:
    """Returns the kept plan for a state dict of this outline; None if no plan fits."""
    with _lock:
        for entry in _entries:
            if entry.group == ref_to(group) and entry.flags == flags and entry.outline == outline:
                return entry
    return None


def drop(entry: KnownPlan) -> None:
    """Drops a kept plan when a save by it begins; the save keeps it again once it has committed.

    A failed save leaves no kept plan, since ranks may have seen different outcomes.
    """
    with _lock:
        _entries[:] = [other for other in _entries if other is not entry]


def remember(entry: KnownPlan) -> None:
    """Keeps a plan for later saves, in place of one for the same structure."""
    with _lock:
        held = [other for other in _entries if not _is_for_the_same(other, entry)]
        _entries[:] = [entry, *held][:_MOST]


def forget() -> None:
    """Drops all kept plans."""
    with _lock:
        _entries.clear()


def _is_for_the_same(one: KnownPlan, other: KnownPlan) -> bool:
    return one.group == other.group and one.flags == other.flags and one.outline == other.outline


def flags_of(planner: object) -> tuple[Any, ...] | None:
    """Returns the settings of a planner on which a plan depends; None for custom planners.

    A planner that caches plans itself, or has a replaced method, counts as custom, too.
    """
    if type(planner) is not CloudSavePlanner or _is_changed(planner):
        return None
    if not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return None
    return (planner.dedup_save_to_lowest_rank,)


def _is_changed(planner: DefaultSavePlanner) -> bool:
    return planner._enable_plan_caching or any(map(callable, vars(planner).values()))


def new_number() -> int:
    """Returns a random number for a new plan."""
    return PLAN_ANEW + 1 + secrets.randbelow(1 << 61)


def _digest_of(plan: SavePlan) -> bytes:
    """Returns a digest of a rank's items and their order, for the coordinator to compare."""
    made = hashlib.blake2b(digest_size=16)
    for item in plan.items:
        data = item.tensor_data
        about: tuple[Any, ...] | None = None
        if data is not None:
            about = (tuple(data.size), tuple(data.chunk.sizes), str(data.properties.dtype))
        where = None if item.index.offset is None else tuple(item.index.offset)
        made.update(repr((item.index.fqn, where, item.type.value, about)).encode())
    return made.digest()


def _form(name: str, value: torch.Tensor, sizes: torch.Size) -> StoredForm | None:
    """Returns the form of an item that is a whole small tensor in host memory; else None.

    Raises:
        UnsupportedTensorError: If torch can't save the tensor.
    """
    local = _local(value)
    if type(local) not in PLAIN or local.shape != sizes:
        return None
    check_supported(local, name)
    return small_form_of(local)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor in this rank's memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
