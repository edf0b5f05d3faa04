"""Plans the bytes of a staged copy in an arena, and rebuilds the state dict on top of them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import Memory
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
    # by id; the value is kept alive: otherwise a later value might get the same id
    _seen: dict[int, Any] = field(default_factory=dict)
    _planned: dict[int, torch.Tensor] = field(default_factory=dict)
    _others: list[tuple[torch.Tensor, _Path]] = field(default_factory=list)
    _parts: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)  # of wrappers
    _factories: list[Any] = field(default_factory=list)  # of dicts; they are not saved
    _copies_itself: bool = False  # whether a container has its own __deepcopy__

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Layout:
        """Plans the copy of a state dict.

        Raises:
            StagingError: If a tensor has no memory that can be copied.
        """
        layout = cls()
        layout._walk(state_dict, ())
        place = 0
        for region in layout.regions:
            region.first -= region.first % region.grain
            region.place = place
            place += aligned(region.size)
        layout.size = place
        return layout

    def _walk(self, value: Any, path: _Path, *, is_pickled: bool = False) -> None:
        """Plans the tensors in dicts, lists and tuples; tuples are pickled as one value."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not (_is_bytes(value) and self._add(value)):
                self._add_other(value, path)
        elif isinstance(value, (Mapping, list, tuple)):
            self._copies_itself |= hasattr(type(value), "__deepcopy__")
            is_pickled |= isinstance(value, tuple)
            if isinstance(value, defaultdict) and not is_pickled:
                self._factories.append(value.default_factory)
            for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
                if type(entry) not in _ATOMIC:
                    self._walk(entry, (*path, key), is_pickled=is_pickled)

    def _add_other(self, tensor: Any, path: _Path) -> None:
        """Records a tensor that is not plain memory, and plans the copy of its inner tensors.

        Raises:
            StagingError: If it can't be copied.
        """
        self._others.append((tensor, path))
        traceable: bool = is_traceable_wrapper_subclass(tensor)
        if not traceable:
            if why := _why_not_copied(tensor):
                raise StagingError(why, item=_text(path))
            return
        settled(tensor)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        self._parts[id(tensor)] = parts, context
        for part in parts.values():
            if isinstance(part, torch.Tensor):  # a DTensor's mesh is not
                self._walk(part, path)

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
            key: _of_kind(self._staged(shown), self._seen[key])
            for key, shown in self._planned.items()
        }
        # a copy of a method would copy its object, such as a whole model
        memo.update((id(factory), factory) for factory in self._factories if callable(factory))
        for tensor, path in self._others:
            self._copy_other(tensor, memo, path)
        live: set[int] = set()
        if self._copies_itself:  # it may keep its values, as immutable mappings do
            live.update(id(tensor) for tensor, _ in self._others)
            live.update(key for key, shown in self._planned.items() if shown.numel())
        return cast(dict[str, Any], _copied(state_dict, memo, (), live))

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

    def _copy_other(self, tensor: torch.Tensor, memo: dict[int, Any], path: _Path) -> torch.Tensor:
        """Copies a tensor that is not plain memory, and adds the copy to ``memo``."""
        made: torch.Tensor | None = memo.get(id(tensor))
        if made is not None:
            return made
        if id(tensor) in self._parts:
            parts, context = self._parts[id(tensor)]
            inner = {
                name: self._copy_other(part, memo, path) if isinstance(part, torch.Tensor) else part
                for name, part in parts.items()
            }
            # mypy does not know that a class can be both tensor and wrapper
            kind: Any = type(tensor)
            made = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        else:
            made = _own_copy(tensor, memo, path)
        assert made is not None
        declare_as(made, tensor)
        memo[id(tensor)] = made
        return made


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


def _copied(
    value: Any, memo: dict[int, Any], path: _Path, live: Collection[int] = frozenset()
) -> Any:
    """Returns a deep copy that contains the tensors of ``memo``, and no object whose id is
    ``live``.

    Values that ``copy.deepcopy`` can't copy, such as a mapping proxy or a tensor amid a graph
    within an object, are copied entry by entry or by a pickle.

    Raises:
        StagingError: If neither works.
    """
    known = len(memo)
    try:
        made: Any = copy.deepcopy(value, memo)
        if live:
            _refuse_live(made, live, set())
        return made
    except Exception as exc:
        for key in list(memo)[known:]:  # partial results of the failed copy
            del memo[key]
        if isinstance(value, dict):
            made = memo[id(value)] = _shallow(value)  # before its entries: it may contain itself
            for key, entry in value.items():
                made[key] = _copied(entry, memo, (*path, key), live)
            return made
        if type(value) is list:
            made = memo[id(value)] = []
            made.extend(_copied(entry, memo, (*path, i), live) for i, entry in enumerate(value))
            return made
        with contextlib.suppress(Exception):  # torch copies no tensor amid a graph, but saves it
            torch.save(value, saved := io.BytesIO())
            saved.seek(0)
            return torch.load(saved, weights_only=False)
        if isinstance(value, Mapping):
            made = memo[id(value)] = {}
            made.update((key, _copied(e, memo, (*path, key), live)) for key, e in value.items())
            return made
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied, and an asynchronous save "
            "needs a copy; leave it out of the state dict, or use cloudckpt.save",
            item=_text(path),
            cause=exc,
        ) from exc


def _refuse_live(value: Any, live: Collection[int], seen: set[int]) -> None:
    """Checks that a copy contains no original tensor, which training would go on to change.

    Raises:
        TypeError: If it does.
    """
    if id(value) in live:
        raise TypeError("a container in the value does not copy its tensors")
    if id(value) not in seen and isinstance(value, (Mapping, list, tuple)):
        seen.add(id(value))
        for entry in value.values() if isinstance(value, Mapping) else value:
            _refuse_live(entry, live, seen)


def _shallow(value: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a shallow copy, of the same class if that can be copied, else an empty dict."""
    with contextlib.suppress(Exception):  # also for classes whose keys are attributes
        made = copy.copy(value)
        if made is not value:  # an immutable value is its own copy
            return made
    return {}


def _text(path: _Path) -> str:
    return ".".join(map(str, path))
