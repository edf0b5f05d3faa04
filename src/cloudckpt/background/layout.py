"""Where the bytes of a state dict go in an arena, and the state dict made anew on top of them."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import ALIGNMENT, Memory
from cloudckpt.errors import StagingError
from cloudckpt.transfer.memory import extent, has_memory, shows_its_memory

__all__ = ["Layout", "Region"]

_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Region:
    """The bytes of one storage that some tensor shows.

    Attributes:
        storage: The storage, kept alive.
        first: The first byte of it that is needed.
        end: The first behind them.
        grain: Bytes of the largest element; ``first`` is a multiple of it.
        place: Where they begin in the arena.
        copy: The storage of the copy.
    """

    storage: torch.UntypedStorage
    first: int
    end: int
    grain: int
    place: int = 0
    copy: torch.UntypedStorage | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.first

    def pieces(self, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what to write and what to read, each of at most ``most`` bytes.

        They are of a wide type, which torch copies faster than bytes, but for odd ends.
        """
        assert self.copy is not None
        wide_type = next(dtype for dtype in _WIDE if self.first % dtype.itemsize == 0)
        for start in range(0, self.size, most):
            end = min(start + most, self.size)
            wide = (end - start) // wide_type.itemsize * wide_type.itemsize
            parts = ((wide_type, start, start + wide), (torch.uint8, start + wide, end))
            for dtype, begin, stop in parts:
                if stop > begin:
                    yield (
                        _flat(self.copy, dtype, begin, stop),
                        _flat(self.storage, dtype, self.first + begin, self.first + stop),
                    )


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
    """Bytes of a storage as a tensor."""
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    size = dtype.itemsize
    return flat.set_(storage, start // size, ((end - start) // size,), (1,))


@dataclass
class Layout:
    """The plan of a staged copy.

    Tensors that share a storage go on sharing it. Of a storage, only what some tensor shows is
    copied: a view of a few rows does not drag along the whole.

    Attributes:
        regions: What is to be copied.
        size: Bytes of the arena that this takes.
    """

    regions: list[Region] = field(default_factory=list)
    size: int = 0
    _by_storage: dict[int, Region] = field(default_factory=dict)
    _planned: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Layout:
        """Plans the copy of a state dict."""
        layout = cls()
        for tensor in _tensors(state_dict, set()):
            layout._add(tensor)
        place = 0
        for region in layout.regions:
            region.first -= region.first % region.grain
            region.place = place
            place += -(-region.size // ALIGNMENT) * ALIGNMENT
        layout.size = place
        return layout

    def _add(self, tensor: torch.Tensor) -> None:
        shown = tensor if shows_its_memory(tensor) else tensor.resolve_conj().resolve_neg()
        self._planned[id(tensor)] = shown
        if shown.numel() == 0:
            return  # its storage may be freed, and its offset lie anywhere
        storage = shown.untyped_storage()
        first, end = extent(shown)
        region = self._by_storage.get(storage._cdata)
        if region is None:
            region = self._by_storage[storage._cdata] = Region(storage, first, end, shown.itemsize)
            self.regions.append(region)
        else:
            region.first, region.end = min(region.first, first), max(region.end, end)
            region.grain = max(region.grain, shown.itemsize)

    def rebuild(self, state_dict: dict[str, Any], memory: Memory) -> dict[str, Any]:
        """The state dict as a structure of its own, its tensors in the arena's memory.

        Raises:
            StagingError: If a value can't be copied.
        """
        for region in self.regions:
            region.copy = memory.storage(region.place, region.size)
        return _Copier(self).mapping(state_dict, {})

    def plans(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor gets a place in the arena."""
        return id(tensor) in self._planned

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was planned."""
        tensor = self._planned[id(tensor)]
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        region = self._by_storage[tensor.untyped_storage()._cdata]
        # each region has a storage of its own: torch can't pickle a DTensor whose local tensor
        # begins behind the beginning of its storage
        offset = tensor.storage_offset() - region.first // tensor.itemsize
        made = torch.empty(0, dtype=tensor.dtype)
        assert region.copy is not None
        return made.set_(region.copy, offset, tensor.size(), tensor.stride())


def _goes_to_arena(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bytes in memory; others are copied on their own, or refused later."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and has_memory(tensor)
    )


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in a state dict that are bytes in memory, each once."""
    if isinstance(value, _ATOMIC) or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        if _goes_to_arena(value):
            yield value
        else:
            for inner in _inner(value):
                yield from _tensors(inner, seen)
    elif isinstance(value, dict):
        seen.add(id(value))
        for entry in value.values():
            yield from _tensors(entry, seen)
    elif isinstance(value, (list, tuple)):
        seen.add(id(value))
        for entry in value:
            yield from _tensors(entry, seen)


def _inner(tensor: Any) -> list[torch.Tensor]:
    """The tensors that a wrapper such as DTensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]


class _Copier:
    """Copies a structure; the same object in two places stays the same object."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def mapping(self, value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        memo[id(value)] = made
        for key, entry in value.items():
            try:
                made[key] = self.value(entry, memo)
            except StagingError as error:
                error.item = str(key) if error.item is None else f"{key}.{error.item}"
                raise
        return made

    def value(self, value: Any, memo: dict[int, Any]) -> Any:
        if isinstance(value, _ATOMIC):
            return value
        if id(value) in memo:
            return memo[id(value)]
        kind = type(value)
        if isinstance(value, torch.Tensor):
            made: Any = self._tensor(value, memo)
        elif kind in (dict, OrderedDict):
            return self.mapping(value, memo)
        elif kind is list:
            made = memo[id(value)] = []
            made.extend(self.value(entry, memo) for entry in value)
            return made
        elif kind is tuple:
            made = tuple(self.value(entry, memo) for entry in value)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            made = kind(*(self.value(entry, memo) for entry in value))
        elif isinstance(value, io.BytesIO):
            made = io.BytesIO(value.getvalue())
        else:
            made = _deep_copy(value, memo)
        memo[id(value)] = made
        return made

    def _tensor(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if self._layout.plans(tensor):
            return self._layout.staged(tensor)
        wrapper: Any = tensor  # mypy knows no class that is a tensor and a wrapper
        if not is_traceable_wrapper_subclass(wrapper):
            made: torch.Tensor = _deep_copy(tensor.detach(), memo)
            return made
        names, context = wrapper.__tensor_flatten__()
        inner = {name: getattr(wrapper, name) for name in names}
        for name, part in inner.items():
            if isinstance(part, torch.Tensor):  # DTensor's mesh is no tensor, and stays what it is
                inner[name] = self.value(part, memo)
        rebuilt: torch.Tensor = type(wrapper).__tensor_unflatten__(
            inner, context, wrapper.size(), wrapper.stride()
        )
        return rebuilt


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied, which an asynchronous save "
            "has to do; leave it out of the state dict",
            cause=exc,
        ) from exc
