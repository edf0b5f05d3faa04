"""Files and folders of a POSIX file system: what the local store makes its steps of."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cloudckpt.errors import InvalidRequestError
from cloudckpt.stores.base import random_suffix

__all__ = [
    "GONE",
    "UNFINISHED",
    "UNKNOWN_STEP",
    "copy_range",
    "files_in",
    "locked",
    "make_folder",
    "may_have_files",
    "names_in",
    "unfinished_name",
]

logger = logging.getLogger("cloudckpt")

UNFINISHED = ".cloudckpt-unfinished-"
"""What the names of files begin with that are not objects yet."""
UNKNOWN_STEP = {errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that do not have what is asked for."""
GONE = (FileNotFoundError, NotADirectoryError)
"""A path leads nowhere."""

_LONGEST_NAME = 255  # bytes, of every file system in use
_LOCK_PATIENCE = 60.0  # seconds; a commit holds the lock for milliseconds
# between such file systems the kernel does not copy, or on them
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_OF_FSCK = "lost+found"  # a folder of the file system's own, for root alone
_PIECE = 8 * 1024**2  # bytes that are copied at a time where the kernel does not


def copy_range(source: int, start: int, target: int, offset: int, size: int) -> None:
    """Copies bytes between files: in the kernel where it can, by shared blocks where it does."""
    in_kernel = hasattr(os, "copy_file_range")  # Linux only
    end = offset + size
    while offset < end:
        try:
            if in_kernel:
                count = os.copy_file_range(source, target, end - offset, start, offset)
            else:
                data = os.pread(source, min(end - offset, _PIECE), start)
                count = os.pwrite(target, data, offset)
        except OSError as exc:
            if not in_kernel or exc.errno not in _NOT_IN_KERNEL:
                raise
            in_kernel = False
            continue
        if count == 0:
            raise OSError(errno.EIO, "the file shrank while it was copied")
        start, offset = start + count, offset + count


def files_in(folder: str, prefix: str = "") -> Iterator[Path]:
    """The files in and beneath a folder; a folder is looked into when its turn has come.

    Args:
        folder: The folder.
        prefix: What the names in it begin with; nothing else is looked into.

    Raises:
        OSError: If a folder can't be listed: taken for empty, it would let a training job begin
            anew over its checkpoints. A folder that is gone is empty.
    """
    try:
        names = names_in(folder)
    except GONE:
        return
    except PermissionError:
        if os.path.basename(os.path.normpath(folder)) == _OF_FSCK:
            return
        raise
    for name in sorted(names):
        path = os.path.join(folder, name)
        if not name.startswith((prefix, UNFINISHED)):
            continue
        if name.endswith("/"):
            yield from files_in(path)
        else:
            yield Path(path)


def names_in(folder: str) -> list[str]:
    """What is in a folder; a folder in it with a slash, behind which its keys go on."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names.append(f"{entry.name}/")
            elif entry.is_symlink() and os.path.isdir(entry.path):
                _say_left_out(entry.path)
            elif not entry.is_symlink() or os.path.exists(entry.path):
                names.append(entry.name)
    return names


@functools.cache
def _say_left_out(path: str) -> None:
    """Says of a link to a folder, once in this process, that listings leave it out."""
    logger.warning(
        "%s is a symbolic link to a folder, which listings leave out. Its checkpoints can be "
        "loaded by their own URI; to have them listed, mount or move the folder here",
        path,
    )


def unfinished_name(name: str) -> str:
    """A new name for a file that is not an object yet; it ends in as much of ``name`` as fits."""
    start = f"{UNFINISHED}{random_suffix()}-"
    encoded, room = name.encode(errors="surrogateescape"), _LONGEST_NAME - len(start)
    return start + (name if len(encoded) <= room else encoded[:room].decode(errors="ignore"))


def may_have_files(folder: str) -> bool:
    """Whether there is a file in or beneath a folder, or the folder can't be listed."""
    try:
        return any(files_in(folder))
    except OSError:
        return True


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; their entries are on the disk at its return.

    A folder that others may write to, but not list, as a machine's scratch space may be, can't be
    opened for that. File systems with a journal write an entry with the folder that it names.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as exc:
            raise InvalidRequestError(
                "a file, or a symbolic link to nothing, has the name of this folder; choose "
                "another location",
                uri=folder.as_uri(),
                cause=exc,
                certain=True,
            ) from exc
        try:
            _sync(folder.parent)
        except PermissionError:
            _sync(folder)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other writers out of ``folder`` for a moment; its new entries are durable on exit."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            except OSError as exc:
                if exc.errno not in {errno.ENOLCK, *UNKNOWN_STEP}:
                    raise
                raise InvalidRequestError(
                    "the file system has no locks (flock), which keep two writers apart; mount "
                    "it with them (Lustre: -o flock), or choose another location",
                    uri=folder.as_uri(),
                    cause=exc,
                    certain=True,
                ) from exc
        yield
        os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):
            # not by closing it: a process that was forked just now has it open, too, and may live
            # for long
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
