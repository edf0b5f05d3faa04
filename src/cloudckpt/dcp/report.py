"""``LoadReport``: what a load did, name by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.lazy import table_behind
from cloudckpt.dcp.load_plan import conversions, saved_types

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
    "doubtful": "loaded, and changed by torch",
}

_CAST = (
    "which torch.optim.Optimizer.load_state_dict converts to the type of the parameter, unless "
    "the optimizer has its own load_state_dict"
)
_EMPTY = (
    "a group without parameters, of which set_optimizer_state_dict loses lr, betas, eps and "
    "weight_decay: leave it out, or set them again"
)


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
        doubtful: What was loaded, and what torch's own functions change when the state dict is
            passed on to an optimizer, and how: state of whole numbers, and empty groups.
    """

    uri: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: Mapping[str, str] = field(default_factory=dict)
    left_alone: Mapping[str, str] = field(default_factory=dict)
    optimizer: tuple[str, ...] = ()
    doubtful: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        wanted: Mapping[str, Any],
        metadata: Metadata,
        uri: str,
        *,
        left_alone: Mapping[str, str] | None = None,
        converted: Mapping[str, str] | None = None,
        unused: Collection[str] = (),
    ) -> LoadReport:
        """The report of a load that has succeeded.

        Args:
            wanted: What was to be loaded, by flat names.
            metadata: What the checkpoint has.
            uri: The checkpoint.
            left_alone: What keeps its value though the checkpoint has something there, and why.
            converted: What was loaded in another way, and how; None if the planner does not say.
            unused: Names of values that are of other ranks, or were read and not taken.
        """
        stored, left = _names_in(metadata), left_alone or {}
        if converted is None:
            types = conversions(wanted, saved_types(metadata))
            converted = {name: f"{saved} to {now}" for name, (saved, now) in types.items()}
        groups = [name for name in wanted if isinstance(name, str) and "param_groups" in name]
        beside = {name[: found.start()] for name in groups if (found := _GROUPS.search(name))}
        states = tuple(f"{prefix}state." for prefix in beside)
        missing = wanted.keys() - stored - left.keys() - converted.keys()
        apart = missing.union(left, unused)
        others = stored - wanted.keys() - left.keys() - {*unused}
        optimizer = {name for name in others if states and name.startswith(states)}
        others -= optimizer
        return cls(
            uri=uri,
            loaded=tuple(name for name in wanted if name not in apart) if apart else (*wanted,),
            missing=tuple(name for name in wanted if name in missing) if missing else (),
            unexpected=tuple(name for name in stored if name in others) if others else (),
            converted=converted,
            left_alone={name: why for name, why in left.items() if f"{name}." not in states},
            optimizer=tuple(name for name in stored if name in optimizer) if optimizer else (),
            doubtful=_doubtful(wanted, groups, states, metadata),
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
                "%s: left as it was, although the checkpoint has an entry of this name: %s",
                self.uri,
                _shown(self.left_alone),
            )
        if self.optimizer:
            logger.warning(
                "%s: the checkpoint has %d entries of optimizer state, under %s, that were not "
                "loaded, as the state dict has no entries for them: an optimizer that has made "
                "no step, or whose parameters are frozen, has no state for them. Take both "
                "from torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)",
                self.uri,
                len(self.optimizer),
                _above(self.optimizer),
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


def _names_in(metadata: Metadata) -> AbstractSet[str]:
    """The names that a checkpoint has, in their order."""
    table = table_behind(metadata)
    return metadata.state_dict_metadata.keys() if table is None else table.names.keys()


def _doubtful(
    wanted: Mapping[str, Any], groups: Sequence[str], states: tuple[str, ...], metadata: Metadata
) -> dict[str, str]:
    """What torch's functions that take a loaded state of an optimizer change, and how."""
    found: dict[str, str] = {}
    params = {name: wanted[name] for name in groups if name.endswith(".params")}
    if any(isinstance(one, list) and one and isinstance(one[0], str) for one in params.values()):
        empty = [name for name, one in params.items() if one == []]
        found.update((name, _EMPTY) for name in empty if _next_group(name) in params)
    table = table_behind(metadata)
    kinds = [] if table is None else [form.dtype for form in table.forms]
    if states and any(map(_is_cast, kinds)):
        dtype_of = saved_types(metadata)
        for name in wanted:
            if name.startswith(states) and not name.endswith(".step"):
                dtype = dtype_of(name)
                if dtype is not None and _is_cast(dtype):
                    found[name] = f"{dtype}, {_CAST}"
    return found


def _next_group(params: str) -> str:
    """The name of the next group's parameters: of the last group nothing is lost."""
    group, _, last = params.rpartition(".")
    where, _, number = group.rpartition(".")
    return f"{where}.{int(number) + 1}.{last}"


def _is_cast(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
