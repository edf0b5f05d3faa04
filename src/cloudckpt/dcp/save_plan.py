"""Plans what a rank saves, and keeps the last plans for later state dicts of the same structure.

A kept plan is this rank's part of a plan that all ranks have made together, and with which they
have committed a save. Each common plan has a number, which the coordinator drew at random: ranks
whose kept plans have the same number can use them without planning together again.

A plan follows from the keys of a state dict, from the positions of its values, and from the shapes,
types and placements of its tensors; not from their contents. Its outline (:func:`outline_of`) has
all of this. Outlines are compared by equality, not by a digest, so that no structure is ever
mistaken for another. A state dict with a value whose effect on a plan is uncertain has no outline,
and is planned anew at each save.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cloudckpt.checkpoint.manifest import Planned
from cloudckpt.checkpoint.object_plan import StoredForm
from cloudckpt.checkpoint.record import Extents
from cloudckpt.checkpoint.shard import (
    check_placements,
    check_shards,
    check_supported,
    small_form_of,
)
from cloudckpt.checkpoint.structure import Flat, Structure, check_nesting
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
from cloudckpt.errors import UnsupportedTensorError
from cloudckpt.fork import module_lock
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.memory import PLAIN

__all__ = [
    "CloudSavePlanner",
    "GroupRef",
    "KnownPlan",
    "PlanKey",
    "drop",
    "find",
    "flags_of",
    "lost_by_flattening",
    "new_number",
    "outline_of",
    "ref_to",
    "remember",
]


class CloudSavePlanner(DefaultSavePlanner):
    """Plans like torch's ``DefaultSavePlanner``, with errors that name the item."""

    @classmethod
    def like(cls, planner: SavePlanner) -> SavePlanner:
        """Returns a planner of this class in place of torch's ``DefaultSavePlanner``.

        Any other planner is returned unchanged, also one that caches plans or has a replaced
        method.
        """
        if type(planner) is not DefaultSavePlanner or _is_changed(planner):
            return planner
        return cls(
            flatten_state_dict=planner.flatten_state_dict,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict as torch's planner does.

        Without ``flatten_state_dict``, the containers in it are saved unchanged. torch's planner
        rebuilds them even then: keys become strings, empty containers are lost, and so is one of
        two keys that become the same string.

        Raises:
            KeyCollisionError: If two entries of the state dict would have the same name.
            UnsupportedValueError: If a container contains itself, or is nested too deeply.
        """
        check_nesting(state_dict)
        self.is_coordinator = is_coordinator
        self.state_dict = {str(key): value for key, value in state_dict.items()}
        uri = None if storage_meta is None else storage_meta.checkpoint_id
        if self.flatten_state_dict or len(self.state_dict) < len(state_dict):
            flat = Flat(state_dict, None if uri is None else str(uri))  # names two keys of one name
        if self.flatten_state_dict:
            self.state_dict, self.mappings = flatten_sharded_tensors(flat.values), flat.paths

    def create_local_plan(self) -> SavePlan:
        """Plans this rank's items as torch's planner does.

        Raises:
            UnsupportedTensorError: If torch can't plan to save a tensor, for example a lazy one,
                or if a tensor has a partial placement or declares invalid shards.
        """
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                check_placements(value, name)
            else:
                check_shards(value, name)
        try:
            with paused_gc():
                return super().create_local_plan()
        except Exception:
            for name, value in self.state_dict.items():
                if isinstance(value, torch.Tensor):
                    _check_planned(name, value)
            raise


def _check_planned(name: str, value: torch.Tensor) -> None:
    """Refuses a tensor that torch can't plan to save.

    Raises:
        UnsupportedTensorError: If torch raises an error when it plans to save this tensor alone.
    """
    try:
        create_default_local_save_plan({name: value}, is_coordinator=False)
    except Exception as exc:
        if type(value) in PLAIN:
            check_supported(value, name)
        raise UnsupportedTensorError(
            f"{name} is a {type(value).__name__}, which can't be saved. Save it in another form, "
            "such as a plain tensor of its values, or leave it out; give a lazy module its "
            "parameters first, by a forward pass",
            item=name,
            cause=exc,
        ) from exc


def lost_by_flattening(state_dict: dict[str, Any], planner: object, uri: str) -> Structure:
    """Returns the original keys and the empty dicts that the flat names of a state dict lack.

    The result is empty if the planner does not derive from torch's, does not flatten, or has
    changed the state dict, so that its names have other paths.

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
_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, tuple))
_VALUE = "a pickled value"  # its plan does not depend on the value


