"""``Stager``: copies a state dict into memory that is reused from save to save.

A ``Layout`` plans which bytes of which storages are copied, and to where in the arena. The
``Stager`` lends the arena to one copy at a time, and fills it; then the layout rebuilds the state
dict on top of the copied bytes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import gc
import io
import os
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.background.arena import Arena, Memory
from cloudckpt.checkpoint.structure import check_nesting
from cloudckpt.checkpoint.torch_private import PLANS_ITSELF, declare_as
from cloudckpt.errors import ClosedError, SaveInProgressError, StagingError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import (
    PLAIN,
    extent,
    has_memory,
    memory_of,
    settled,
    shows_its_memory,
)

__all__ = ["Layout", "StagedState", "Stager"]

_CHUNK = 16 * 1024 * 1024
"""Maximum bytes that one call copies."""
_WORTH_THREADS = 32 * 1024 * 1024
"""Minimum bytes of a copy that is divided between threads."""
_SHRINK = 2
"""An arena above 16 MiB is replaced if it is more than this many times as large as needed."""


@dataclass
class StagedState:
    """A staged copy, which holds its memory until it is released or garbage-collected.

    Attributes:
        state_dict: The copied state dict.
        arena: The arena that holds its tensors.
        size: Bytes of the arena that the copy takes.
    """

    state_dict: dict[str, Any]
    arena: Arena
    size: int
    _lease: _Lease = field(repr=False)
    _memory: Memory | None = field(repr=False)  # in use, even if no tensor is in it

    def release(self) -> None:
        """Ends the use of the copy; the next copy may reuse its memory."""
        self.state_dict, self._memory = {}, None
        self._lease.end()


class _Lease:
    """A staged copy's right to use the arena; ends with the copy's release or its last tensor.

    The right is a token, which is either in a queue or in a lease. One call into C moves the token,
    so that no interrupt can lose it.
    """

    def __init__(self, free: queue.SimpleQueue[None]) -> None:
        self._held: list[None] = []
        self._free = free

    def take(self, seconds: float = 0) -> None:
        """Takes the arena's token, waiting up to ``seconds`` for it.

        Raises:
            queue.Empty: If the token is not free within ``seconds``.
        """
        self._held.extend(map(self._free.get, (seconds > 0,), (seconds,)))

    def end(self) -> None:
        # without a lock: the garbage collector may call it in the middle of anything
        with contextlib.suppress(IndexError):
            collections.deque(map(self._free.put, map(self._held.pop, (-1,))), maxlen=0)


class Stager(AsyncStager):
    """An ``AsyncStager`` of torch that reuses its memory once no save reads the previous copy.

    A staged copy holds the memory until its last tensor is gone (or, in cloudckpt's own saves,
    until the save has ended). :meth:`stage` waits until the memory is free, so a checkpoint can't
    mix two steps, which torch's own persistent stager does not prevent. A saving process reads the
    same memory.

    The memory is about as large as the staged state dict. It is allocated anew if the state dict
    outgrows it or, above 16 MiB, needs less than half of it. If tensors are on CUDA, the memory is
    pinned unless ``pin_memory`` is False, and :meth:`stage` waits for the copies on the current
    stream.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        threads: int | None = None,
        pin_memory: bool | None = None,
        patience: float = 3600.0,
    ) -> None:
        """Makes a stager; allocates no memory yet.

        Args:
            threads: Threads that copy on the CPU; default: as many as torch uses, at most 8.
            pin_memory: Whether to pin the memory if any tensors are on CUDA; default: if CUDA is
                available.
            patience: Seconds to wait until the previous copy is no longer used.
        """
        self._threads = threads if threads is not None else min(8, torch.get_num_threads())
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._patience = patience
        self._arena: Arena | None = None
        # has a token if the arena is free
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._free.put(None)
        self._process = os.getpid()
        self._closed = False

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Returns a copy of the state dict that later changes don't affect.

        Raises:
            SaveInProgressError: If the previous copy is still used after ``patience`` seconds.
            StagingMemoryError: If there is no memory for the copy.
            StagingError: If a value can't be copied.
            UnsupportedValueError: If a container contains itself, or is nested too deeply.
            ClosedError: If the stager was closed, or made before this process was forked.
        """
        return self.begin(state_dict, self._patience).state_dict

    def begin(self, state_dict: dict[str, Any], patience: float) -> StagedState:
        """Copies a state dict into memory that the copy holds until it is released.

        It raises the errors of :meth:`stage`.

        Args:
            state_dict: The state dict to copy.
            patience: Seconds to wait until the previous copy is no longer used; 0 for not at all.
        """
        self._check_open()
        if os.getpid() != self._process:
            raise ClosedError(
                "the stager was made before this process was forked, and shares its memory "
                "with the parent process; make a new one in this process"
            )
        # copies made in inference mode could not be read outside it
        with torch.inference_mode(False), torch.no_grad():
            return self._begin(state_dict, patience)

    def _begin(self, state_dict: dict[str, Any], patience: float) -> StagedState:
        with paused_gc():
            layout = Layout.of(state_dict)
        lease = _Lease(self._free)
        try:
            try:
                self._take(lease, patience)
            except queue.Empty:
                raise SaveInProgressError(
                    f"an earlier save still reads the staged copy after {patience:g} s; wait for "
                    "its future, save less often, or raise patience= (BackgroundOptions or Stager)"
                ) from None
            self._check_open()  # it may have been closed meanwhile
            arena = self._fitting(layout)
            memory = arena.memory(lease.end)
            with paused_gc():
                layout.place(memory)
            self._copy(layout, memory)
            with paused_gc():
                content = layout.rebuild(state_dict)
        except BaseException:
            lease.end()
            raise
        return StagedState(content, arena, layout.size, lease, memory)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "the stager was closed, so it can't copy a state dict: make a new one"
            )

    def _fitting(self, layout: Layout) -> Arena:
        """Returns the arena, replaced first if it is too small for the layout, or far too large."""
        size, held = layout.size, self._arena
        if held is not None and (held.size < size or held.size > max(size * _SHRINK, _CHUNK)):
            self._free_arena()
        if self._arena is None:
            is_on_cuda = any(region.storage.device.type == "cuda" for region in layout.regions)
            self._arena = Arena(max(size, 1), pin=self._pin and is_on_cuda)
        return self._arena

    def _free_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _take(self, lease: _Lease, patience: float) -> None:
        """Takes the arena; collects garbage while it waits, as reference cycles may hold the arena.

        torch 2.9's planners, and objects that torch 2.15 keeps of a save, leave such cycles. The
        collector runs after 0, 1, 3, 7, … seconds of waiting.

        Raises:
            queue.Empty: If the arena is not free within ``patience`` seconds.
        """
        end, pause = time.monotonic() + patience, 1.0
        while True:
            try:
                return lease.take()
            except queue.Empty:
                if patience <= 0:
                    raise
            gc.collect()
            left = end - time.monotonic()
            try:
                return lease.take(max(0.001, min(left, pause)))
            except queue.Empty:
                if left <= pause:
                    raise
            pause *= 2

    def _copy(self, layout: Layout, memory: Memory) -> None:
        on_host: list[tuple[int, int, int]] = []
        devices: set[torch.device] = set()
        try:
            for region in layout.regions:
                device = region.storage.device
                if device.type == "cpu":
                    place = memory.address + region.place
                    source = region.storage.data_ptr() + region.first
                    for start in range(0, region.size, _CHUNK):
                        size = min(_CHUNK, region.size - start)
                        on_host.append((place + start, source + start, size))
                    continue
                devices.add(device)
                source_bytes = torch.empty(0, dtype=torch.uint8, device=device)
                source_bytes.set_(region.storage, region.first, (region.size,), (1,))
                assert region.copy is not None
                target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(region.copy)
                target.copy_(source_bytes, non_blocking=self._pin)
            self._copy_on_host(on_host)
        finally:  # after an interrupt, too: the memory is then free for the next copy
            for device in devices:
                torch.accelerator.current_stream(device).synchronize()

    def _copy_on_host(self, chunks: list[tuple[int, int, int]]) -> None:
        if self._threads < 2 or sum(size for _, _, size in chunks) < _WORTH_THREADS:
            _copy_all(chunks)
            return
        group = TaskGroup(self._threads, name="cloudckpt-stage")
        # an interrupt waits for them: they read the state and write the copy
        group.map(_copy_all, [chunks[start :: self._threads] for start in range(self._threads)])

    def synchronize_staging(self) -> None:
        """Does nothing: :meth:`stage` itself waits until the memory is filled."""

    def close(self) -> None:
        """Frees the memory; a copy still being read keeps its memory until it is released."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._free_arena()

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy_all(chunks: list[tuple[int, int, int]]) -> None:
    """Copies chunks of memory without the GIL.

    Args:
        chunks: The target address, source address and number of bytes of each chunk.
    """
    for target, source, size in chunks:
        ctypes.memmove(target, source, size)


