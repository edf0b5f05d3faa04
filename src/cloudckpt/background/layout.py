"""Where a state dict's bytes go in an arena, and the state dict rebuilt on top of them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import Memory
from cloudckpt.checkpoint.structure import KeyNames
from cloudckpt.checkpoint.torch_private import PLANS_ITSELF, declare_as
from cloudckpt.errors import StagingError
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.memory import (
    extent,
    has_memory,
    memory_of,
    settled,
    shows_its_memory,
)

__all__ = ["Layout", "Region"]

_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)
_DICTS = frozenset((dict, Counter, OrderedDict, defaultdict))
_ATOMIC = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)


@dataclass(slots=True)
class Region:
    """The bytes of one storage that some tensor uses.

    Attributes:
        storage: The storage, kept alive.
        first: The first byte needed.
        end: The first byte after them.
        grain: Bytes of the largest element; ``first`` is a multiple of it.
        place: Where the bytes begin in the arena.
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
        """Pairs of target and source tensors, each of at most ``most`` bytes.

        They have a wide element type, which torch copies faster than bytes, except for odd ends.
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
class _Wrapped:
    """The contents of a wrapper such as DTensor.

    Attributes:
        parts: By name: tensors and other things, such as a DTensor's mesh.
        context: What else is needed to rebuild the wrapper.
    """

    parts: dict[str, Any]
    context: Any


@dataclass
class Layout:
    """The plan of a staged copy.

    Tensors that share a storage still share it in the copy. Only the parts of a storage that some
    tensor uses are copied: a view of a few rows does not copy the whole storage.

    Attributes:
        regions: What to copy.
        size: Bytes of the arena that the copy takes.
    """

    regions: list[Region] = field(default_factory=list)
    size: int = 0
    _by_storage: dict[int, Region] = field(default_factory=dict)
    # by the id of a value, which is kept alive: otherwise a later value might get the same id
    _seen: dict[int, Any] = field(default_factory=dict)
    _planned: dict[int, torch.Tensor] = field(default_factory=dict)
    _wrapped: dict[int, _Wrapped] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Layout:
        """Plans the copy of a state dict."""
        layout = cls()
        layout._walk(state_dict)
        place = 0
        for region in layout.regions:
            region.first -= region.first % region.grain
            region.place = place
            place += aligned(region.size)
        layout.size = place
        return layout

    def _walk(self, value: Any) -> None:
        """Finds the tensors that have bytes in memory."""
        if type(value) in _ATOMIC or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not (_is_bytes(value) and self._add(value)):
                self._unwrap(value)
        elif isinstance(value, Mapping):
            for entry in value.values():
                self._walk(entry)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self._walk(entry)

    def _unwrap(self, tensor: Any) -> None:
        traceable: bool = is_traceable_wrapper_subclass(tensor)
        if not traceable:
            return
        settled(tensor)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        self._wrapped[id(tensor)] = _Wrapped(parts, context)
        for part in parts.values():
            if isinstance(part, torch.Tensor):
                self._walk(part)

    def _add(self, tensor: torch.Tensor) -> bool:
        """Plans the copy of a tensor; returns whether it has memory to copy."""
        if tensor.numel() == 0:  # its storage may be freed, and its offset lie anywhere
            self._planned[id(tensor)] = tensor
            return True
        memory, shown = memory_of(tensor), tensor
        if memory is None:
            return False
        if not shows_its_memory(tensor):
            shown = tensor.resolve_conj().resolve_neg()
            memory = shown.untyped_storage(), *extent(shown)
        self._planned[id(tensor)] = shown
        storage, first, end = memory
        region = self._by_storage.get(storage._cdata)
        if region is None:
            region = self._by_storage[storage._cdata] = Region(storage, first, end, shown.itemsize)
            self.regions.append(region)
        else:
            region.first, region.end = min(region.first, first), max(region.end, end)
            region.grain = max(region.grain, shown.itemsize)
        return True

    def place(self, memory: Memory) -> None:
        """Gives each region its place in the arena's memory."""
        for region in self.regions:
            region.copy = memory.storage(region.place, region.size)

    @property
    def is_read_when_rebuilt(self) -> bool:
        """Whether a wrapper other than torch's own may read its parts when it is rebuilt."""
        kinds: set[type] = {type(self._seen[key]) for key in self._wrapped}
        return not kinds <= {DTensor, AsyncCollectiveTensor}

    def rebuild(self, state_dict: dict[str, Any], *, flattens: bool = True) -> dict[str, Any]:
        """Rebuilds the state dict as an independent structure, with tensors on the copied regions.

        Args:
            state_dict: The original.
            flattens: Whether its containers will be flattened, so that their classes don't count.

        Raises:
            StagingError: If a value can't be copied.
        """
        memo: dict[int, Any] = {
            key: _of_kind(self._staged(shown), self._seen[key])
            for key, shown in self._planned.items()
        }
        return _Copier(memo, self._seen, self._wrapped).state(state_dict, flattens=flattens)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a planned tensor."""
        if tensor.numel() == 0:
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        region = self._by_storage[tensor.untyped_storage()._cdata]
        # each region has its own storage: torch can't pickle a DTensor whose local tensor
        # begins after the start of its storage
        offset = tensor.storage_offset() - region.first // tensor.itemsize
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        assert region.copy is not None
        return made.set_(region.copy, offset, tensor.size(), tensor.stride())


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _of_kind(made: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """What a pickle or a plan notes of a tensor besides its elements."""
    if isinstance(original, torch.nn.Parameter):
        made = torch.nn.Parameter(made, original.requires_grad)
    else:
        made.requires_grad_(original.requires_grad)
    declare_as(made, original)
    return made


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes in memory; others are copied separately, or refused later."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and PLANS_ITSELF.isdisjoint(vars(tensor))
    )


def _lost_its_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage was freed or shrunk; a copy would contain arbitrary memory."""
    try:
        return tensor.layout == torch.strided and not tensor.is_meta and not has_memory(tensor)
    except RuntimeError:  # of a subclass without a storage
        return False


