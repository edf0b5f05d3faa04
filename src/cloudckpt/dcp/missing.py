"""Advises what to do about a name that a checkpoint does not have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from cloudckpt.dcp.content import without_ranks

__all__ = ["advice"]

_WRAPPERS = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
}
"""The parts that wrappers of models add to the names of parameters, with the wrapper's name."""

_STATE_DICT = "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)"
_NUMBERED = re.compile(r"\d+\.[^.]+")
"""Matches ``0.exp_avg`` of ``state.0.exp_avg``: ``optimizer.state_dict()`` numbers parameters."""
_OPTIMIZER = re.compile(r"(.*?)(?<![^.])state\.(.+\.[^.]+)")


def advice(missing: str, stored: Collection[str]) -> str:
    """Returns text for an error message: similar names in the checkpoint, and what to change.

    Args:
        missing: The missing name.
        stored: The names that the checkpoint has.
    """
    advisers = (_wrapped, _of_rank, _container, _in_a_value, _of_optimizer, _near)
    return next(text for advise in advisers if (text := advise(missing, stored)))


_STRICT = "pass strict=False, which loads the rest and reports what was not loaded"


def _wrapped(missing: str, stored: Collection[str]) -> str:
    """Returns advice if the model's wrappers differ between save and load; else an empty text."""
    bare = _bare(missing)
    saved_name = next((name for name in stored if _bare(name) == bare), None)
    if saved_name is None:
        return ""
    parts, saved_parts = missing.split("."), saved_name.split(".")
    wrapped = [
        f"the model {verb} is wrapped by {' and '.join(wrappers)}"
        for verb, parts in (("to load into", parts), ("that was saved", saved_parts))
        if (wrappers := [_WRAPPERS[part] for part in parts if part in _WRAPPERS])
    ]
    # the first part does not belong to the model
    is_within = parts[0] == saved_parts[0] and parts[0] not in _WRAPPERS
    found_by = f'saved.get("{parts[0]}." + name, saved.get(name))' if is_within else "saved[name]"
    line = (
        r'saved = {re.sub(r"\b(' + "|".join(_WRAPPERS) + r')\.", "", entry.name): entry.name '
        "for entry in cloudckpt.inspect(checkpoint_id).items} and load "
        f"{{{found_by}: value for name, value in {_STATE_DICT}.items()}}"
    )
    return (
        f"; the checkpoint has {saved_name!r}: {', and '.join(wrapped)}. Instead of "
        f"model.state_dict(), use {line}; saves that use {_STATE_DICT} have the same names with "
        "and without wrappers"
    )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _of_rank(missing: str, stored: Collection[str]) -> str:
    """Returns advice if only the saved or only the wanted value is a ``per_rank``; else empty."""
    bare = without_ranks(missing)
    if bare != missing and bare in stored:
        return f"; the checkpoint has {bare!r}, one value for all ranks: load it without per_rank"
    of_rank = next((name for name in stored if without_ranks(name) == missing), missing)
    if of_rank == missing:
        return ""
    return (
        f"; the checkpoint has {of_rank!r}, because each rank saved its own value: put "
        "cloudckpt.per_rank(...) there"
    )


def _container(missing: str, stored: Collection[str]) -> str:
    """Returns advice if the checkpoint has a dict or list under the name; else an empty text."""
    beneath = [name for name in stored if name.startswith(f"{missing}.")]
    if not beneath:
        return ""
    return (
        f"; the checkpoint has {len(beneath)} entries under {missing!r}, such as "
        f"{beneath[0]!r}, but the state dict has a single value or an empty list there: put a "
        f"dict or list with these entries there, or {_STRICT}"
    )


def _in_a_value(missing: str, stored: Collection[str]) -> str:
    """Returns advice if the dict or list around the name was saved as one value; else empty."""
    parts = missing.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    container = next((name for name in above if name in stored), None)
    if container is None:
        return ""
    return (
        f"; the checkpoint has {container!r} itself, a tensor or a value without entries, such as "
        "an object that torch.distributed.checkpoint has saved as one value: put a single value "
        f"there to load it, or {_STRICT}"
    )


def _of_optimizer(missing: str, stored: Collection[str]) -> str:
    """Returns advice if the name is that of a parameter's optimizer state; else an empty text.

    Also empty if the checkpoint has no parameter groups of such an optimizer.
    """
    match = _OPTIMIZER.fullmatch(missing)
    if match is None or not any(name.startswith(f"{match[1]}param_groups") for name in stored):
        return ""
    beneath = f"{match[1]}state."
    saved = [name.removeprefix(beneath) for name in stored if name.startswith(beneath)]
    if saved and bool(_NUMBERED.fullmatch(saved[0])) != bool(_NUMBERED.fullmatch(match[2])):
        return (
            "; the state of one optimizer has the names of parameters, that of the other their "
            "numbers: take it from torch.distributed.checkpoint.state_dict.get_state_dict(model, "
            "optimizer) on both sides, or from optimizer.state_dict()"
        )
    return (
        "; the saved optimizer had no state for this parameter: it is new, or it was frozen or "
        f"had no gradient yet. Remove its state from the state dict, or {_STRICT}"
    )


def _near(missing: str, stored: Collection[str]) -> str:
    near = difflib.get_close_matches(missing, stored, n=3)
    similar = f"; the checkpoint has similar names: {near}" if near else ""
    return f"{similar}. Remove the missing keys from the state dict, or {_STRICT}"
