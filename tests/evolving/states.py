"""State dicts, described: dicts and lists of descriptions of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

import cloudckpt

from .values import PLACEMENTS, Each, Here, Own, Plain, Tensor

__all__ = ["Component", "State", "component_of", "content_of", "difference", "flat", "made"]
__all__ += ["names", "placed_otherwise", "rebuilt", "scribble"]

State = Mapping[Any, Any]
"""A state dict: keys as they are, and behind them dicts, lists, and descriptions of values."""


class Component:
    """An object with a state dict, as a model."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"Component({self.content!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Component) and self.content == other.content

    def state_dict(self) -> dict[Any, Any]:
        return self.content

    def load_state_dict(self, content: dict[Any, Any]) -> None:
        self.content = content


def component_of(value: Any) -> Any:
    """What is in a component, or in a value of a rank; or the value itself, if it is neither."""
    while isinstance(value, (Component, cloudckpt.PerRank)):
        value = value.content if isinstance(value, Component) else value.value
    return value


def made(state: State, here: Here) -> dict[Any, Any]:
    """What a rank has of it; or all of it, for a reader that is alone."""
    return _made(state, "", here, range(here.saved_by or here.world))


def names(described: Any, name: str = "") -> list[str]:
    """The names of the values of which all ranks may have a copy; see `Here.unlike`."""
    if isinstance(described, Component):
        return names(described.content, name)
    if isinstance(described, dict):
        return [one for key, inner in described.items() for one in names(inner, f"{name}.{key}")]
    if isinstance(described, list):
        return [one for n, inner in enumerate(described) for one in names(inner, f"{name}.{n}")]
    return [] if isinstance(described, (Each, Own)) else [name]


def _made(described: Any, name: str, here: Here, holders: Sequence[int]) -> Any:
    """What a rank has of it; ``holders`` have it at all."""
    if isinstance(described, Component):
        content = _made(described.content, name, here, holders)
        return content if here.is_alone else Component(content)
    if isinstance(described, Each):
        if here.rank is not None:
            return _of_rank(described, name, here, holders)
        return {f"rank_{rank}": _of_each(described, name, here, rank) for rank in holders}
    if isinstance(described, dict):
        found = type(described)()
        for key, inner in described.items():
            ranks = holders
            if isinstance(inner, Own):
                ranks = [rank for rank in holders if rank in inner.ranks]
                if not ranks or not (here.rank is None or here.rank in ranks):
                    continue
                inner = inner.of
            found[key] = _made(inner, f"{name}.{key}", here, ranks)
        return found
    if isinstance(described, list):
        return [_made(one, f"{name}.{n}", here, holders) for n, one in enumerate(described)]
    if here.rank is not None and name in here.unlike:
        if isinstance(described, Plain) and not isinstance(described.value, (dict, list)):
            described = Plain(f"of {here.rank}")
        return described.made(f"{name} of {here.rank}", here.of_rank(here.rank))
    return described.made(name, here)


def _of_each(described: Each, name: str, here: Here, rank: int) -> Any:
    return _made(described.of, f"{name}.of {rank}", here.of_rank(rank), (rank,))


def _of_rank(
    described: Each, name: str, here: Here, holders: Sequence[int]
) -> cloudckpt.PerRank[Any]:
    """A rank's own value, and those of others that it gets if other ranks load than have saved."""
    assert here.rank is not None
    has_saved = not here.saved_by or here.rank in holders
    of_rank = here if has_saved else dataclasses.replace(here, blank=True)
    own = cloudckpt.per_rank(_of_each(described, name, of_rank, here.rank))
    if here.saved_by and [*holders] != [*range(here.world)]:
        alone = dataclasses.replace(here, rank=None)
        own.all = {rank: _of_each(described, name, alone, rank) for rank in holders}
    return own


def rebuilt(
    described: Any,
    change: Callable[[Any, bool], Any],
    keep: Callable[[Any], bool] = lambda _: True,
    own: bool = False,
) -> Any:
    """The same with other values.

    Args:
        described: A description.
        change: Makes another value of one, and of whether it is of some ranks only, or of each.
        keep: Which entries of dicts stay.
        own: Whether it is of some ranks only, or of each.
    """
    if isinstance(described, Component):
        return Component(rebuilt(described.content, change, keep, own))
    if isinstance(described, Own):
        inner = rebuilt(described.of, change, keep, True)
        return inner if own else Own(described.ranks, inner)
    if isinstance(described, Each):
        return Each(rebuilt(described.of, change, keep, True))
    if isinstance(described, dict):
        kept = ((key, value) for key, value in described.items() if keep(value))
        return type(described)((key, rebuilt(value, change, keep, own)) for key, value in kept)
    if isinstance(described, list):
        return [rebuilt(value, change, keep, own) for value in described]
    return change(described, own)


def placed_otherwise(state: State, world: int) -> State:
    """The state with tensors in other shards, without what none of so many ranks had."""
    placements = ["", *PLACEMENTS]

    def turned(value: Any, own: bool) -> Any:
        if own or not isinstance(value, Tensor) or value.form == "stretched":
            return value
        placed = placements[(placements.index(value.placed) + 2) % len(placements)]
        return dataclasses.replace(value, placed=placed, form="")

    return rebuilt(state, turned, lambda one: not isinstance(one, Own) or min(one.ranks) < world)


def flat(state: dict[Any, Any], rank: int | None = None) -> dict[str, Any]:
    """As torch names it.

    Args:
        state: A state dict.
        rank: The rank that has it; None if one has all.
    """
    return flatten_state_dict(_plain(state, rank))[0]


def _plain(value: Any, rank: int | None) -> Any:
    """The dicts and lists that are saved of it."""
    if isinstance(value, Component):
        return _plain(value.content, rank)
    if isinstance(value, cloudckpt.PerRank):
        return {f"rank_{rank}": _plain(value.value, rank)}
    if isinstance(value, dict):
        return {key: _plain(inner, rank) for key, inner in value.items()}
    return [_plain(inner, rank) for inner in value] if isinstance(value, list) else value


def scribble(value: Any) -> None:
    """Goes on training: everything is another in place."""
    value = component_of(value)
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, torch.Tensor):
        if 0 not in value.stride() or value.is_contiguous():
            with torch.no_grad():
                value.zero_()
    elif isinstance(value, np.ndarray):
        value.fill(0)
    elif isinstance(value, dict):
        for entry in list(value.values()):
            scribble(entry)
        value["since"] = 1
    elif isinstance(value, list):
        for entry in value:
            scribble(entry)
        value.append(-1.0)


