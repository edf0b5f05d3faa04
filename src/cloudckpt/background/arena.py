"""Memory for staged copies, which another process can map."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch

from cloudckpt.background.available import available_memory
from cloudckpt.errors import StagingMemoryError

__all__ = ["ALIGNMENT", "Arena", "Memory"]

ALIGNMENT = 64
"""Bytes; what torch.save aligns storages to, and more than any dtype needs."""


class Arena:
    """Anonymous shared memory of a fixed size.

    It has no name, so that nothing is left behind however its processes end, and no limit but the
    machine's memory: containers often have a tiny ``/dev/shm``. All of it is allocated at once: a
    lack of memory shows here, as an error, and not later as a signal.

    Attributes:
        size: Bytes.
        fd: The file descriptor that another process may map with :meth:`attach`.
        pinned: Whether an accelerator can copy to it without a detour.
    """

    fd = -1

    def __init__(self, size: int, *, pin: bool = False) -> None:
        """
        Args:
            size: Bytes, at least 1.
            pin: Whether to lock the pages for an accelerator.

        Raises:
            StagingMemoryError: If there is not so much memory.
        """
        _check_available(size)
        fd = _anonymous_file()
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        except (OSError, ValueError) as exc:
            os.close(fd)
            raise StagingMemoryError(
                f"the staged copy needs {_mib(size)} of shared memory, which can't be had; free "
                "memory, or save fewer bytes per rank",
                cause=exc,
            ) from exc
        self._give_back_at_the_end(fd, os.getpid())
        self.size = size
        self.fd = fd
        self.pinned = pin
        if pin:
            try:
                _pin(self.address, size)
            except BaseException:
                self.pinned = False
                self.close()
                raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """The arena of another process; the descriptor is taken over."""
        arena = cls.__new__(cls)
        arena._map = mmap.mmap(fd, size)
        arena._give_back_at_the_end(fd, None)
        arena.size, arena.fd, arena.pinned = size, fd, False
        return arena

    def _give_back_at_the_end(self, fd: int, owner: int | None) -> None:
        """When the last tensor in it is gone, which may outlive this object."""
        weakref.finalize(self._map, _give_back, fd, owner).atexit = False

    @property
    def address(self) -> int:
        """Where it begins in this process's memory."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def memory(self, on_unused: Callable[[], None] = lambda: None) -> Memory:
        """Its memory, for tensors.

        Args:
            on_unused: Called, in any thread and perhaps by the garbage collector, when neither the
                result nor any tensor in it exists any more.
        """
        owner = (ctypes.c_char * self.size).from_buffer(self._map)
        weakref.finalize(owner, on_unused).atexit = False
        return Memory(owner)

    def close(self) -> None:
        """Gives the memory back as soon as no tensor uses it any more."""
        if self.fd < 0:
            return
        if self.pinned:
            _unpin(self.address)
        self.fd = -1
        del self._map  # unmapped with the last storage

    def __del__(self) -> None:
        self.close()


class Memory:
    """The memory of an arena in use; what is made of it keeps it in use."""

    def __init__(self, owner: ctypes.Array[ctypes.c_char]) -> None:
        self._owner = owner

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(self._owner)

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """A storage of ``size`` bytes, at least 1, from byte ``start`` on."""
        view = torch.frombuffer(self._owner, dtype=torch.uint8, count=size, offset=start)
        return view.untyped_storage()


def _give_back(fd: int, owner: int | None) -> None:
    """Closes the file; in the process that made it (``owner``), frees its pages first.

    Children that were forked meanwhile, such as the workers of a DataLoader, have a mapping and
    descriptors of their own, by which they would keep the pages as long as they live. They have no
    use for them, and by now the saving process has none either. In such a child nothing is freed:
    the memory is in use in the process that made it.
    """
    if os.getpid() == owner:
        os.ftruncate(fd, 0)
    os.close(fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cloudckpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="cloudckpt-staging") as file:  # not on Linux
        return os.dup(file.fileno())


def _check_available(size: int) -> None:
    """Whether the kernel would let us have so much memory; it might kill us otherwise."""
    available = available_memory()
    if available is not None and size > available:
        raise StagingMemoryError(
            f"the staged copy needs {_mib(size)}, and this machine or the limit of its container "
            f"has {_mib(available)} left; free memory, or save fewer bytes per rank"
        )


def _mib(size: int) -> str:
    return f"{-(-size // 1024**2):,} MiB"


def _pin(address: int, size: int) -> None:
    cudart: Any = torch.cuda.cudart
    code = cudart().cudaHostRegister(address, size, 1)  # 1: usable from all contexts
    if int(code) != 0:
        raise StagingMemoryError(
            f"CUDA can't pin {_mib(size)} for the staged copy; raise the limit of locked memory "
            "(ulimit -l), or turn pinning off",
            cause=f"cudaHostRegister returned {int(code)}",
        )


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart
    cudart().cudaHostUnregister(address)