class _Copier:
    """Copies what is around the tensors: containers as torch flattens them, all else by deepcopy.

    An object in two places stays one object, and a staged tensor is found wherever it is.
    """

    def __init__(
        self, memo: dict[int, Any], seen: dict[int, Any], wrapped: dict[int, _Wrapped]
    ) -> None:
        """
        Args:
            memo: As of ``copy.deepcopy``: the staged tensors, by the ids of the originals.
            seen: The originals, by their ids.
            wrapped: The contents of those that are wrappers, by their ids.
        """
        self._memo, self._wrapped = memo, wrapped
        self._flattened: dict[int, tuple[Any, Any]] = {}  # by id: a container, and its copy
        self._is_flattened = KeyNames({}).is_walked
        for number in wrapped:
            with contextlib.suppress(StagingError):  # it is raised again where it has a name
                self._tensor(seen[number])

    def state(self, state_dict: dict[str, Any], *, flattens: bool) -> dict[str, Any]:
        """The copy of a whole state dict."""
        if flattens:
            return cast(dict[str, Any], self._value(state_dict))
        return {key: self._named(key, self._leaf, value) for key, value in state_dict.items()}

    def _value(self, value: Any) -> Any:
        if type(value) in _ATOMIC:
            return value
        if (made := self._memo.get(id(value))) is not None:
            return made
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._flattened:
            return self._flattened[id(value)][1]
        if not self._is_flattened(value):
            return self._leaf(value)
        if isinstance(value, Mapping):
            kind: Any = type(value)
            made = kind.copy(value) if kind in _DICTS else {}
            self._flattened[id(value)] = value, made
            for key, entry in value.items():
                made[key] = self._named(key, self._value, entry)
        else:
            made = []
            self._flattened[id(value)] = value, made
            made.extend(map(self._value, value))
        return made

    def _named(self, key: Any, copied: Callable[[Any], Any], value: Any) -> Any:
        try:
            return copied(value)
        except StagingError as error:
            error.item = str(key) if error.item is None else f"{key}.{error.item}"
            raise

    def _leaf(self, value: Any) -> Any:
        return _deep_copy(value, self._memo)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that is no plain memory."""
        made: torch.Tensor | None = self._memo.get(id(tensor))
        if made is not None:
            return made
        wrapped = self._wrapped.get(id(tensor))
        if wrapped is None:
            if not PLANS_ITSELF.isdisjoint(vars(tensor)):
                raise StagingError(
                    "a tensor plans its items by functions that are attributes of it, and a copy "
                    "would keep those of the original; save it with cloudckpt.save"
                )
            if _lost_its_memory(tensor):
                raise StagingError(
                    "the memory of a tensor was freed or shrunk, so that there is nothing to copy; "
                    "gather it again before the save, or leave it out of the state dict"
                )
            made = _own_copy(tensor, self._memo)
        else:
            inner = {  # DTensor's mesh is not a tensor, and is kept as it is
                name: self._tensor(part) if isinstance(part, torch.Tensor) else part
                for name, part in wrapped.parts.items()
            }
            kind: Any = type(tensor)  # mypy knows no class that is a tensor and a wrapper
            made = kind.__tensor_unflatten__(inner, wrapped.context, tensor.size(), tensor.stride())
        assert made is not None
        declare_as(made, tensor)
        self._memo[id(tensor)] = made
        self._memo.setdefault(id(self._memo), []).append(tensor)  # as deepcopy keeps its originals
        return made


def _own_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy beside the arena; torch itself copies no subclass that lacks a ``new_empty``."""
    alone = tensor if tensor.is_leaf else tensor.detach()
    try:
        made: torch.Tensor = _deep_copy(alone, memo)
    except StagingError:
        if tensor.layout != torch.strided or not has_memory(tensor):
            raise
        made = alone.as_subclass(torch.Tensor).clone().as_subclass(type(tensor))
    return made.requires_grad_() if tensor.requires_grad else made


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        for key in list(memo)[known:]:  # half of what has failed
            del memo[key]
        with contextlib.suppress(Exception):  # torch copies no tensor amid a graph, but saves it
            torch.save(value, saved := io.BytesIO())
            saved.seek(0)
            return torch.load(saved, weights_only=False)
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied, and an asynchronous save "
            "needs a copy; leave it out of the state dict",
            cause=exc,
        ) from exc