class _UnknownError(Exception):
    """Raised for a value whose effect on a plan is uncertain."""


def outline_of(flat: Flat) -> tuple[Any, ...] | None:
    """Returns what a plan depends on: the properties of a state dict, and whether grad is enabled.

    Returns None if the effect of a value on a plan is uncertain.
    """
    try:
        values = [*map(_about, flat.values.values())]
    except (_UnknownError, RuntimeError):  # tensors without a shape raise the latter
        return None
    # DTensor.to_local() depends on the first
    return torch.is_grad_enabled(), [*flat.paths.values()], flat.structure(), values


def _about(value: Any) -> Any:
    """Returns all properties of a value that affect its plan, or the layout of its bytes.

    Raises:
        _UnknownError: If they are uncertain.
    """
    cls = type(value)
    if cls in PLAIN:
        return _tensor(value)
    if cls is DTensor:
        return _dtensor(value)
    if cls not in _VALUES and (
        isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")
    ):
        raise _UnknownError
    return _VALUE


def _dtensor(tensor: DTensor) -> tuple[Any, ...]:
    spec = tensor._spec
    mesh, placements = spec.mesh, spec.placements
    kinds = tuple(map(type, placements))
    if type(mesh) is not DeviceMesh or not _PLACEMENTS.issuperset(kinds):
        raise _UnknownError
    return (
        mesh,
        kinds,  # in torch 2.9, a StridedShard equals the Shard of its dimension
        placements,
        tensor.shape,
        tensor.requires_grad,
        _attributes(tensor),
        _tensor(tensor._local_tensor),
    )


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns all properties of a tensor that affect its plan, or the layout of its bytes.

    Pinning is left out: torch's metadata has it, but no reader uses it, and checking it releases
    the GIL, which takes milliseconds per tensor next to a busy trainer.

    Raises:
        _UnknownError: If they are uncertain, as for a class derived from Tensor.
    """
    cls = type(tensor)
    if cls not in PLAIN or tensor.layout is not torch.strided:
        raise _UnknownError
    return (
        cls,
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_contiguous(),
        tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()),
        _attributes(tensor),
    )


def _attributes(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the shards that a tensor declares by attributes; None if it declares none.

    Raises:
        _UnknownError: If the effect of the attributes on a plan is uncertain.
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
"""Maximum plans that are kept in memory: a job may save state dicts of several structures."""

GroupRef: TypeAlias = "weakref.ref[dist.ProcessGroup] | None"


def ref_to(group: dist.ProcessGroup | None) -> GroupRef:
    """Returns a weak reference to a process group; None if this process is alone."""
    return None if group is None else weakref.ref(group)


PlanKey: TypeAlias = "tuple[GroupRef, tuple[Any, ...], tuple[Any, ...]]"
"""What a plan depends on: the ranks, the planner's and writer's options, and the outline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlan:
    """This rank's plan of a save, kept for later saves of the same structure.

    Attributes:
        key: What the plan depends on; None if the state dict has no outline: the plan is then not
            kept.
        number: The plan's number, the same on all ranks.
        plan: The plan of the items that this rank writes.
        copies: The items that this rank has in common with others.
        of_all: On the coordinator, the plan of all ranks; None on others.
        expected: About how many bytes this rank will write; 0 before :meth:`finished`.
        forms: For each item that is a small tensor in host memory, how it is stored; None for
            others. Empty before :meth:`finished`, and if the plan is not kept.
        extents: The locations of the items in the last save; empty before the first.
        of_ranks: By rank, the locations of its items in the last save; empty before the first save,
            and on ranks other than the coordinator.
        saves: How many saves have used the plan.
        record: The plan, encoded as a :class:`Record` without locations; None until it is needed.
    """

    key: PlanKey | None
    number: int
    plan: SavePlan
    copies: Copies
    of_all: Planned | None
    expected: int = 0
    forms: Sequence[StoredForm | None] = ()
    extents: Extents = field(default_factory=Extents.none)
    of_ranks: tuple[Extents, ...] = ()
    saves: int = 0
    record: bytes | None = None

    def finished(self, planner: DefaultSavePlanner) -> KnownPlan:
        """Returns a copy with the result of ``finish_plan``, :attr:`expected` and :attr:`forms`.

        Raises:
            UnsupportedTensorError: If a tensor can't be stored.
        """
        plan = planner.finish_plan(self.plan)
        made = replace(self, plan=plan, expected=expected_size(plan.items))
        if self.key is None:
            return made  # it is not kept
        forms = [
            None
            if item.tensor_data is None
            else _form(
                item.index.fqn, planner.state_dict[item.index.fqn], item.tensor_data.chunk.sizes
            )
            for item in plan.items
        ]
        return replace(made, forms=forms)

    def small_tensors(self, planner: DefaultSavePlanner) -> SmallTensors:
        """Returns the small tensors, which can be sent without asking the planner for data.

        The list has an entry for each item: None if the item is not a small tensor in host memory,
        else its form and the tensor. The list is empty if :attr:`forms` is empty.
        """
        return [
            None if form is None else (form, _local(planner.state_dict[item.index.fqn]))
            for item, form in zip(self.plan.items, self.forms, strict=False)
        ]


