"""The plans of the last saves of this process, for saves of the same structure.

An entry is this rank's part of a plan that all ranks have made together, and completed one save by.
The coordinator drew its number at random, so ranks whose entries have the same number can use them
without exchanging anything else. The structure itself is kept and compared, not a digest of it, see
``outline``.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.checkpoint.manifest import Planned
from cloudckpt.checkpoint.object_plan import Form
from cloudckpt.checkpoint.record import Extents
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.dcp.copies import Copies
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.outline import Outline
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.fork import module_lock

__all__ = [
    "GroupRef",
    "KnownPlan",
    "OfAllRanks",
    "digest_of",
    "drop",
    "find",
    "flags_of",
    "forget",
    "new_number",
    "ref_to",
    "remember",
]

_MOST = 4
"""Entries that are kept: for example, a model and its averages, or the state of two engines."""

GroupRef: TypeAlias = "weakref.ref[dist.ProcessGroup] | None"


def ref_to(group: dist.ProcessGroup | None) -> GroupRef:
    """What stands for a group in a cache, without keeping it: None for a process alone."""
    return None if group is None else weakref.ref(group)


@dataclass(frozen=True, eq=False)
class OfAllRanks:
    """What the coordinator remembers of a save.

    Attributes:
        planned: What all ranks write.
        digests: By rank, the digest of its plan.
        extents: By rank, where its items lay in its objects in the last save.
    """

    planned: Planned
    digests: tuple[bytes, ...]
    extents: tuple[Extents, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlan:
    """What this rank remembers of a save.

    Attributes:
        number: The plan's number, the same on all ranks.
        group: The ranks, as :func:`ref_to` has it, so that a destroyed group is freed.
        flags: Of the planner, see :func:`flags_of`, and the algorithm of the store's checksums.
        outline: Of this rank's state dict, without its values.
        names: The flat names of its values, in the outline's order.
        mappings: Where they stood, by their names.
        structure: What flattening has lost of it.
        plan: What this rank writes.
        digest: The digest of ``plan``.
        expected: About how many bytes it will write.
        leaves: By item, the number of its value.
        forms: By item, its form in an object; None unless it is a small tensor in host memory.
        extents: Where the items lay in this rank's objects in the last save.
        saves: How many saves have used the plan.
        record: What it writes, as a record without locations; None until it is needed.
        copies: What this rank has in common with others.
        of_all: On the coordinator, what it knows of all ranks.
    """

    number: int
    group: GroupRef
    flags: tuple[Any, ...]
    outline: Outline
    names: tuple[str, ...]
    mappings: dict[str, Any]
    structure: Structure
    plan: SavePlan
    digest: bytes
    expected: int
    leaves: Sequence[int]
    forms: Sequence[Form | None]
    extents: Extents = field(default_factory=Extents.none)
    saves: int = 0
    record: bytes | None = None
    copies: Copies = Copies()
    of_all: OfAllRanks | None = None


_entries: list[KnownPlan] = []  # the last one used stands first
_lock = module_lock()


def find(
    group: dist.ProcessGroup | None, flags: tuple[Any, ...], outline: Outline
) -> KnownPlan | None:
    """The entry for a state dict of this outline; None if there is none."""
    with _lock:
        for entry in _entries:
            if entry.group == ref_to(group) and entry.flags == flags and entry.outline == outline:
                return entry
    return None


def drop(entry: KnownPlan) -> None:
    """Forgets an entry, as a save by it begins; once that has committed, it is kept again.

    A failed save leaves none, since ranks may have seen different outcomes.
    """
    with _lock:
        _entries[:] = [other for other in _entries if other is not entry]


def remember(entry: KnownPlan) -> None:
    """Keeps an entry, replacing one for the same structure."""
    with _lock:
        held = [other for other in _entries if not _is_for_the_same(other, entry)]
        _entries[:] = [entry, *held][:_MOST]


def forget() -> None:
    """Forgets all entries."""
    with _lock:
        _entries.clear()


def _is_for_the_same(one: KnownPlan, other: KnownPlan) -> bool:
    return one.group == other.group and one.flags == other.flags and one.outline == other.outline


def flags_of(planner: object) -> tuple[Any, ...] | None:
    """What a plan depends on besides the state dict; None for custom planners.

    A planner that caches plans itself, or has a replaced method, counts as custom, too.
    """
    if type(planner) not in (CloudSavePlanner, DefaultSavePlanner):
        return None
    assert isinstance(planner, DefaultSavePlanner)
    if planner._enable_plan_caching or any(map(callable, vars(planner).values())):
        return None
    if not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return None
    return type(planner), planner.dedup_save_to_lowest_rank


def new_number() -> int:
    """A unique number for a new plan."""
    return PLAN_ANEW + 1 + secrets.randbelow(1 << 61)


def digest_of(plan: SavePlan) -> bytes:
    """Digest of what a rank writes and in which order, for the coordinator to compare."""
    made = hashlib.blake2b(digest_size=16)
    for item in plan.items:
        data = item.tensor_data
        about: tuple[Any, ...] | None = None
        if data is not None:
            about = (tuple(data.size), tuple(data.chunk.sizes), str(data.properties.dtype))
        where = None if item.index.offset is None else tuple(item.index.offset)
        made.update(repr((item.index.fqn, where, item.type.value, about)).encode())
    return made.digest()
