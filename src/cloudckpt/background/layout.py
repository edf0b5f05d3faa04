"""Plans the bytes of a staged copy in an arena, and rebuilds the state dict on top of them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import Memory
from cloudckpt.checkpoint.structure import check_nesting
from cloudckpt.checkpoint.torch_private import PLANS_ITSELF, declare_as
from cloudckpt.errors import StagingError
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.memory import (
    PLAIN,
    extent,
    has_memory,
    memory_of,
    settled,
    shows_its_memory,
)

__all__ = ["Layout", "Region"]

_ATOMIC = frozenset((type(None), bool, int, float, complex, str, bytes))

_CONTAINERS = (Mapping, list, tuple)

_Path = tuple[Any, ...]


@dataclass(slots=True)
class Region:
    """The bytes of one storage that some tensor uses.

    Attributes:
        storage: The storage, kept alive.
        first: The offset of the first byte needed.
        end: The offset just after the last byte needed.
        grain: Bytes of the largest element; ``first`` is a multiple of it.
        place: The offset of the bytes in the arena.
        copy: The storage of the copy; None until :meth:`Layout.place`.
    """

    storage: torch.UntypedStorage
    first: int
    end: int
    grain: int
    place: int = 0
    copy: torch.UntypedStorage | None = None

    @property
    def size(self) -> int:
        """The number of bytes to copy."""
        return self.end - self.first


@dataclass
class Layout:
    """The plan of a staged copy.

    Tensors that share a storage still share it in the copy. Only the parts of a storage that some
    tensor uses are copied: a view of a few rows does not copy the whole storage.

    Attributes:
        regions: The regions to copy.
        size: Bytes of the arena that the copy takes.
    """

    regions: list[Region] = field(default_factory=list)
    size: int = 0
    _by_storage: dict[int, Region] = field(default_factory=dict)
    # by id of the container: itself, and the key, path and value of each entry to be copied; read
    # once, as a mapping may make its entries anew each time
    _entries: dict[int, tuple[Any, list[tuple[Any, _Path, Any]]]] = field(default_factory=dict)
    _tensors: dict[int, torch.Tensor] = field(default_factory=dict)  # by id
    _planned: dict[int, torch.Tensor] = field(default_factory=dict)  # by id
    _others: list[tuple[torch.Tensor, _Path]] = field(default_factory=list)  # inner ones first
    _parts: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)  # of wrappers

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Layout:
        """Plans the copy of a state dict.

        Raises:
            StagingError: If a tensor has no memory that can be copied.
            UnsupportedValueError: If a container contains itself.
        """
        check_nesting(state_dict)
        layout = cls()
        layout._walk(state_dict, ())
        place = 0
        for region in layout.regions:
            region.first -= region.first % region.grain
            region.place = place
            place += aligned(region.size)
        layout.size = place
        return layout

    def _walk(self, container: Any, path: _Path) -> None:
        if id(container) in self._entries:
            return
        is_tuple, is_mapping = isinstance(container, tuple), isinstance(container, Mapping)
        entries = [
            (key, path if is_tuple else (*path, key), entry)  # a tuple is saved as one item
            for key, entry in (container.items() if is_mapping else enumerate(container))
            if type(entry) not in _ATOMIC
        ]
        self._entries[id(container)] = container, entries
        for _, at, entry in entries:
            if isinstance(entry, torch.Tensor):
                self._plan(entry, at)
            elif isinstance(entry, _CONTAINERS):
                self._walk(entry, at)

    def _plan(self, tensor: Any, path: _Path) -> None:
        """Plans the copy of a tensor, and of the tensors inside a wrapper.

        Raises:
            StagingError: If it can't be copied.
        """
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = tensor
        if _is_bytes(tensor) and self._add(tensor):
            return
        traceable: bool = is_traceable_wrapper_subclass(tensor)
        if traceable:
            settled(tensor)
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            self._parts[id(tensor)] = parts, context
            for part in parts.values():
                if isinstance(part, torch.Tensor):  # a DTensor's mesh is not
                    self._plan(part, path)
        elif why := _why_not_copied(tensor):
            raise StagingError(why, item=_text(path))
        self._others.append((tensor, path))

    def _add(self, tensor: torch.Tensor) -> bool:
        """Plans the copy of a tensor; returns whether it has memory to copy."""
        if tensor.numel() == 0:  # its storage may be freed, and its offset be anything
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
        """Makes the storage of each region's copy in the arena's memory."""
        for region in self.regions:
            region.copy = memory.storage(region.place, region.size)

    def rebuild(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a deep copy of the state dict, with tensors on the copied regions.

        Args:
            state_dict: The original.

        Raises:
            StagingError: If a value can't be copied.
        """
        memo: dict[int, Any] = {
            key: _of_kind(self._staged(shown), self._tensors[key])
            for key, shown in self._planned.items()
        }
        for tensor, path in self._others:
            memo[id(tensor)] = self._copy_other(tensor, memo, path)
        return cast(dict[str, Any], self._copy(state_dict, memo, ()))

    def _copy(self, value: Any, memo: dict[int, Any], path: _Path) -> Any:
        """Copies a value, and before that the entries of a container.

        Raises:
            StagingError: If a value can't be copied.
        """
        if id(value) not in memo:
            _, entries = self._entries.get(id(value), (None, []))
            copies = {key: self._copy(entry, memo, at) for key, at, entry in entries}
            is_filled = isinstance(value, (Mapping, list))
            memo[id(value)] = _filled(value, copies) if is_filled else _copied(value, memo, path)
        return memo[id(value)]

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of a planned tensor, on the copied region."""
        if tensor.numel() == 0:
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        region = self._by_storage[tensor.untyped_storage()._cdata]
        # each region has its own storage: torch can't pickle a DTensor whose local tensor begins
        # after the start of its storage
        offset = tensor.storage_offset() - region.first // tensor.itemsize
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        assert region.copy is not None
        return made.set_(region.copy, offset, tensor.size(), tensor.stride())

    def _copy_other(self, tensor: Any, memo: dict[int, Any], path: _Path) -> torch.Tensor:
        """Copies a tensor that is not plain memory, whose inner tensors were copied."""
        if id(tensor) in self._parts:
            parts, context = self._parts[id(tensor)]
            inner = {name: memo.get(id(part), part) for name, part in parts.items()}
            made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        else:
            made = _own_copy(tensor, memo, path)
        declare_as(made, tensor)
        return cast(torch.Tensor, made)


def _of_kind(made: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Gives a copied tensor the class, ``requires_grad`` and declared shards of the original."""
    if isinstance(original, torch.nn.Parameter):
        made = torch.nn.Parameter(made, original.requires_grad)
    else:
        made.requires_grad_(original.requires_grad)
    declare_as(made, original)
    return made


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory; others are copied separately, or refused."""
    return (
        type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and PLANS_ITSELF.isdisjoint(vars(tensor))
    )


def _why_not_copied(tensor: torch.Tensor) -> str:
    """Returns why a copy of the tensor would differ from it; empty if it can be copied."""
    if not PLANS_ITSELF.isdisjoint(vars(tensor)):
        return (
            "a tensor has functions as attributes that plan its items, and in a copy these "
            "would still belong to the original; save it with cloudckpt.save"
        )
    with contextlib.suppress(RuntimeError):  # a subclass without a storage
        if tensor.layout == torch.strided and not tensor.is_meta and not has_memory(tensor):
            return (
                "the memory of a tensor was freed or shrunk, so that there is nothing to copy; "
                "gather it again before the save, or leave it out of the state dict"
            )
    return ""


def _own_copy(tensor: torch.Tensor, memo: dict[int, Any], path: _Path) -> torch.Tensor:
    """Copies a tensor outside of the arena, even if torch can't deep-copy its class."""
    alone = tensor if tensor.is_leaf else tensor.detach()
    try:
        made: torch.Tensor = _copied(alone, memo, path)
    except StagingError:
        if tensor.layout != torch.strided or not has_memory(tensor):
            raise
        made = alone.as_subclass(torch.Tensor).clone().as_subclass(type(tensor))
    return made.requires_grad_() if tensor.requires_grad else made


