"""Operations on files and folders of a POSIX file system, for the local store."""

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
    "files_in",
    "locked",
    "make_folder",
    "may_have_files",
    "names_in",
    "unfinished_name",
]

logger = logging.getLogger("cloudckpt")

UNFINISHED = ".cloudckpt-unfinished-"
"""The prefix of the names of files that are not objects yet."""
UNKNOWN_STEP = {errno.ENOSYS, errno.EOPNOTSUPP}
"""The error codes of file systems that do not implement an operation."""
GONE = (FileNotFoundError, NotADirectoryError)
"""The exceptions for a path that does not exist."""

_LONGEST_NAME = 255  # bytes; the limit of every file system in use
_LOCK_PATIENCE = 60.0  # seconds; a commit holds the lock for milliseconds
_OF_FSCK = "lost+found"  # the file system's own folder, which only root may list


def files_in(folder: str, prefix: str = "") -> Iterator[Path]:
    """Yields the files in and beneath a folder, sorted; each folder is listed when it is reached.

    A folder that does not exist yields nothing, nor does a ``lost+found`` that only root may list.

    Args:
        folder: The folder.
        prefix: Only files and folders of `folder` itself whose names begin with this are yielded or
            entered; files whose names begin with `UNFINISHED` are always yielded.

    Raises:
        OSError: If another folder can't be listed: if it were taken for empty, a training job would
            start from scratch although its checkpoints exist.
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
    """Returns the names in a folder; the names of folders end in a slash.

    Broken symbolic links are left out, and links to folders too, with a warning.
    """
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names.append(f"{entry.name}/")
            elif entry.is_symlink() and os.path.isdir(entry.path):
                _warn_left_out(os.path.dirname(entry.path))
            elif not entry.is_symlink() or os.path.exists(entry.path):
                names.append(entry.name)
    return names


@functools.cache
def _warn_left_out(folder: str) -> None:
    """Logs, once per folder and process, that listings leave out its links to folders."""
    logger.warning(
        "%s contains symbolic links to folders, which listings leave out. Load checkpoints in them "
        "by their own URIs; to have them listed, replace the links by the folders or by mounts",
        folder,
    )


def unfinished_name(name: str) -> str:
    """Returns a new name for an unfinished file; it ends in `name`, cut if it would be too long."""
    start = f"{UNFINISHED}{random_suffix()}-"
    encoded, room = name.encode(errors="surrogateescape"), _LONGEST_NAME - len(start)
    return start + (name if len(encoded) <= room else encoded[:room].decode(errors="ignore"))


def may_have_files(folder: str) -> bool:
    """Returns whether a folder contains files at any depth; also True if it can't be listed."""
    try:
        return any(files_in(folder))
    except OSError:
        return True


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents; the new entries are on disk on return.

    A folder that others may write to but not list, such as shared scratch space, can't be opened
    for an fsync. Then the new folder is synchronized instead: journaling file systems write its
    entry along with it.

    Raises:
        InvalidRequestError: If something else than a folder has the name of one of them.
        OSError: If one of them can't be created or synchronized.
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
                "a file, or a symbolic link to a missing path, has the name of this folder; "
                "choose another location",
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
    """Holds an exclusive lock on `folder` (flock) during the block, then puts its entries on disk.

    If the block fails, they are not put on disk.

    Raises:
        InvalidRequestError: If another writer holds the lock for `_LOCK_PATIENCE` seconds, or the
            file system has no locks.
        OSError: If the folder can't be opened, locked or synchronized.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise InvalidRequestError(
                        f"another writer has held the lock of this folder for {_LOCK_PATIENCE:g} s "
                        "(flock); if its process is suspended, resume or end it",
                        uri=folder.as_uri(),
                        cause=exc,
                        certain=True,
                    ) from exc
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
            # closing it is not enough: a process forked just now has the descriptor open as well
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
