"""``file:///path`` and plain paths: a store on a POSIX file system.

The bytes are written to an unfinished file in the same folder. It becomes the object by one atomic
operation: a hard link if the object must not exist yet, else a rename. The bytes and the directory
entry are on disk (fsync) before success is reported.

Other users may write to the same folders. Symbolic links to files, and a link given as the location
itself, are followed; listings leave out linked folders beneath it, so that deleting a run deletes
nothing elsewhere. An unfinished file that somebody has replaced is neither written to nor made an
object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
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
    MOST_READ,
    Body,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Retry,
    Upload,
    nbytes,
    once,
    skip,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.stores.posix import (
    GONE,
    UNFINISHED,
    UNKNOWN_STEP,
    files_in,
    locked,
    make_folder,
    may_have_files,
    names_in,
    unfinished_name,
)

__all__ = ["LocalStore"]

# error codes after which the operation was certainly not carried out
_NOT_TAKEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EXDEV}
_NOT_TAKEN |= {errno.EMLINK, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EINVAL}
_MOST_DELETIONS = 100  # attempts to create a file while other processes delete its folder
_MOST_BUFFERS = 512  # buffers per system call; below IOV_MAX of every POSIX system in use


class LocalStore(ObjectStore):
    """The whole file system as one bucket; keys are absolute paths."""

    root = "file://"
    capabilities = Capabilities(
        conditional_writes=True,
        min_part_size=1,
        max_part_size=1 << 40,
        max_parts=1 << 20,
        max_put_size=1 << 50,
    )

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        attempt: str = "",
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        upload, file = self._begin(key, 1)
        try:
            self._write(key, file, 0, body, progress)
            return self._publish(upload, file, if_version)
        except BaseException:
            with contextlib.suppress(StoreError):
                self.abort_upload(upload)
            raise
        finally:
            os.close(file)

    def create_upload(self, key: str, part_size: int) -> Upload:
        upload, file = self._begin(key, part_size)
        os.close(file)
        return upload

    def _begin(self, key: str, part_size: int) -> tuple[Upload, int]:
        """Creates an unfinished file; returns the upload and the file's open descriptor."""
        path = Path(key)
        temporary = path.parent / unfinished_name(path.name)
        with self._errors(key):
            for _ in range(_MOST_DELETIONS):
                make_folder(path.parent)
                try:
                    file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                # another process has just deleted a checkpoint with its folder
                except FileNotFoundError:
                    continue
                return Upload(key, str(temporary), part_size), file
        raise InvalidRequestError(
            "another program deletes this file's folder each time it is made, or the file system "
            "can't create files in it: find out which, or choose another location",
            uri=self.uri(key),
            certain=True,
        )

    @contextlib.contextmanager
    def _unfinished(self, upload: Upload) -> Iterator[int]:
        """Opens an unfinished file, possibly begun by another process; yields its descriptor.

        Raises:
            InvalidRequestError: If its name belongs to something else than a file, such as a
                symbolic link; or if it has a second name (hard link), under which the bytes that
                are written would appear, too.
            ObjectNotFoundError: If it was deleted.
        """
        with self._errors(upload.key):
            try:
                # O_NONBLOCK: opening a pipe would wait for a reader
                file = os.open(upload.id, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR):
                    raise self._is_swapped(upload) from exc
                raise
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                    raise self._is_swapped(upload)
                yield file
            finally:
                os.close(file)

    def _is_swapped(self, upload: Upload, *, certain: bool = True) -> InvalidRequestError:
        return InvalidRequestError(
            "another user or program has replaced the unfinished file, or made a hard link to it, "
            "so nothing more was written to it. Save to a folder that others may not write to",
            uri=self.uri(upload.key),
            cause=Path(upload.id).name,
            certain=certain,
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
        with self._unfinished(upload) as file:
            start = (number - 1) * upload.part_size
            size = self._write(upload.key, file, start, body, progress)
        return Part(number, size, str(number), checksum)

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_version: str | None = None
    ) -> ObjectInfo:
        with self._unfinished(upload) as file:
            os.ftruncate(file, sum(part.size for part in parts))  # a retried part may be shorter
            return self._publish(upload, file, if_version)

    def abort_upload(self, upload: Upload) -> None:
        with self._errors(upload.key):
            Path(upload.id).unlink(missing_ok=True)

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        for path in self._walk(prefix):
            if path.name.startswith(UNFINISHED):
                name = path.name.removeprefix(UNFINISHED).partition("-")[2]
                key = str(path.with_name(name))
                if key.startswith(prefix):
                    with self._errors(prefix), contextlib.suppress(*GONE):
                        yield Upload(key, str(path), 0, path.lstat().st_mtime, is_ours=True)

    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        # read through one open file: the path may be replaced at any time
        with self._opened(key, None) as (file, info):
            self.check_size(key, info.size, limit)
            data = bytearray(info.size)
            self._fill(key, file, 0, [memoryview(data)], None)
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
                raise RangeNotSatisfiableError(
                    f"the file has only {info.size} bytes, and {start + nbytes(into)} are needed: "
                    "it was truncated or replaced; write it again",
                    uri=self.uri(key),
                )
            self._fill(key, file, start, into, progress)
        return info

    @contextlib.contextmanager
    def _opened(self, key: str, if_version: str | None) -> Iterator[tuple[int, ObjectInfo]]:
        """Opens a file for reading; yields its descriptor and its ObjectInfo.

        Raises:
            PreconditionFailedError: If it has another version than `if_version`, unless that is
                None.
            ObjectNotFoundError: If there is no such file.
            InvalidRequestError: If it is a pipe, device or socket.
        """
        with self._errors(key):
            # O_NONBLOCK: a pipe would wait for a writer
            file = os.open(key, os.O_RDONLY | os.O_NONBLOCK)
            try:
                info = self._described(key, os.fstat(file))
                if if_version is not None and info.version != if_version:
                    why = "another writer has replaced the file; read it again"
                    raise PreconditionFailedError(why, uri=self.uri(key))
                yield file, info
            finally:
                os.close(file)

    def _described(self, key: str, found: os.stat_result) -> ObjectInfo:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(key)
        if not stat.S_ISREG(found.st_mode):
            why = "this is a pipe, device or socket, not a file; give the path of a file"
            raise InvalidRequestError(why, uri=self.uri(key), certain=True)
        return _info(key, found)

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
                raise ConnectionLostError(  # NFS: a retry opens the file again, or finds it missing
                    "another machine has removed or replaced the file; read it again",
                    received=done,
                    uri=self.uri(key),
                    cause=exc,
                ) from exc
            if count == 0:
                why = "another program has shortened the file while it was read; write it again"
                raise ConnectionLostError(why, received=done, uri=self.uri(key))
            done += count
            rest = skip(rest, count)
            if progress is not None:
                progress(count)

    def head(self, key: str) -> ObjectInfo:
        # on NFS, what stat() says of a file that was not just opened may be a minute old
        try:
            with self._opened(key, None) as (_, info):
                return info
        except AccessDeniedError:  # a file that this user may not read can be replaced
            with self._errors(key):
                return self._described(key, os.stat(key))

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        for path in self._walk(prefix):
            if not path.name.startswith(UNFINISHED) and str(path).startswith(prefix):
                with self._errors(prefix), contextlib.suppress(*GONE):
                    yield _info(str(path), path.stat())

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        with self._errors(prefix):
            try:
                found = sorted(names_in(prefix), key=lambda name: (name.endswith("/"), name))
            except GONE:
                return
        for name in found:
            path = os.path.join(prefix, name)
            if name.endswith("/"):
                if may_have_files(path):
                    yield name[:-1]
            elif not name.startswith(UNFINISHED):
                with self._errors(prefix), contextlib.suppress(*GONE):
                    yield _info(path, os.stat(path))

    def delete(self, key: str, *, if_version: str | None = None) -> None:
        held = contextlib.nullcontext() if if_version is None else locked(Path(key).parent)
        with self._errors(key), contextlib.suppress(*GONE), held:
            if if_version is not None and self._version(key) not in (None, if_version):
                raise PreconditionFailedError(
                    "another writer has replaced the file, so it was not deleted; check the new "
                    "file, and delete it if it is unneeded",
                    uri=self.uri(key),
                    certain=True,
                )
            Path(key).unlink()

    def close(self) -> None:
        """Does nothing: no file stays open between calls."""

    def uri(self, key: str) -> str:
        return Path(key).as_uri()

    def _write(
        self, key: str, file: int, offset: int, body: Body, progress: Progress | None
    ) -> int:
        written, rest = 0, [view for view in body if view.nbytes]
        with self._errors(key):
            while rest:
                count = os.pwritev(file, rest[:_MOST_BUFFERS], offset + written)
                written += count
                rest = skip(rest, count)
                if progress is not None:
                    progress(count)
        return written

    def _publish(self, upload: Upload, file: int, if_version: str | None) -> ObjectInfo:
        """Makes an unfinished file appear under its key, with its bytes and entry on disk.

        Args:
            upload: The upload whose file it is.
            file: The descriptor of the file.
            if_version: As in :meth:`complete_upload`.

        Returns:
            The description of the object.

        Raises:
            PreconditionFailedError: If the key does not hold ``if_version``.
            InvalidRequestError: As in :meth:`_appear`, or if the folder can't be locked.
            CommitUnknownError: If the file has appeared, but may not be on disk.
        """
        key, is_published, if_absent = upload.key, False, if_version == ""
        with self._errors(key):
            os.fsync(file)
            try:
                with locked(Path(key).parent):
                    if if_version and self._version(key) != if_version:
                        raise PreconditionFailedError(
                            "another writer has replaced or deleted the file, so it was not "
                            "written; read it again before you write",
                            uri=self.uri(key),
                            certain=True,
                        )
                    self._appear(upload, os.fstat(file), if_absent=if_absent)
                    is_published = True
                    if if_absent:  # it may be gone, as NFS repeats a call whose response was lost
                        Path(upload.id).unlink(missing_ok=True)
                found = os.stat(key, follow_symlinks=False)
                # replaced between the check and the link or rename
                if not stat.S_ISREG(found.st_mode):
                    raise self._is_swapped(upload, certain=False)
                return _info(key, found)
            except OSError as exc:
                if not is_published:
                    raise
                raise CommitUnknownError(
                    "the file was written, but the file system did not confirm that it is on disk, "
                    "so a crash of the machine may still lose it: check the disk, and write again",
                    uri=self.uri(key),
                    cause=exc,
                ) from exc

    def _appear(self, upload: Upload, sent: os.stat_result, *, if_absent: bool) -> None:
        """Makes an unfinished file appear under its key, by one atomic operation.

        On a network file system the operation may succeed and still raise an error, if the server's
        response is lost: the client's retry then meets the link that it has already made, or has
        nothing left to rename. So the file under the key is compared, by its inode, with the file
        that was written.

        Args:
            upload: The upload whose file it is.
            sent: The status of the file that was written.
            if_absent: Whether to fail with PreconditionFailedError if the key exists.

        Raises:
            InvalidRequestError: If somebody replaced the unfinished file, a folder has the name,
                or hard links are needed but not supported; or if it is unknown whether the file
                under the key is the new one, and then not ``certain``.
        """
        key = upload.key
        if not os.path.samestat(os.stat(upload.id, follow_symlinks=False), sent):
            raise self._is_swapped(upload)
        try:
            if if_absent:
                os.link(upload.id, key, follow_symlinks=False)
            else:
                os.replace(upload.id, key)
        except OSError as exc:
            if if_absent and exc.errno in {errno.EPERM, *UNKNOWN_STEP}:
                raise InvalidRequestError(
                    "the file system has no hard links, which are needed to create a file "
                    "without replacing another; choose another location, or, if one job at a "
                    "time writes to this one, set conditional_writes='off'",
                    uri=self.uri(key),
                    cause=exc,
                    certain=True,
                ) from exc
            if os.path.isdir(key):
                why, uri = "a folder has this name; choose another location", self.uri(key)
                raise InvalidRequestError(why, uri=uri, cause=exc, certain=True) from exc
            if exc.errno in _NOT_TAKEN | UNKNOWN_STEP:
                raise
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(key, follow_symlinks=False), sent):
                    return
                if isinstance(exc, FileExistsError):
                    raise PreconditionFailedError(
                        "the file exists already, so it was not replaced; choose another location",
                        uri=self.uri(key),
                        certain=True,
                    ) from exc
            raise InvalidRequestError(
                "the file system reported an error when the written file was moved to its name, "
                "and it is unknown whether the file there is the new one: check its size and time, "
                "or write it again",
                uri=self.uri(key),
                cause=exc,
            ) from exc

    def _version(self, key: str) -> str | None:
        try:
            return self.head(key).version
        except ObjectNotFoundError:
            return None

    def _walk(self, prefix: str) -> Iterator[Path]:
        """Yields the files whose paths begin with `prefix`, finished or not, in order.

        All unfinished files of the folder in which `prefix` ends are yielded, whatever their names.
        """
        folder, _, name = prefix.rpartition("/")
        with self._errors(prefix):
            yield from files_in(f"{folder}/", name)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            why = "there is no such file; check the location"
            if UNFINISHED in str(exc.filename):
                why = "the unfinished file was deleted: find what deletes files here and save again"
            raise ObjectNotFoundError(why, uri=self.uri(key), certain=True) from exc
        except OSError as exc:
            if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
                why = "this user may not read or write here: check owner, permissions and mount"
                raise AccessDeniedError(why, uri=self.uri(key), cause=exc, certain=True) from exc
            if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    "the disk or a quota is full, or the file is larger than the file system or a "
                    "limit (ulimit -f) allows; free space, or choose another location",
                    uri=self.uri(key),
                    cause=exc,
                    certain=True,
                ) from exc
            has_limit = exc.errno in (errno.EMFILE, errno.ENFILE)
            raise InvalidRequestError(
                "the process or the machine has too many open files; raise the limit (ulimit -n)"
                if has_limit
                else "the file system reported an error: see the cause, and check disk and mount",
                uri=self.uri(key),
                cause=exc,
                certain=True,
            ) from exc


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return ObjectInfo(key, found.st_size, version, modified=found.st_mtime, arrived=found.st_ctime)
