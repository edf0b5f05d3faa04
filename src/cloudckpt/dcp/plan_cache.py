"""The plans of the last saves of this process, for saves of the same structure.

An entry is this rank's part of a plan that all ranks have made together, and that they have saved
by once, to the end. Its number was drawn at random by the coordinator, so that ranks which have an
entry of the same number can use what each of them remembers without telling each other more. What
is remembered is the structure and not a digest of it: it is compared, see ``outline``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.checkpoint.draft import Planned
from cloudckpt.checkpoint.shard import SmallForm
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import Extents
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.outline import Outline
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.fork import ModuleLock

__all__ = [
    "KnownPlan",
    "OfAllRanks",
    "digest_of",
    "flags_of",
    "forget",
    "new_number",
    "remember",
    "take",
]

_MOST = 4
"""Entries that are kept: a model and its averages, say, or the state of two engines."""


@dataclass(frozen=True, eq=False)
class OfAllRanks:
    """What the coordinator remembers of a save.

    Attributes:
        planned: What all ranks write.
        digests: By rank, that of its plan.
        extents: By rank, where its items lay in its objects in the last save.
    """

    planned: Planned
    digests: tuple[bytes, ...]
    extents: tuple[Extents, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlan:
    """What this rank remembers of a save.

    Attributes:
        number: Of the plan, the same on all ranks.
        group: The ranks; None for a process alone.
        flags: Of the planner, see :func:`flags_of`, and the algorithm of the store's checksums.
        outline: Of this rank's state dict, without its values.
        names: The flat names of its values, in the outline's order.
        mappings: Where they stood, by their names.
        structure: What flattening has lost of it.
        plan: What this rank writes.
        digest: Of that.
        expected: About how many bytes it will write.
        leaves: Of each item the number of its value.
        forms: Of each item that is a small tensor in host memory how it looks in an object.
        extents: Where the items lay in this rank's objects in the last save.
        saves: How many saves were made by it.
        record: What it writes, as a record without places; empty if columns can't have that, and
            None if nobody has asked yet.
        of_all: On the coordinator, what it knows of all ranks.
    """

    number: int
    group: dist.ProcessGroup | None
    flags: tuple[Any, ...]
    outline: Outline
    names: tuple[str, ...]
    mappings: dict[str, Any]
    structure: Structure
    plan: SavePlan
    digest: bytes
    expected: int
    leaves: Sequence[int]
    forms: Sequence[SmallForm | None]
    extents: Extents = field(default_factory=Extents.none)
    saves: int = 0
    record: bytes | None = None
    of_all: OfAllRanks | None = None


_entries: list[KnownPlan] = []  # the last one used stands first
_lock = ModuleLock()


def take(
    group: dist.ProcessGroup | None, flags: tuple[Any, ...], outline: Outline
) -> KnownPlan | None:
    """The entry for a state dict of this outline, which is the caller's from then on.

    A save that fails does not bring it back: ranks may have heard of different ends. And another
    thread that saves the same meanwhile does not find it.
    """
    with _lock:
        for entry in _entries:
            if entry.group is group and entry.flags == flags and entry.outline == outline:
                _entries.remove(entry)
                return entry
    return None


def remember(entry: KnownPlan) -> None:
    """Keeps an entry, in the place of one for the same structure."""
    with _lock:
        held = [other for other in _entries if not _is_for_the_same(other, entry)]
        _entries[:] = [entry, *held][:_MOST]


def forget() -> None:
    """Forgets all entries."""
    with _lock:
        _entries.clear()


def _is_for_the_same(one: KnownPlan, other: KnownPlan) -> bool:
    return one.group is other.group and one.flags == other.flags and one.outline == other.outline


def flags_of(planner: object) -> tuple[Any, ...] | None:
    """What a plan depends on besides the state dict; None for planners of a user's own.

    One that keeps plans itself, and one of which a method was replaced, is a user's own, too.
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
    """The number of a new plan, which no other has."""
    return PLAN_ANEW + 1 + secrets.randbelow(1 << 61)


def digest_of(plan: SavePlan) -> bytes:
    """Of what a rank writes and in which order, so that the coordinator can compare it."""
    made = hashlib.blake2b(digest_size=16)
    for item in plan.items:
        data = item.tensor_data
        about = None if data is None else (tuple(data.chunk.sizes), str(data.properties.dtype))
        where = None if item.index.offset is None else tuple(item.index.offset)
        made.update(repr((item.index.fqn, where, item.type.value, about)).encode())
    return made.digest()
