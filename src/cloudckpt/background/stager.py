"""``Stager``: copies a state dict into memory that is reused from save to save."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import os
import queue
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt.background.arena import Arena, Memory
from cloudckpt.background.layout import Layout
from cloudckpt.errors import ClosedError, SaveInProgressError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.group import TaskGroup

__all__ = ["StagedState", "Stager"]

_CHUNK = 16 * 1024 * 1024
"""Bytes that one call copies."""
_WORTH_THREADS = 32 * 1024 * 1024
"""Bytes from which on a copy is divided between threads."""
_SHRINK = 2
"""An arena that is more than this many times too large is replaced."""


@dataclass
class StagedState:
    """A staged copy, which holds its memory until it is released.

    Attributes:
        state_dict: The copied state dict.
        arena: The arena that holds its tensors.
        size: Bytes copied.
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
    """The use of the arena, which ends once: when it is released, or when its last tensor is gone.

    A token is moved from the queue to the lease, or back, by one call into C, which an interrupt
    can't come in the middle of: the token is always in one of the two.
    """

    def __init__(self, free: queue.SimpleQueue[None]) -> None:
        self._held: list[None] = []
        self._free = free

    def take(self, seconds: float = 0) -> None:
        """Takes the arena's token, waiting up to ``seconds`` for it.

        Raises:
            queue.Empty: If it is not free within ``seconds``.
        """
        self._held.extend(map(self._free.get, (seconds > 0,), (seconds,)))

    def end(self) -> None:
        # without a lock: the garbage collector may call it in the middle of anything
        with contextlib.suppress(IndexError):
            collections.deque(map(self._free.put, map(self._held.pop, (-1,))), maxlen=0)


class Stager(AsyncStager):
    """torch's ``AsyncStager`` whose memory is reused, and never overwritten while it is read.

    The saving process reads the same memory. A staged copy holds it until its last tensor is gone
    (or, in cloudckpt's own saves, until the save has ended). :meth:`stage` waits for that, so a
    checkpoint can't mix two steps, which torch's own persistent stager does not prevent.

    Memory: one copy of the staged state dict, and nothing else. It is allocated anew when the state
    dict outgrows it or shrinks below half of it. With CUDA it is pinned; :meth:`stage` waits for
    the current stream, which fills it.
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
            pin_memory: Whether to pin the memory; default: if CUDA is available.
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
            ClosedError: If the stager was closed, or made before this process was forked.
        """
        return self.begin(state_dict, self._patience).state_dict

    def begin(self, state_dict: dict[str, Any], patience: float) -> StagedState:
        """Copies a state dict into memory that the copy holds until it is released.

        Raises the errors of :meth:`stage`.

        Args:
            state_dict: The state dict to copy.
            patience: Seconds to wait for the end of the previous copy; 0 for not at all.
        """
        if self._closed:
            raise ClosedError(
                "the stager was closed, so it can't copy a state dict: make a new one"
            )
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
                    f"an earlier save still reads the staged copy after {patience:g} s; wait "
                    "for its future, or save less often"
                ) from None
            if self._closed:
                raise ClosedError(
                    "the stager was closed, so it can't copy a state dict: make a new one"
                )
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
            queue.Empty: If it is not free within ``patience`` seconds.
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

        def produce() -> None:
            for start in range(self._threads):
                group.submit(functools.partial(_copy_all, chunks[start :: self._threads]))

        group.run(produce)  # an interrupt waits for them: they read the state and write the copy

    def synchronize_staging(self) -> None:
        """Does nothing: the futures report when copies are done."""

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
    """Copies memory, given by target, source and bytes; without the GIL."""
    for target, source, size in chunks:
        ctypes.memmove(target, source, size)