def _filled(container: Any, copies: dict[Any, Any]) -> Any:
    """Returns a copy of a mapping or list with the copies of its entries, by key or index.

    A class of its own is kept if it is a dict or list that can be copied; any other container
    becomes the dict or list that it is saved as.
    """
    if isinstance(container, (dict, list)):
        with contextlib.suppress(Exception):
            made = copy.copy(container)
            if made is not container:  # an immutable one
                for key, entry in copies.items():
                    made[key] = entry
                return made
    if isinstance(container, Mapping):
        return dict(container) | copies
    return [copies.get(index, entry) for index, entry in enumerate(container)]


def _copied(value: Any, memo: dict[int, Any], path: _Path) -> Any:
    """Returns a deep copy of a value, with the copies of ``memo``, by the ``id`` of the original.

    A value that can't be copied is pickled: torch pickles a tensor amid a graph, but does not copy
    it.

    Raises:
        StagingError: If neither works.
    """
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        for key in list(memo)[known:]:  # partial results of the failed copy
            del memo[key]
        with contextlib.suppress(Exception):
            torch.save(value, saved := io.BytesIO())
            saved.seek(0)
            return torch.load(saved, weights_only=False)
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied, and an asynchronous save "
            "needs a copy; leave it out of the state dict, or use cloudckpt.save",
            item=_text(path),
            cause=exc,
        ) from exc


def _text(path: _Path) -> str:
    return ".".join(map(str, path))
