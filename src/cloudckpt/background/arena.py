"""Shared memory for staged copies that another process can map, within the available memory.

Staged copies count against the machine and against the cgroups of this process: shared memory of a
memfd is charged to the cgroup of the process that touches it first, and exceeding a cgroup's limit
kills a process instead of returning an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cloudckpt.errors import StagingMemoryError

__all__ = ["Annex", "Arena", "Memory", "available_memory"]

_BUFFER = 256 * 1024  # bytes
_WORTH_A_CHECK = 4 * 1024 * 1024  # bytes
_ADDITION = "the data that a save adds to its staged copy, such as pickled values,"


class Arena:
    """Anonymous shared memory of a fixed size.

    It has no name, so it never outlives its processes. ``/dev/shm``, which is often tiny in
    containers, does not limit it. All of it is allocated at once if the system supports that: a
    lack of memory is an error here, not a signal later.

    Attributes:
        size: The arena's size in bytes.
        fd: The file descriptor that another process may map; -1 once closed.
        pinned: Whether an accelerator can copy to it directly.
    """

    fd = -1

    def __init__(self, size: int, *, pin: bool = False) -> None:
        """Allocates the memory.

        Args:
            size: The arena's size in bytes, at least 1.
            pin: Whether to lock the pages for an accelerator.

        Raises:
            StagingMemoryError: If there is not enough memory, or it can't be locked.
        """
        _check_available(size)
        try:
            with contextlib.ExitStack() as undo:
                fd = _anonymous_file()
                undo.callback(os.close, fd)
                _allocate(fd, size)
                self._map = mmap.mmap(fd, size)
                undo.pop_all()
        except (OSError, ValueError, OverflowError) as exc:
            raise StagingMemoryError(
                f"the staged copy needs {_mib(size)} of shared memory, which could not be "
                "allocated; free memory, or save fewer bytes per rank; if the cause is a limit of "
                "the process (ulimit -n, -f, -v), raise that",
                cause=exc,
            ) from exc
        # runs when the last tensor in it is gone, which may outlive this object
        weakref.finalize(self._map, _give_back, fd, os.getpid()).atexit = False
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

    @property
    def address(self) -> int:
        """The address of the arena's first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def memory(self, on_unused: Callable[[], None] = lambda: None) -> Memory:
        """Returns the arena's memory, in which storages of tensors can be made.

        Args:
            on_unused: Called, in any thread and perhaps by the garbage collector, when neither the
                result nor any tensor in it exists any more.
        """
        owner = (ctypes.c_char * self.size).from_buffer(self._map)
        weakref.finalize(owner, on_unused).atexit = False
        return Memory(owner)

    def close(self) -> None:
        """Frees the memory once no tensor uses it."""
        if self.fd < 0:
            return
        if self.pinned:
            _unpin(self.address)
        self.fd = -1
        del self._map  # unmapped with the last storage

    def __del__(self) -> None:
        self.close()


class Memory:
    """An arena's memory, in use as long as this object or a storage in the memory exists."""

    def __init__(self, owner: ctypes.Array[ctypes.c_char]) -> None:
        self._owner = owner

    @property
    def address(self) -> int:
        """The address of the memory's first byte in this process."""
        return ctypes.addressof(self._owner)

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """Returns a storage of ``size`` bytes (at least 1) from byte ``start`` of the memory."""
        view = torch.frombuffer(self._owner, dtype=torch.uint8, count=size, offset=start)
        return view.untyped_storage()