_plans: list[KnownPlan] = []  # the last used one first
_lock = module_lock()


def find(key: PlanKey) -> KnownPlan | None:
    """Returns the kept plan with this key; None if no such plan is kept."""
    with _lock:
        return next((plan for plan in _plans if plan.key == key), None)


def drop(plan: KnownPlan) -> None:
    """Drops a kept plan; a save that uses the plan keeps it again once the save has committed.

    A failed save leaves no kept plan, since ranks may have seen different outcomes.
    """
    with _lock:
        _plans[:] = [other for other in _plans if other is not plan]


def remember(plan: KnownPlan) -> None:
    """Keeps a plan for later saves, unless it has no key; replaces a kept plan with the same key.

    Only the last few plans are kept.
    """
    if plan.key is not None:
        with _lock:
            _plans[:] = [plan, *(other for other in _plans if other.key != plan.key)][:_MOST]


def flags_of(planner: object) -> tuple[Any, ...] | None:
    """Returns the settings on which a planner's plans depend; None if no plan may be kept.

    Only plans of a :class:`CloudSavePlanner` that flattens the state dict are kept, and only if it
    does not cache plans itself and has no replaced method.
    """
    if type(planner) is not CloudSavePlanner or _is_changed(planner):
        return None
    return (planner.dedup_save_to_lowest_rank,) if planner.flatten_state_dict else None


def _is_changed(planner: DefaultSavePlanner) -> bool:
    return planner._enable_plan_caching or any(map(callable, vars(planner).values()))


def new_number() -> int:
    """Returns a random number for a new plan."""
    return PLAN_ANEW + 1 + secrets.randbelow(1 << 61)


def _form(name: str, value: torch.Tensor, sizes: torch.Size) -> StoredForm | None:
    """Returns how a small tensor in host memory is stored; None for any other tensor.

    Also returns None if the item, of the shape ``sizes``, is only a part of this rank's tensor.

    Raises:
        UnsupportedTensorError: If the tensor can't be stored.
    """
    local = _local(value)
    if type(local) not in PLAIN or local.shape != sizes:
        return None
    check_supported(local, name)
    return small_form_of(local)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor in this rank's memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
