"""The state dicts that are saved: bytes that can be told right from wrong after a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

MIB = 1024 * 1024
GIB = 1024 * MIB

_PATTERN_ELEMENTS = 64 * MIB // 4
_CYCLE = (16, 32, 48, 64)


@dataclass(frozen=True)
class StateSpec:
    """The float32 tensors of a state dict, by their sizes in bytes, in order."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


def mixed(total: int) -> StateSpec:
    """Returns tensors of 16, 32, 48 and 64 MiB in turn that add up to `total`."""
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, _CYCLE[len(sizes) % len(_CYCLE)] * MIB))
    return StateSpec(tuple(sizes))


def uniform(count: int, size: int) -> StateSpec:
    """Returns `count` tensors of `size` bytes."""
    return StateSpec((size,) * count)


def filled(spec: StateSpec) -> dict[str, torch.Tensor]:
    """Builds the state dict; each tensor's bytes follow from its index alone."""
    pattern = _pattern()
    return {
        _name(index): _content(pattern, index, size).clone()
        for index, size in enumerate(spec.sizes)
    }


def blank(spec: StateSpec) -> dict[str, torch.Tensor]:
    """Builds the target of a load: same shapes, zeros, every page already touched."""
    return {
        _name(index): torch.empty(size // 4).fill_(0.0) for index, size in enumerate(spec.sizes)
    }


def wrong_tensors(spec: StateSpec, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of the tensors in `state` whose bytes are not `filled(spec)`'s."""
    pattern = _pattern()
    return [
        _name(index)
        for index, size in enumerate(spec.sizes)
        if not torch.equal(state[_name(index)], _content(pattern, index, size))
    ]


def _name(index: int) -> str:
    return f"layer.{index:05d}.weight"


def _pattern() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    # Twice the largest tensor's needs: a window that starts anywhere in the first half fits.
    return torch.rand(2 * _PATTERN_ELEMENTS, generator=generator)


def _content(pattern: torch.Tensor, index: int, size: int) -> torch.Tensor:
    start = (index * 1009) % _PATTERN_ELEMENTS
    elements = size // 4
    if start + elements > pattern.numel():
        return pattern.repeat(-(-elements // pattern.numel()))[:elements]
    return pattern[start : start + elements]
