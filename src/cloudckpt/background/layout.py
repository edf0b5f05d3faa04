"""Where a state dict's bytes go in an arena, and the state dict rebuilt on top of them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import Memory
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
        elif isinstance(value, (dict, MappingProxyType)):
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

    def rebuild(self, state_dict: dict[str, Any], *, is_pickled: bool = False) -> dict[str, Any]:
        """Rebuilds the state dict as an independent structure, with tensors on the copied regions.

        Args:
            state_dict: The original.
            is_pickled: Whether its containers will be pickled, not flattened.

        Raises:
            StagingError: If a value can't be copied.
        """
        # for objects that the copier does not enter: deepcopy finds these tensors
        memo: dict[int, Any] = {
            key: _of_kind(self._staged(shown), self._seen[key])
            for key, shown in self._planned.items()
        }
        return _Copier(self._wrapped).mapping(state_dict, memo, is_pickled=is_pickled)

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
    """Copies a structure; the same object in two places stays the same object."""

    def __init__(self, wrapped: dict[int, _Wrapped]) -> None:
        self._wrapped = wrapped
        # by id: copies with dicts in place of other mappings, where torch flattens them; where it
        # pickles the same values, classes count
        self._flattened: dict[int, Any] = {}
        self._replaced = 0  # mappings that have become dicts
        self._with_attributes: dict[int, torch.Tensor] = {}  # by id; where they are pickled
        # what a mapping makes when it is asked: another value would get its id otherwise
        self._kept: list[Any] = []

    def mapping(
        self, value: Mapping[Any, Any], memo: dict[int, Any], *, is_pickled: bool = False
    ) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        kind: Any = type(value)
        if isinstance(value, defaultdict):
            made = defaultdict(value.default_factory)
        elif kind in (OrderedDict, Counter):
            made = kind()
        memo[id(value)] = made
        self._kept.append(value)
        for key, entry in value.items():
            try:
                made[key] = self.value(entry, memo, is_pickled=is_pickled)
            except StagingError as error:
                error.item = str(key) if error.item is None else f"{key}.{error.item}"
                raise
        return made

    def value(self, value: Any, memo: dict[int, Any], *, is_pickled: bool = False) -> Any:
        """A copy; ``is_pickled``: torch does not flatten what it is in, so its class counts."""
        kind = type(value)
        if kind in _ATOMIC:
            return value
        if not is_pickled and id(value) in self._flattened:
            return self._flattened[id(value)]
        if id(value) in memo:
            made = memo[id(value)]
        else:
            replaced = self._replaced
            made = self._copied(value, memo, is_pickled=is_pickled)
            if self._replaced > replaced and not is_pickled:
                self._flattened[id(value)] = memo.pop(id(value))
        if is_pickled and type(value) in _PLAIN and vars(value):
            return self._attributed(value, made, memo)
        return made

    def _attributed(
        self, original: torch.Tensor, made: torch.Tensor, memo: dict[int, Any]
    ) -> torch.Tensor:
        """The copy of a tensor, with its attributes: where torch pickles it, it saves them too."""
        found = self._with_attributes.get(id(original))
        if found is None:
            found = _of_kind(made.detach(), original)
            self._with_attributes[id(original)] = found
            vars(found).update(self.mapping(vars(original), memo, is_pickled=True))
        return found

    def _copied(self, value: Any, memo: dict[int, Any], *, is_pickled: bool) -> Any:
        """A copy of what is not in the memo, which has it then."""
        kind = type(value)
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            made: Any = self._tensor(value, memo)
            declare_as(made, value)
        elif kind in (dict, OrderedDict, defaultdict, Counter, MappingProxyType):
            return self.mapping(value, memo, is_pickled=is_pickled)
        elif isinstance(value, Mapping):
            # one that is no dict may compute its entries from what the training changes
            if not (is_pickled or isinstance(value, dict)):
                self._replaced += 1
                return self.mapping(value, memo)
            made = self._of_its_class(value, memo, is_pickled=is_pickled)
        elif kind is list:
            made = memo[id(value)] = []
            made.extend(self.value(entry, memo, is_pickled=is_pickled) for entry in value)
            return made
        elif kind is tuple:
            made = tuple(self.value(entry, memo, is_pickled=True) for entry in value)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            made = tuple.__new__(kind, [self.value(one, memo, is_pickled=True) for one in value])
            if hasattr(value, "__dict__"):
                vars(made).update(self.mapping(vars(value), memo, is_pickled=True))
        elif kind is io.BytesIO:
            made = io.BytesIO(value.getvalue())
            made.seek(value.tell())
        else:
            made = _deep_copy(value, memo)
        memo[id(value)] = made
        return made

    def _of_its_class(
        self, value: Mapping[Any, Any], memo: dict[int, Any], *, is_pickled: bool
    ) -> Any:
        """A mapping of any other class; a dict if that can't be copied and torch flattens it."""
        tried = dict(memo)  # a copy that fails leaves half of it there
        try:
            made = _deep_copy(value, tried) if is_pickled else copy.deepcopy(value, tried)
        except Exception:  # an entry that is the cause fails again, by its name
            made = self.mapping(value, memo, is_pickled=is_pickled)
            if is_pickled:
                raise
            self._replaced += 1
            return made
        kept = tried.pop(id(tried), [])  # what deepcopy keeps alive, for the sake of its id
        memo.setdefault(id(memo), []).extend(kept)
        memo.update(tried)
        return made

    def _tensor(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
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
            return _own_copy(tensor, memo)
        inner = {
            # DTensor's mesh is not a tensor, and is kept as it is
            name: self.value(part, memo) if isinstance(part, torch.Tensor) else part
            for name, part in wrapped.parts.items()
        }
        kind: Any = type(tensor)  # mypy knows no class that is a tensor and a wrapper
        rebuilt: torch.Tensor = kind.__tensor_unflatten__(
            inner, wrapped.context, tensor.size(), tensor.stride()
        )
        return rebuilt


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
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        with contextlib.suppress(Exception):  # torch copies no tensor amid a graph, but saves it
            torch.save(value, saved := io.BytesIO())
            saved.seek(0)
            return torch.load(saved, weights_only=False)
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied, and an asynchronous save "
            "needs a copy; leave it out of the state dict",
            cause=exc,
        ) from exc
