"""What to do about a name that a checkpoint does not have."""

from __future__ import annotations

import difflib
import itertools
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
"""What wrappers of models put into the names of their parameters."""

_STATE_DICT = "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)"
_OPTIMIZER = re.compile(r"(.*?)(?<![^.])state\..+\.[^.]+")


def advice(missing: str, stored: Collection[str]) -> str:
    """What to write, and what the checkpoint has in place of a name.

    Args:
        missing: The name.
        stored: The names that the checkpoint has.
    """
    for known in (_wrapped, _of_rank, _container, _in_a_value, _of_optimizer, _near):
        if text := known(missing, stored):
            return text
    return ""


_STRICT = "pass strict=False, which loads the rest and reports what was not loaded"


def _wrapped(missing: str, stored: Collection[str]) -> str:
    """If a model was wrapped when it was saved, or is when it is loaded: the line to write."""
    bare = _bare(missing)
    found = next((name for name in stored if _bare(name) == bare), None)
    if found is None:
        return ""
    here, there = missing.split("."), found.split(".")
    said = [
        f"the model {verb} is wrapped by {' and '.join(_WRAPPERS[part] for part in parts)}"
        for verb, parts in (
            ("to load into", _wrappers(here)),
            ("that was saved", _wrappers(there)),
        )
        if parts
    ]
    first = int(here[0] == there[0] and here[0] not in _WRAPPERS)  # where the model's names begin
    outer = [*itertools.takewhile(_WRAPPERS.__contains__, there[first:])]
    tops = {name.split(".")[0] for name in stored if _wrappers(name.split("."))}
    if len(outer) == len(_wrappers(there)) and len(tops) < 2:  # around the model as a whole, if any
        line = _STATE_DICT if _wrappers(here) else "model.state_dict()"
        for part in reversed(outer):
            line = f'{{"{part}": {line}}}'
    else:
        found_by = f'saved.get("{here[0]}." + name, saved.get(name))' if first else "saved[name]"
        line = (
            r'saved = {re.sub(r"\b(' + "|".join(_WRAPPERS) + r')\.", "", entry.name): entry.name '
            "for entry in cloudckpt.inspect(checkpoint_id).items} and load "
            f"{{{found_by}: value for name, value in {_STATE_DICT}.items()}}"
        )
    return (
        f"; the checkpoint has {found!r}: {', and '.join(said)}. Instead of model.state_dict(), "
        f"use {line}; saves that use {_STATE_DICT} have the same names with and without "
        "wrappers"
    )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _wrappers(parts: list[str]) -> list[str]:
    return [part for part in parts if part in _WRAPPERS]


def _of_rank(missing: str, stored: Collection[str]) -> str:
    """If one of both is a value of each rank."""
    bare = without_ranks(missing)
    if bare != missing and bare in stored:
        return f"; the checkpoint has {bare!r}, one value for all ranks: load it without per_rank"
    found = next((name for name in stored if without_ranks(name) == missing), missing)
    if found == missing:
        return ""
    return (
        f"; the checkpoint has {found!r}, because each rank saved its own value: put "
        "cloudckpt.per_rank(...) there"
    )


def _container(missing: str, stored: Collection[str]) -> str:
    """If the checkpoint has a dict or list there, and the state dict none, or an empty list."""
    beneath = [name for name in stored if name.startswith(f"{missing}.")]
    if not beneath:
        return ""
    return (
        f"; the checkpoint has {len(beneath)} entries under {missing!r}, such as "
        f"{beneath[0]!r}, but the state dict has a single value or an empty list there: put a "
        f"dict or list with these entries there, or {_STRICT}"
    )


def _in_a_value(missing: str, stored: Collection[str]) -> str:
    """If the checkpoint has something that is no container where the state dict has one."""
    parts = missing.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    found = next((name for name in above if name in stored), None)
    if found is None:
        return ""
    return (
        f"; it has {found!r} itself, a tensor or a value without entries, such as an object that "
        "torch.distributed.checkpoint has saved whole from within a dict: put a single value "
        f"there to load it, or {_STRICT}"
    )


def _of_optimizer(missing: str, stored: Collection[str]) -> str:
    """If an optimizer has state of a parameter that had none when it was saved."""
    found = _OPTIMIZER.fullmatch(missing)
    if found is None or not any(name.startswith(f"{found[1]}param_groups") for name in stored):
        return ""
    return (
        "; the saved optimizer had no state for this parameter: it is new, or it was frozen or "
        f"had no gradient yet. Remove its state from the state dict, or {_STRICT}"
    )


def _near(missing: str, stored: Collection[str]) -> str:
    near = difflib.get_close_matches(missing, stored, n=3)
    said = f"; the checkpoint has the similar {near}" if near else ""
    return f"{said}. Remove the missing keys from the state dict, or {_STRICT}"