_ATOMIC = frozenset((type(None), bool, int, float, complex, str, bytes))

_CONTAINERS = (Mapping, list, tuple)

_Path = tuple[Any, ...]


@dataclass(slots=True)
class Region:
    """A range of one storage that contains all bytes that tensors of the state dict use.

    Attributes:
        storage: The storage, kept alive.
        first: The offset of the first byte needed.
        end: The offset just after the last byte needed.
        grain: The largest element size of these tensors in bytes; ``first`` is a multiple of it.
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

    Tensors that share a storage still share it in the copy. Of a storage, only the bytes from the
    first to the last that tensors use are copied: not all of it for a view of a few elements.

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
            StagingError: If a tensor can't be copied, for example because its memory was freed.
            UnsupportedValueError: If a container contains itself, or is nested too deeply.
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
        """Plans the copy of a tensor that is plain memory; returns False if its memory is gone."""
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
        """Copies a value; of a container, its entries first.

        Raises:
            StagingError: If a value can't be copied.
        """
        if id(value) not in memo:
            _, entries = self._entries.get(id(value), (None, []))
            copies = {key: self._copy(entry, memo, at) for key, at, entry in entries}
            if isinstance(value, collections.defaultdict):
                # a copy of a method would copy its object, such as a whole model
                memo[id(value.default_factory)] = value.default_factory
            is_plain = type(value) in (dict, list)
            memo[id(value)] = (
                _plain(value, copies) if is_plain else _copied(value, memo, path, copies)
            )
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
        """Copies a tensor that is not plain memory, whose inner tensors were copied.

        Raises:
            StagingError: If it can't be copied or pickled.
        """
        if id(tensor) in self._parts:
            parts, context = self._parts[id(tensor)]
            inner = {name: memo.get(id(part), part) for name, part in parts.items()}
            made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        else:
            made = _own_copy(tensor, memo, path)
        declare_as(made, tensor)
        return cast(torch.Tensor, made)


def _of_kind(made: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Returns a copied tensor with the ``requires_grad`` and declared shards of the original.

    It is a Parameter if the original is one.
    """
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
    """Returns why a tensor can't be copied faithfully, for a message; empty if it can."""
    if not PLANS_ITSELF.isdisjoint(vars(tensor)):
        return (
            "a tensor has functions of its own that plan its items; in a copy, these would still "
            "return items of the original: save it with cloudckpt.save"
        )
    with contextlib.suppress(RuntimeError, ValueError):  # no storage, or a lazy parameter
        if tensor.layout == torch.strided and not tensor.is_meta and not has_memory(tensor):
            return (
                f"a {type(tensor).__name__} has no memory to copy: it was freed or shrunk, or this "
                "class never has any; gather the tensor again before the save, save its values in "
                "plain tensors, or leave the tensor out of the state dict"
            )
    return ""


