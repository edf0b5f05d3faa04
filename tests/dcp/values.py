"""Tensors in which every element says where it belongs, and exact comparison."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["blank_like", "assert_same", "numbered"]


def numbered(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """``first``, ``first + 1``, … in row-major order; exact in float32 up to 2**24."""
    count = math.prod(shape)
    return torch.arange(first, first + count, dtype=torch.int64).to(dtype).reshape(shape)


def blank_like(value: Any) -> Any:
    """The same structure without its content, to be loaded into."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 113, memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        blank = copy.copy(value)
        for key, item in value.items():
            blank[key] = blank_like(item)
        return blank
    if isinstance(value, list):
        return [blank_like(item) for item in value]
    return None


def assert_same(actual: Any, expected: Any, name: str = "") -> None:
    """Same types, dtypes, devices, shapes and bits, all the way down; of DTensors, on this rank."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{name} is a {type(actual)}"
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
        assert actual.device == expected.device, f"{name}: {actual.device} != {expected.device}"
        assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
        here, there = _bits(actual), _bits(expected)
        if not torch.equal(here, there):
            wrong = (here != there).nonzero().flatten()
            raise AssertionError(
                f"{name}: {wrong.numel()} of {here.numel()} bytes differ, the first is {wrong[0]}"
            )
    elif isinstance(expected, Mapping):
        assert type(actual) is type(expected), f"{name} is a {type(actual)}"
        assert list(actual) == list(expected), f"{name}: {list(actual)} != {list(expected)}"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}.{key}")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert type(actual) is type(expected), f"{name} is a {type(actual)}"
        assert len(actual) == len(expected), f"{name}: {len(actual)} items"
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{name}[{index}]")
    else:
        assert type(actual) is type(expected), f"{name} is a {type(actual)}"
        assert actual == expected, f"{name}: {actual!r} != {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
    return plain.reshape(-1).view(torch.uint8)