class Annex:
    """Anonymous shared memory for bytes outside an arena; it grows as bytes are appended.

    Another process may map it once everything is written, until it is closed.

    Attributes:
        size: Bytes appended so far.
        fd: The file descriptor; its file has all bytes after :meth:`flush`; -1 once closed.
    """

    def __init__(self) -> None:
        """Makes an empty annex.

        Raises:
            StagingMemoryError: If it can't be allocated.
        """
        self.size = 0
        try:
            self.fd = _anonymous_file()
        except OSError as exc:
            raise self._failed(exc) from exc
        self._owner = os.getpid()
        self._file = io.BufferedWriter(io.FileIO(self.fd, "wb", closefd=False), _BUFFER)
        self._unchecked = 0  # bytes that may be written before checking free memory again

    def append(self, view: memoryview) -> int:
        """Appends bytes; returns the offset of the first.

        Raises:
            StagingMemoryError: If there is no memory for them.
        """
        start = self.size
        self.size += view.nbytes
        self._unchecked -= view.nbytes
        if self._unchecked < 0:  # not each time, since the check reads files
            _check_available(view.nbytes, _ADDITION)
            self._unchecked = _WORTH_A_CHECK
        try:
            self._file.write(view)
        except OSError as exc:
            raise self._failed(exc) from exc
        return start

    def flush(self) -> None:
        """Writes buffered bytes; raises the same errors as :meth:`append`."""
        try:
            self._file.flush()
        except OSError as exc:
            raise self._failed(exc) from exc

    def _failed(self, cause: OSError) -> StagingMemoryError:
        return StagingMemoryError(
            f"{_ADDITION} needs {_mib(self.size)} of shared memory, which could not be "
            "allocated; free memory, or save fewer bytes per rank",
            cause=cause,
        )

    def close(self) -> None:
        """Frees the memory."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._file.raw.close()  # otherwise it would later write its buffer to another's file
            _give_back(fd, self._owner)


def _give_back(fd: int, owner: int) -> None:
    """Closes a file of shared memory; the process that made it (``owner``) first frees its pages.

    Otherwise children that were forked meanwhile, such as DataLoader workers, would keep the pages
    as long as they live. A child frees nothing, as the owner still uses the memory.
    """
    if os.getpid() == owner:
        os.ftruncate(fd, 0)
    os.close(fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cloudckpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="cloudckpt-staging") as file:  # not on Linux
        return os.dup(file.fileno())


# systems and file systems that allocate a page only when it is written to
_NOT_ALLOCATED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def _allocate(fd: int, size: int) -> None:
    """Sets a file's size, and allocates its memory now if possible."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as exc:
            if exc.errno not in _NOT_ALLOCATED:
                raise
    os.ftruncate(fd, size)


def _check_available(size: int, what: str = "the staged copy") -> None:
    """Checks that this many bytes are available, as the kernel might kill the process otherwise.

    Args:
        size: The number of bytes.
        what: What the memory is for, for the message.

    Raises:
        StagingMemoryError: If fewer bytes are available.
    """
    available = available_memory()
    if available is not None and size > available:
        raise StagingMemoryError(
            f"{what} needs {_mib(size)}, and this machine or the limit of its container "
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
            "(ulimit -l), or turn pinning off with "
            "Config(background=BackgroundOptions(pin_memory='off'))",
            cause=f"cudaHostRegister returned {int(code)}",
        )


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart
    cudart().cudaHostUnregister(address)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: str = "/") -> int | None:
    """Returns how many bytes are available without swapping; None if unknown.

    A file that is unreadable or has unexpected contents limits nothing.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
    """
    known = [_of_machine(_read(root, "proc/meminfo"))]
    for folder, names in _cgroups(_read(root, "proc/self/cgroup")):
        limit, used = (_read(root, folder, name) for name in names[:2])
        known.append(_of_cgroup(limit, used, _read(root, folder, "memory.stat"), names[2]))
    return min((size for size in known if size is not None), default=None)


def _cgroups(memberships: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yields the folder of each memory cgroup of this process, and of the cgroups above it.

    With each folder it yields the names of the files that have the cgroup's limit, the memory in
    use, and statistics. In a container the path of the cgroup itself may not exist, as its folder
    is mounted as the root; its files are then in the last folder yielded.
    """
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = ("sys/fs/cgroup/memory", _V1) if controllers else ("sys/fs/cgroup", _V2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield os.path.join(mount, *parts[:count]), names


def _of_machine(meminfo: str) -> int | None:
    kib = _numbers(meminfo).get("MemAvailable:")
    return None if kib is None else kib * 1024


def _of_cgroup(limit: str, used: str, stat: str, reclaimable: str) -> int | None:
    """Returns how many bytes a cgroup may still use; None if it has no limit, or none is known.

    File pages that were not used recently count as free.

    Args:
        limit: The content of the file with the limit.
        used: The content of the file with the memory in use.
        stat: The content of ``memory.stat``.
        reclaimable: The entry of ``memory.stat`` that counts the bytes of these file pages.
    """
    files = _numbers(stat).get(reclaimable)
    if files is None or not (limit.strip().isdigit() and used.strip().isdigit()):
        return None  # "max" is no limit
    return max(0, int(limit) - int(used) + files)


def _numbers(text: str) -> dict[str, int]:
    """Maps the first word of each line to the second, if that is a number."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


def _read(*parts: str) -> str:
    """Returns a file's text, or an empty string if it can't be read."""
    try:
        with open(os.path.join(*parts), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
