"""``file:///path`` and plain paths: a store on a POSIX file system.

An object appears by one atomic file system operation: a hard link for a new object, a rename for a
replacement. Its bytes and directory entry are on disk (fsync) before success is reported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cloudckpt.errors import (
    AccessDeniedError,
    CommitUnknownError,
    ConnectionLostError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    StorageFullError,
    StoreError,
)
from cloudckpt.stores.base import (
    Body,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Upload,
    nbytes,
    random_suffix,
    skip,
)

__all__ = ["LocalStore"]

_UNFINISHED = ".cloudckpt-unfinished-"  # names of files that are not objects yet
_LOCK_PATIENCE = 60.0  # seconds; a commit holds the lock for milliseconds
# errors of a step that was certainly not taken
_NOT_TAKEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EXDEV}
_NOT_TAKEN |= {errno.EMLINK, errno.ENOSPC, errno.EDQUOT}
# of file systems that do not have what is asked for
_UNKNOWN_STEP = {errno.ENOSYS, errno.EOPNOTSUPP}
# of file systems between which the kernel does not copy, and of those that it does not copy on
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_GONE = (FileNotFoundError, NotADirectoryError)
_OF_FSCK = "lost+found"  # a folder of the file system's own, for root alone
_PIECE = 8 * 1024**2  # bytes that are copied at a time where the kernel does not
_MOST_DELETIONS = 100  # of a folder, by others, while one file is begun in it
_MOST_BUFFERS = 512  # below IOV_MAX of every POSIX system in use


class LocalStore(ObjectStore):
    """The whole file system as one bucket; keys are absolute paths."""

    root = "file://"
    capabilities = Capabilities(
        conditional_writes=True,
        min_part_size=1,
        max_part_size=1 << 40,
        max_parts=1 << 20,
        max_put_size=1 << 50,
        max_copy_size=1 << 50,
        copies_parts=True,
    )

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        attempt: str = "",
        if_absent: bool = False,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        upload = self.create_upload(key, max(1, nbytes(body)))
        try:
            self._write(upload, 0, body, progress)
            return self._publish(upload, if_absent=if_absent, if_version=if_version)
        except BaseException:
            self.abort_upload(upload)
            raise

    def create_upload(self, key: str, part_size: int) -> Upload:
        path = Path(key)
        temporary = path.parent / f"{_UNFINISHED}{random_suffix()}-{path.name}"
        with self._errors(key):
            for _ in range(_MOST_DELETIONS):
                _make_folder(path.parent)
                try:
                    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                except FileNotFoundError:  # a checkpoint was deleted with its folder just then
                    continue
                return Upload(key, str(temporary), part_size)
        raise InvalidRequestError(
            "the file system makes no files in this folder, although the folder is there; choose "
            "another location",
            uri=self.uri(key),
            certain=True,
        )

    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        checksum: int,
        progress: Progress | None = None,
    ) -> Part:
        size = self._write(upload, (number - 1) * upload.part_size, body, progress)
        return Part(number, size, str(number), checksum)

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_absent: bool = False
    ) -> ObjectInfo:
        with self._errors(upload.key):
            os.truncate(upload.id, sum(part.size for part in parts))  # a part may have shrunk
        return self._publish(upload, if_absent=if_absent)

    def copies_from(self, source: ObjectStore) -> bool:
        return isinstance(source, LocalStore)

    def copy(
        self,
        source: ObjectStore,
        found: ObjectInfo,
        key: str,
        *,
        attempt: str = "",
        if_absent: bool = False,
    ) -> ObjectInfo:
        upload = self.create_upload(key, max(1, found.size))
        try:
            self.copy_part(source, found, upload, 1, 0, found.size)
            return self._publish(upload, if_absent=if_absent)
        except BaseException:
            self.abort_upload(upload)
            raise

    def copy_part(
        self,
        source: ObjectStore,
        found: ObjectInfo,
        upload: Upload,
        number: int,
        start: int,
        stop: int,
    ) -> Part:
        offset = (number - 1) * upload.part_size
        with self._opened(found.key, found.version) as (file, info):
            if stop > info.size:
                raise _too_short(start, info.size, self.uri(found.key))
            with self._errors(upload.key), open(upload.id, "r+b", buffering=0) as into:
                _copy_range(file, start, into.fileno(), offset, stop - start)
        return Part(number, stop - start, str(number), None)

    def abort_upload(self, upload: Upload) -> None:
        with self._errors(upload.key):
            Path(upload.id).unlink(missing_ok=True)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        for path in self._walk(prefix):
            if path.name.startswith(_UNFINISHED):
                name = path.name.removeprefix(_UNFINISHED).partition("-")[2]
                key = str(path.with_name(name))
                if key.startswith(prefix):
                    with self._errors(prefix), contextlib.suppress(*_GONE):
                        yield Upload(key, str(path), 0, path.stat().st_mtime, is_ours=True)

    def get(self, key: str) -> tuple[bytearray, ObjectInfo]:
        # of one open file: another one may take its place at any time
        with self._errors(key), open(key, "rb", buffering=0) as file:
            info = _info(key, os.fstat(file.fileno()))
            data = bytearray(info.size)
            self._fill(key, file.fileno(), 0, [memoryview(data)], None)
        return data, info

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        with self._opened(key, if_version) as (file, info):
            if start + nbytes(into) > info.size:
                raise _too_short(start, info.size, self.uri(key))
            self._fill(key, file, start, into, progress)
        return info

    @contextlib.contextmanager
    def _opened(self, key: str, if_version: str | None) -> Iterator[tuple[int, ObjectInfo]]:
        """The descriptor of a file opened for reading, and its object."""
        with self._errors(key), open(key, "rb", buffering=0) as file:
            info = _info(key, os.fstat(file.fileno()))
            if if_version is not None and info.version != if_version:
                raise PreconditionFailedError("the file was replaced", uri=self.uri(key))
            yield file.fileno(), info

    def _fill(
        self,
        key: str,
        descriptor: int,
        start: int,
        into: Sequence[memoryview],
        progress: Progress | None,
    ) -> None:
        done, rest = 0, [view for view in into if view.nbytes]
        while rest:
            try:
                count = os.preadv(descriptor, rest[:_MOST_BUFFERS], start + done)
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
                raise ConnectionLostError(  # of NFS: opened anew, it is there, or gone
                    "the file was removed or replaced by another machine while it was read",
                    received=done,
                    uri=self.uri(key),
                    cause=exc,
                ) from exc
            if count == 0:
                raise ConnectionLostError(
                    "the file shrank while it was read", received=done, uri=self.uri(key)
                )
            done += count
            rest = skip(rest, count)
            if progress is not None:
                progress(count)

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            found = os.stat(key)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(key)
            return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for path in self._walk(prefix):
            if not path.name.startswith(_UNFINISHED) and str(path).startswith(prefix):
                with self._errors(prefix), contextlib.suppress(*_GONE):
                    yield _info(str(path), path.stat())

    def list_level(self, prefix: str) -> Iterator[ObjectInfo | str]:
        with self._errors(prefix):
            try:
                with os.scandir(prefix) as entries:
                    found = sorted((entry.is_dir(), entry.name) for entry in entries)
            except _GONE:
                return
        for is_folder, name in found:
            path = os.path.join(prefix, name)
            if is_folder:
                if _may_have_files(path):
                    yield name
            elif not name.startswith(_UNFINISHED):
                with self._errors(prefix), contextlib.suppress(*_GONE):
                    yield _info(path, os.stat(path))

    def delete(self, key: str, *, if_version: str | None = None) -> None:
        with self._errors(key), contextlib.suppress(*_GONE):
            if if_version is None:
                Path(key).unlink()
                return
            with _locked(Path(key).parent):
                if self._version(key) not in (None, if_version):
                    raise PreconditionFailedError(
                        "the file was replaced", uri=self.uri(key), certain=True
                    )
                Path(key).unlink()

    def close(self) -> None:
        """Does nothing: no file stays open between calls."""

    def uri(self, key: str) -> str:
        return Path(key).as_uri()

    def _write(self, upload: Upload, offset: int, body: Body, progress: Progress | None) -> int:
        written, rest = 0, [view for view in body if view.nbytes]
        with self._errors(upload.key), open(upload.id, "r+b", buffering=0) as file:
            while rest:
                count = os.pwritev(file.fileno(), rest[:_MOST_BUFFERS], offset + written)
                written += count
                rest = skip(rest, count)
                if progress is not None:
                    progress(count)
        return written

    def _publish(
        self, upload: Upload, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        key, is_there = upload.key, False
        with self._errors(key):
            _sync(upload.id)
            try:
                with _locked(Path(key).parent):
                    if if_version is not None and self._version(key) != if_version:
                        raise PreconditionFailedError(
                            "the file was replaced", uri=self.uri(key), certain=True
                        )
                    self._appear(upload, if_absent=if_absent)
                    is_there = True
                    if if_absent:
                        os.unlink(upload.id)
                return _info(key, os.stat(key))
            except OSError as exc:
                if not is_there:
                    raise
                raise CommitUnknownError(
                    "the file was put in its place, but the file system could not make sure that "
                    "it stays there; look whether it is there, and whole, before you go on",
                    uri=self.uri(key),
                    cause=exc,
                ) from exc

    def _appear(self, upload: Upload, *, if_absent: bool) -> None:
        """Makes an object appear, by one atomic operation.

        A network file system may carry it out and still fail, if its server's answer is lost: then
        NFS finds the link that it has made itself, or nothing left to rename. So the file that is
        in its place afterwards is compared with the one that was written, by its inode.
        """
        key, sent = upload.key, os.stat(upload.id)
        try:
            if if_absent:
                os.link(upload.id, key)
            else:
                os.replace(upload.id, key)
        except OSError as exc:
            if if_absent and exc.errno in {errno.EPERM, *_UNKNOWN_STEP}:
                raise InvalidRequestError(
                    "the file system has no hard links, which let a file appear without replacing "
                    "another; choose another location, or, if one job at a time writes to this "
                    "one, set conditional_writes='off'",
                    uri=self.uri(key),
                    cause=exc,
                    certain=True,
                ) from exc
            if os.path.isdir(key):
                raise InvalidRequestError(
                    "a folder is in the place of this file; choose another location",
                    uri=self.uri(key),
                    cause=exc,
                    certain=True,
                ) from exc
            if exc.errno in _NOT_TAKEN | _UNKNOWN_STEP:
                raise
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(key), sent):
                    return
                if isinstance(exc, FileExistsError):
                    raise PreconditionFailedError(
                        "the file exists already", uri=self.uri(key), certain=True
                    ) from exc
            raise InvalidRequestError(
                "the file system does not say whether the file is in its place now",
                uri=self.uri(key),
                cause=exc,
            ) from exc

    def _version(self, key: str) -> str | None:
        try:
            return self.head(key).version
        except ObjectNotFoundError:
            return None

    def _walk(self, prefix: str) -> Iterator[Path]:
        """The files in and beneath the folder that ``prefix`` leads to, in the order of keys."""
        folder, _, name = prefix.rpartition("/")
        with self._errors(prefix):
            yield from _files(f"{folder}/", name)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            raise ObjectNotFoundError(
                "there is no such file", uri=self.uri(key), certain=True
            ) from exc
        except PermissionError as exc:
            raise AccessDeniedError(
                "this user may not do that here", uri=self.uri(key), cause=exc, certain=True
            ) from exc
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    "the disk or a quota is full; free space or choose another location",
                    uri=self.uri(key),
                    cause=exc,
                    certain=True,
                ) from exc
            has_limit = exc.errno in (errno.EMFILE, errno.ENFILE)
            raise InvalidRequestError(
                "as many files are open as this process, or the machine, may open (ulimit -n)"
                if has_limit
                else "the file system refused",
                uri=self.uri(key),
                cause=exc,
                certain=True,
            ) from exc


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return ObjectInfo(key, found.st_size, version, modified=found.st_mtime, arrived=found.st_ctime)


def _too_short(start: int, size: int, uri: str) -> RangeNotSatisfiableError:
    return RangeNotSatisfiableError(
        f"the range from {start} is longer than the file of {size} bytes", uri=uri
    )


def _copy_range(source: int, start: int, target: int, offset: int, size: int) -> None:
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


def _files(folder: str, prefix: str = "") -> Iterator[Path]:
    """The files in and beneath a folder; a folder is looked into when its turn has come.

    Args:
        folder: The folder.
        prefix: What the names in it begin with; nothing else is looked into.

    Raises:
        OSError: If a folder can't be listed: taken for empty, it would let a training job begin
            anew over its checkpoints. A folder that is gone is empty.
    """
    try:
        with os.scandir(folder) as entries:
            # a key goes on behind the name of a folder with a slash
            names = [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries]
    except _GONE:
        return
    except PermissionError:
        if os.path.basename(os.path.normpath(folder)) == _OF_FSCK:
            return
        raise
    for name in sorted(names):
        path = os.path.join(folder, name)
        if not name.startswith((prefix, _UNFINISHED)):
            continue
        if name.endswith("/"):
            yield from _files(path)
        elif not os.path.isdir(path):
            yield Path(path)


def _may_have_files(folder: str) -> bool:
    """Whether there is a file in or beneath a folder, or the folder can't be listed."""
    try:
        return any(_files(folder))
    except OSError:
        return True


def _make_folder(folder: Path) -> None:
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
                "a file, or a link to nothing, is in the place of this folder; choose another "
                "location",
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
def _locked(folder: Path) -> Iterator[None]:
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
                if exc.errno not in {errno.ENOLCK, *_UNKNOWN_STEP}:
                    raise
                raise InvalidRequestError(
                    "the file system gives no locks (flock), which keep two writers apart; mount "
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
