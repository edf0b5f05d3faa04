"""``LoadReport``: what a load did, name by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt.checkpoint.lazy import table_behind
from cloudckpt.dcp.load_plan import saved_types

__all__ = ["LoadReport"]

logger = logging.getLogger("cloudckpt")

_FEW = 3  # names that a row of the table shows
_GROUPS = re.compile(r"(?<![^.])param_groups(?![^.])")
"""Where an optimizer's state dict has its parameter groups, and beside them its state."""

_ROWS = {
    "missing": "not in the checkpoint, kept",
    "unexpected": "in the checkpoint only",
    "converted": "converted",
    "left_alone": "left alone",
    "optimizer": "optimizer state not loaded",
}


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank; ``str()`` is a table of up to ten lines.

    Names are those in the checkpoint: keys joined by dots.

    Attributes:
        uri: The checkpoint.
        loaded: What was loaded.
        missing: What the checkpoint does not have; it keeps its values. Empty if the load was
            strict.
        unexpected: What only the checkpoint has, apart from ``optimizer``.
        converted: What was loaded in another way than it was saved, and how: into another type, or
            into other parts, as of a tensor that is sharded in another way.
        left_alone: What keeps its value though the checkpoint has something there, and why.
        optimizer: The saved state of optimizers for which the state dict has no place, such as of
            parameters that are frozen now, or of an optimizer that has made no step.
    """

    uri: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: Mapping[str, str] = field(default_factory=dict)
    left_alone: Mapping[str, str] = field(default_factory=dict)
    optimizer: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        wanted: Mapping[str, Any],
        plan: LoadPlan,
        metadata: Metadata,
        uri: str,
        *,
        left_alone: Mapping[str, str],
        known: Collection[str] = (),
    ) -> LoadReport:
        """The report of a load that has succeeded.

        Args:
            wanted: What was to be loaded, by flat names.
            plan: What was read.
            metadata: What the checkpoint has.
            uri: The checkpoint.
            left_alone: What was left out of ``wanted``, and why.
            known: Further names that are not unexpected.
        """
        stored = metadata.state_dict_metadata
        others = [
            name
            for name in stored
            if name not in wanted and name not in left_alone and name not in known
        ]
        names = [name for name in wanted if isinstance(name, str)]
        beside = {name[: found.start()] for name in names if (found := _GROUPS.search(name))}
        states = tuple(f"{prefix}state." for prefix in beside)
        dtype_of = saved_types(metadata)
        converted = dict.fromkeys(_moved(plan.items, metadata), "saved in other parts")
        for name, value in wanted.items():
            saved, now = dtype_of(name), getattr(value, "dtype", None)
            if saved is not None and isinstance(now, torch.dtype) and saved != now:
                converted[name] = f"{saved} to {now}"
        return cls(
            uri=uri,
            loaded=tuple(name for name in wanted if name in stored and name not in left_alone),
            missing=tuple(name for name in wanted if name not in stored and name not in left_alone),
            unexpected=tuple(name for name in others if not states or not name.startswith(states)),
            converted=converted,
            left_alone={name: why for name, why in left_alone.items() if f"{name}." not in states},
            optimizer=tuple(name for name in others if states and name.startswith(states)),
        )

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} of {self.uri}"]
        for name, title in _ROWS.items():
            found = getattr(self, name)
            if found:
                lines.append(f"{title}: {len(found)}, {_shown(found)}")
        return "\n".join(lines)

    def log(self) -> None:
        """Logs it, if it has more than what was loaded; as a warning if that may not be meant."""
        if self.left_alone:
            logger.warning(
                "%s: left as it was, though the checkpoint has something there: %s",
                self.uri,
                _shown(self.left_alone),
            )
        if self.optimizer:
            logger.warning(
                "%s: the state of the optimizer is there, beneath %s, and is not loaded, as the "
                "state dict has no place for it (%d entries): an optimizer that has made no step, "
                "or whose parameters are frozen, has no state for them. Take both from "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)",
                self.uri,
                _above(self.optimizer),
                len(self.optimizer),
            )
        if any(getattr(self, name) for name in _ROWS):
            logger.info("%s", self)


def _shown(names: Collection[str]) -> str:
    found = [*names][:_FEW]
    reasons = names if isinstance(names, Mapping) else {}
    texts = [f"{name} ({reasons[name]})" if name in reasons else name for name in found]
    more = [f"and {len(names) - _FEW} more"] * (len(names) > _FEW)
    return ", ".join([*texts, *more])


def _above(names: Iterable[str]) -> str:
    """The part of a name up to ``state``, if all are beneath it; else the first name."""
    first, *others = names
    top = re.sub(r"(?<![^.])state\..*", "state", first)
    return top if all(name.startswith(f"{top}.") for name in others) and others else first


def _moved(items: Sequence[ReadItem], metadata: Metadata) -> set[str]:
    """The tensors of which something is read that is not all of a part that was saved."""
    tensors = [item for item in items if item.type == LoadItemType.TENSOR]
    moved: set[str] = set()
    seen: set[tuple[str, Any]] = set()
    by_rank: dict[int, tuple[list[int], list[tuple[int, ...]], list[str]]] = {}
    table = table_behind(metadata)
    for item in tensors:
        name, index = item.dest_index.fqn, item.storage_index.index
        place = name, item.dest_index.offset
        if place in seen:
            moved.add(name)
        seen.add(place)
        if table is not None:
            entry = table.entries[item.storage_index.fqn]
            rows, lengths, names = by_rank.setdefault(len(item.lengths), ([], [], []))
            rows.append(entry.place + (index or 0))
            lengths.append(tuple(item.lengths))
            names.append(name)
            continue
        stored = metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata) or index is None:
            continue
        if stored.chunks[index].sizes != item.lengths:
            moved.add(name)
    for depth, (rows, lengths, names) in by_rank.items():
        if depth and table is not None:
            sizes = table.chunks[depth].sizes[torch.tensor(rows, device="cpu")]
            differs = (sizes != torch.tensor(lengths, device="cpu")).any(1).tolist()
            moved.update(name for name, moves in zip(names, differs, strict=True) if moves)
    return moved
