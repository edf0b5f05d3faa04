"""``LoadReport``: the result of a load, name by name."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.checkpoint.lazy import table_behind
from cloudckpt.dcp.copies import first_few
from cloudckpt.dcp.load_plan import conversions, parts_of, saved_type, table_of

__all__ = ["LoadReport"]

logger = logging.getLogger("cloudckpt")

_FEW = 3  # names that a row of the table shows
_GROUPS = re.compile(r"(?<![^.])param_groups(?![^.])")
"""The part of a name under which an optimizer's state dict has its parameter groups."""

_ROWS = {
    "missing": "not in the checkpoint, kept",
    "unexpected": "in the checkpoint only",
    "converted": "converted",
    "left_alone": "left as it was, although the checkpoint has an entry of this name",
    "optimizer": "optimizer state not loaded, as the state dict has no entries for it: an "
    "optimizer that has made no step, or whose parameters are frozen, has none; get its state from "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)",
    "doubtful": "loaded, but changed by torch in an optimizer",
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
    """The result of a load on this rank; ``str()`` is a text of up to seven lines.

    Names are written as in a checkpoint: keys joined by dots.

    Attributes:
        uri: The checkpoint.
        loaded: The names that were loaded.
        missing: The names that the checkpoint does not have. They keep their values, unless they
            share memory with loaded tensors. Empty unless missing names were allowed, for example
            by ``strict=False``.
        unexpected: The names that only the checkpoint has, apart from those in ``optimizer``.
        converted: The names that were not loaded exactly as they were saved, and how: with another
            element type, from other chunks (of a tensor that is sharded differently), as a value
            that takes a tensor's place, or by another name, with which they share memory.
        left_alone: The names that keep their values although the checkpoint has an entry, and why:
            also those that a load planner of the caller's did not read.
        optimizer: The names of saved optimizer state for which the state dict has no entry, such as
            state of parameters that are frozen now, or of an optimizer that has made no step.
        doubtful: The names that were loaded, but that torch's own functions change when the state
            dict is passed on to an optimizer, and how: state of an integer type, and empty
            parameter groups.
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
        plan: LoadPlan,
        uri: str,
        *,
        left_alone: Mapping[str, str] | None = None,
        converted: Mapping[str, str] | None = None,
        unused: Collection[str] = (),
    ) -> LoadReport:
        """Makes the report of a load that has succeeded.

        Args:
            wanted: The state dict that was loaded, by flat names.
            metadata: The metadata of the checkpoint.
            plan: The reads of this rank.
            uri: The checkpoint.
            left_alone: The names that keep their values although the checkpoint has an entry, and
                why.
            converted: See :class:`LoadReport`; None if the planner does not report them: then only
                converted element types are found.
            unused: The names of other ranks' values, and of values that were read, but not put into
                the state dict.

        Raises:
            CheckpointError: If ``converted`` is None, and the metadata has classes or values that
                torch's does not have.
        """
        stored, left_alone = metadata.state_dict_metadata.keys(), dict(left_alone or {})
        sources = {item.dest_index.fqn: item.storage_index.fqn for item in plan.items}
        for name in sorted(wanted.keys() & stored - sources.keys()):
            # a rank reads nothing for a tensor of which it has no elements
            if parts_of(wanted[name]) or not isinstance(wanted[name], torch.Tensor):
                left_alone.setdefault(name, "its load planner does not read it")
        if converted is None:
            types = conversions(wanted, functools.partial(saved_type, table_of(metadata, uri)))
            converted = {name: f"{saved} to {now}" for name, (saved, now) in types.items()}
        groups = [name for name in wanted if isinstance(name, str) and _GROUPS.search(name)]
        beside = {_GROUPS.split(name)[0] for name in groups}
        states = tuple(f"{prefix}state." for prefix in beside)
        missing = wanted.keys() - stored - sources.keys() - left_alone.keys() - converted.keys()
        apart = missing.union(left_alone, unused)
        others = stored - wanted.keys() - left_alone.keys() - {*unused, *sources.values()}
        optimizer = {name for name in others if states and name.startswith(states)}
        others -= optimizer
        return cls(
            uri=uri,
            loaded=tuple(name for name in wanted if name not in apart),
            missing=tuple(name for name in wanted if name in missing),
            unexpected=tuple(name for name in stored if name in others),
            converted=converted,
            left_alone={name: why for name, why in left_alone.items() if f"{name}." not in states},
            optimizer=tuple(name for name in stored if name in optimizer),
            doubtful=_doubtful(wanted, groups, states, metadata),
        )

    def __str__(self) -> str:
        lines = [f"loaded from {self.uri}: {len(self.loaded)}"]
        for name, title in _ROWS.items():
            if names := getattr(self, name):
                lines.append(f"{title}: {len(names)}, {_shown(names)}")
        return "\n".join(lines)

    def log(self) -> None:
        """Logs the report if it has more than loaded names.

        It is a warning if there are names in ``left_alone`` or ``optimizer``, else of level INFO.
        """
        if any(getattr(self, name) for name in _ROWS):
            is_unintended = self.left_alone or self.optimizer
            logger.log(logging.WARNING if is_unintended else logging.INFO, "%s", self)


def _shown(names: Collection[str]) -> str:
    reasons = names if isinstance(names, Mapping) else {}
    texts = (f"{name} ({reasons[name]})" if name in reasons else name for name in names)
    return first_few(texts, ", ", _FEW)


def _doubtful(
    wanted: Mapping[str, Any], groups: Sequence[str], states: tuple[str, ...], metadata: Metadata
) -> dict[str, str]:
    """Returns, by name, how torch's functions for optimizers change loaded values.

    Args:
        wanted: The state dict that was loaded, by flat names.
        groups: The names in it that belong to parameter groups.
        states: The prefixes of the names of optimizer state.
        metadata: The metadata of the checkpoint.
    """
    changes: dict[str, str] = {}
    params = {name: wanted[name] for name in groups if name.endswith(".params")}
    if any(isinstance(one, list) and one and isinstance(one[0], str) for one in params.values()):
        # torch loses nothing of an optimizer's last group
        for name, after in itertools.pairwise(params):
            if params[name] == [] and _GROUPS.split(name)[0] == _GROUPS.split(after)[0]:
                changes[name] = _EMPTY
    if states and (table := table_behind(metadata)) is not None:
        of_states = (name for name in wanted if name.startswith(states) and name[-5:] != ".step")
        for name, dtype in ((name, saved_type(table, name)) for name in of_states):
            if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
                changes[name] = f"{dtype}, {_CAST}"
    return changes