def _own_copy(tensor: torch.Tensor, memo: dict[int, Any], path: _Path) -> torch.Tensor:
    """Copies a tensor outside of the arena, even if torch can't deep-copy its class.

    Raises:
        StagingError: If it can't be copied or pickled.
    """
    alone = tensor if tensor.is_leaf else tensor.detach()
    try:
        made: torch.Tensor = _copied(alone, memo, path, {})
    except StagingError:
        if tensor.layout != torch.strided or not has_memory(tensor):
            raise
        made = alone.as_subclass(torch.Tensor).clone().as_subclass(type(tensor))
    return made if made.requires_grad == tensor.requires_grad else made.requires_grad_()


def _plain(container: Any, copies: dict[Any, Any]) -> Any:
    """Returns a container as a dict or list, with the entries in ``copies`` in place of its own."""
    made: Any = dict(container.items()) if isinstance(container, Mapping) else list(container)
    for key, entry in copies.items():
        made[key] = entry
    return made


def _copied(value: Any, memo: dict[int, Any], path: _Path, copies: dict[Any, Any]) -> Any:
    """Returns a deep copy of a value, in which the copies of ``memo`` stand for their originals.

    If a mapping or list can't be copied, or its copy does not have the copied entries (an immutable
    one may copy them itself), the result is the dict or list that it is saved as. Any other value
    that can't be copied is pickled: torch pickles a tensor within an autograd graph, but does not
    copy it.

    Args:
        value: The value.
        memo: The copies made before, by the ``id`` of the original.
        path: The path of the value.
        copies: The copies of a container's entries, by key or index.

    Raises:
        StagingError: If the value can neither be copied nor pickled.
    """
    known = len(memo)
    try:
        made = copy.deepcopy(value, memo)
        if all(made[key] is entry for key, entry in copies.items()):
            return made
        raise TypeError("copy.deepcopy() made other copies of entries that were copied before")
    except Exception as exc:
        for key in list(memo)[known:]:  # partial results of the failed copy
            del memo[key]
        if isinstance(value, (Mapping, list)):
            return _plain(value, copies)
        with contextlib.suppress(Exception):
            torch.save(value, saved := io.BytesIO())
            saved.seek(0)
            return torch.load(saved, weights_only=False)
        raise StagingError(
            f"a value of type {type(value).__name__} can't be copied or pickled: save the values "
            "that it can be made from, or leave it out of the state dict",
            item=_text(path),
            cause=exc,
        ) from exc


def _text(path: _Path) -> str:
    return ".".join(map(str, path))