def difference(actual: Any, expected: Any, *, ordered: bool, at: str = "") -> str | None:
    """Where two values differ, to the last bit and type; None if they do not."""
    return next(_differences(actual, expected, at, ordered), None)


def _is_empty(value: Any) -> bool:
    """Whether a value is nothing but containers."""
    if isinstance(value, (dict, list)):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return False


def _differences(actual: Any, expected: Any, at: str, ordered: bool) -> Iterator[str]:
    if isinstance(expected, cloudckpt.PerRank) and expected.all:
        others = {rank: value for rank, value in actual.all.items() if rank != dist.get_rank()}
        wanted = {rank: value for rank, value in expected.all.items() if rank != dist.get_rank()}
        yield from _differences(others, wanted, f"{at}.all", ordered)
    actual, expected = component_of(actual), component_of(expected)
    if isinstance(expected, torch.Tensor):
        yield from _of_tensors(actual, expected, at)
    elif isinstance(expected, dict):
        if not isinstance(actual, dict):
            yield f"{at} is a {type(actual).__name__}, not a dict"
            return
        keys, wanted = ([(type(key), key) for key in each] for each in (actual, expected))
        full = [(type(key), key) for key, value in expected.items() if not _is_empty(value)]
        placed = [key for key in keys if key in full]  # what is empty may come last
        if set(keys) != set(wanted) or (ordered and placed != full):
            yield f"{at} has the keys {list(actual)}, not {list(expected)}"
            return
        for key, value in expected.items():
            yield from _differences(actual[key], value, f"{at}[{key!r}]", ordered)
    elif isinstance(expected, (list, tuple)):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            yield f"{at} is {_short(actual)}, not {_short(expected)}"
            return
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _differences(one, other, f"{at}[{number}]", ordered)
    elif isinstance(expected, np.ndarray):
        is_array = isinstance(actual, np.ndarray) and actual.dtype == expected.dtype
        if not is_array or actual.shape != expected.shape or (actual != expected).any():
            yield f"{at} is {_short(actual)}, not {_short(expected)}"
    elif type(actual) is not type(expected) or repr(actual) != repr(expected):
        yield f"{at} is {_short(actual)}, not {_short(expected)}"


def _of_tensors(actual: Any, expected: torch.Tensor, at: str) -> Iterator[str]:
    if isinstance(expected, DTensor):
        if not isinstance(actual, DTensor) or actual.placements != expected.placements:
            yield f"{at} is a {type(actual).__name__} placed otherwise"
            return
        actual, expected = actual._local_tensor, expected._local_tensor
    if not isinstance(actual, torch.Tensor):
        yield f"{at} is {_short(actual)}, not a tensor"
    elif actual.dtype != expected.dtype or actual.shape != expected.shape:
        yield (
            f"{at} is {actual.dtype} {tuple(actual.shape)}, "
            f"not {expected.dtype} {tuple(expected.shape)}"
        )
    elif (wrong := (_bits(actual) != _bits(expected)).nonzero()).numel():
        count = _bits(expected).numel()
        yield f"{at}: {len(wrong)} of {count} bytes differ from {int(wrong[0])} on"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def content_of(value: Any) -> bytes:
    """What tells a value that is no container from another one."""
    if isinstance(value, torch.Tensor):
        head = f"{value.dtype} {tuple(value.shape)} "
        return head.encode() + bytes(_bits(value).untyped_storage())
    content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return type(value).__qualname__.encode() + content


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 80 else f"{text[:60]}… ({len(text)} characters)"
