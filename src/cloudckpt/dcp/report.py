"""``LoadReport``: the result of a load, name by name."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.dcp.copies import first_few
from cloudckpt.dcp.load_plan import conversions, saved_type, table_of

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
    "optimizer that has made no step, or whose parameters are frozen, has none; take both from "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)",
}


@dataclass(frozen=True)
class LoadReport:
    """The result of a load on this rank; ``str()`` is a table of up to ten lines.

    Names are those in the checkpoint: keys joined by dots.

    Attributes:
        uri: The checkpoint.
        loaded: The names that were loaded.
        missing: The names that the checkpoint does not have, and that keep their values. Empty if
            the load was strict.
        unexpected: The names that only the checkpoint has, apart from those in ``optimizer``.
        converted: The names that were loaded in another form than they were saved in, and how: as
            another element type, or from other chunks, such as of a tensor that is sharded
            differently.
        left_alone: The names that keep their values although the checkpoint has an entry, and why.
        optimizer: The saved optimizer state for which the state dict has no entry, such as that of
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
        metadata: Metadata,
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
            uri: The checkpoint.
            left_alone: The names that keep their values although the checkpoint has an entry, and
                why.
            converted: The names that were loaded in another form, and how; None if the planner does
                not report them.
            unused: The names in the checkpoint of other ranks' values.
        """
        stored, left_alone = metadata.state_dict_metadata.keys(), left_alone or {}
        if converted is None:
            table = table_of(metadata, uri)
            types = conversions(wanted, functools.partial(saved_type, table))
            converted = {name: f"{saved} to {now}" for name, (saved, now) in types.items()}
        names = filter(_GROUPS.search, filter(lambda name: isinstance(name, str), wanted))
        beside = {_GROUPS.split(name)[0] for name in names}
        states = tuple(f"{prefix}state." for prefix in beside)
        missing = wanted.keys() - stored - left_alone.keys() - converted.keys()
        apart = missing.union(left_alone, unused)
        others = stored - wanted.keys() - left_alone.keys() - {*unused}
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
        )

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} of {self.uri}"]
        for name, title in _ROWS.items():
            if names := getattr(self, name):
                lines.append(f"{title}: {len(names)}, {_shown(names)}")
        return "\n".join(lines)

    def log(self) -> None:
        """Logs the report if it has more than loaded names; warns of unintended results."""
        if any(getattr(self, name) for name in _ROWS):
            is_unintended = self.left_alone or self.optimizer
            logger.log(logging.WARNING if is_unintended else logging.INFO, "%s", self)


def _shown(names: Collection[str]) -> str:
    reasons = names if isinstance(names, Mapping) else {}
    texts = (f"{name} ({reasons[name]})" if name in reasons else name for name in names)
    return first_few(texts, ", ", _FEW)
