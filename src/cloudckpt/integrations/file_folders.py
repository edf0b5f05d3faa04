"""Folders of files in a store that appear whole or not at all, for libraries that rename folders.

Such a library has all ranks write files into a temporary folder, and one of them rename it. Here
each file goes to an object of its own, whose key is drawn at random, beneath the folder that the
temporary one will be renamed to; and a record in the temporary folder says which object is which
file (:mod:`cloudckpt.checkpoint.file_folder`). To rename is to write the manifest, in one request,
on the condition that there is none; no byte is copied. Then the records go.

So these can't happen, where A and B are two jobs, or a process that was thought dead and the one
that was started in its place:

- *A dies.* Before the manifest there is no folder, whatever objects lie there; behind it the folder
  is whole, and records may be left in the temporary one. What A has left is swept like any other
  leftover, by its age.
- *A and B write to the same temporary folder.* A record is named after its job, and a job renames
  what it has written itself: no manifest has files of both. Of the two manifests the condition
  lets one be written, and the other job gets a FileExistsError.
- *A file is missing, or another one than was written.* Before the manifest is written, a listing
  must show each object with its size; every read compares what arrives with the checksums of its
  blocks, which stand in the manifest, and that has one of its own.
- *The answer to the manifest's request is lost.* As in ``checkpoint.commit``.
- *A folder is removed while somebody reads it.* The manifest goes first. Objects that it does not
  name stay: they may be of a save that is under way.
"""

from __future__ import annotations

import functools
import io
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cloudckpt.checkpoint.commit import LONGEST_SAVE, Baseline, commit, conditions_work
from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    FileManifest,
    StoredFile,
    content_name,
    folders_above,
    is_content_name,
    is_pending_record,
    is_record_name,
    manifest_bytes,
    name_of_record,
    read_manifest,
    read_record,
    record_bytes,
    record_name,
)
from cloudckpt.checkpoint.objects import is_drawn_name, trial_name
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointReplacedError,
    IncompleteSaveError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.integrations.recorded_file import RecordedFile
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.object_file import ObjectFile, PinnedObject
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.copying import copies_within
from cloudckpt.transfer.deleting import delete_all, delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.relay import Passage, relay
from cloudckpt.transfer.retry import Retrier, begun_anew
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import put_whole

__all__ = ["FileFolders"]

logger = logging.getLogger("cloudckpt")

_PIECE = 4 * 1024 * 1024  # bytes that are read at a time
_DEPTH = 2  # how far above a file its temporary folder may be: others above it are not ours


@dataclass(frozen=True)
class _Plain:
    """A file that other programs see, too: an object at its own key."""

    info: ObjectInfo


@dataclass(frozen=True)
class _Recorded:
    """A file that no manifest names, and the key of the record that does."""

    file: StoredFile
    record: str


@dataclass(frozen=True)
class _Committed:
    """A file of a committed folder, and the version of the manifest."""

    file: StoredFile
    folder: str
    version: str


_Found = _Plain | _Recorded | _Committed


class FileFolders:
    """Files and folders of a bucket, by their keys. Safe to use from many threads.

    Errors of the store are those of :mod:`cloudckpt.errors`; what any file system may say is an
    ``OSError`` besides.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        *,
        job: str,
        temporary: str,
        is_published: bool = False,
    ) -> None:
        """
        Args:
            store: The bucket.
            config: Options.
            job: Sixteen hexadecimal digits that all ranks of the job have, and no other job.
            temporary: What the names of temporary folders begin with; the rest is the name of the
                folder that they are renamed to. Objects are written beneath that one.
            is_published: Whether only this job sees what it writes into other folders, too, until
                it publishes them.
        """
        self._store = store
        self._config = config
        self._job = job
        self._temporary = temporary
        self._is_published = is_published
        self._retrier = Retrier(config.retry)
        self._manifests: dict[str, tuple[str, FileManifest]] = {}

    # ---- files

    def opened(self, key: str) -> io.RawIOBase:
        """A file for reading: what arrives is compared with the checksums of its blocks.

        A plain object, which another program may have written, has none here.

        Raises:
            FileNotFoundError: If there is none.
            CheckpointCorruptError: If the manifest or the record is damaged, or its object gone or
                of another size. What is read of it may raise that, too.
        """
        return begun_anew(lambda: self._opened(key))

    def _opened(self, key: str) -> io.RawIOBase:
        found = self._existing(key)
        config = self._config
        if isinstance(found, _Plain):
            stats = TransferStats(self._store.uri(key))
            return ObjectFile(PinnedObject(self._store, key, config, stats), config)
        file, uri = found.file, self._store.uri(key)
        try:
            pinned = PinnedObject(self._store, file.key, config, TransferStats(uri), file.blocks)
        except ObjectNotFoundError as error:
            now = self._find(key)
            if now != found:
                raise CheckpointReplacedError("it was replaced or removed", uri=uri) from error
            raise CheckpointCorruptError(
                "its object is gone: restore it, or load an older checkpoint",
                uri=self._store.uri(file.key),
                cause=error,
            ) from error
        if pinned.info.size != file.size:
            raise CheckpointCorruptError(
                f"its object has {pinned.info.size} bytes for {file.size}: restore it, or load an "
                "older checkpoint",
                uri=self._store.uri(file.key),
            )
        return ObjectFile(pinned, config)

    def read(self, key: str) -> bytes:
        """All of a file; as of :meth:`opened`."""
        file = self.opened(key)
        room = bytearray(file.seek(0, io.SEEK_END))
        file.seek(0)
        if room:
            file.readinto(room)
        return bytes(room)

    def written(
        self,
        key: str,
        *,
        expected: int = 0,
        lasts: Callable[[memoryview], bool] = lambda view: False,
    ) -> WrittenFile:
        """A file for writing, which is there when it is closed, and not at all behind an error.

        Args:
            key: Where.
            expected: Bytes, about.
            lasts: Of which memory that is written it is known that it stays as it is until the file
                is closed.

        Raises:
            FileExistsError: If it is a file of a committed folder.
        """
        if isinstance(self._find(key), _Committed):
            raise FileExistsError(
                f"{self._store.uri(key)} is part of a committed folder: remove that, or write "
                "elsewhere"
            )
        record = self._record_key(key)
        return RecordedFile(self._store, self._place(key), record, self._config, expected, lasts)

    def size(self, key: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: If there is none.
        """
        found = self._existing(key)
        return found.info.size if isinstance(found, _Plain) else found.file.size

    def delete(self, key: str) -> None:
        """Removes a file.

        Raises:
            FileNotFoundError: If there is none.
            FileExistsError: If it is part of a committed folder, which can only be removed whole.
        """
        found = self._existing(key)
        if isinstance(found, _Committed):
            raise FileExistsError(
                f"{self._store.uri(key)} is part of a committed folder: remove that"
            )
        if isinstance(found, _Plain):
            self._retrier.call(lambda: self._store.delete(key))
            return
        self._delete([found.record])
        if _folder_of(found.file.key) == _folder_of(found.record):
            self._delete([found.file.key])  # else a manifest may name it since

    # ---- looking

    def exists(self, key: str) -> bool:
        """Whether there is a file, or a folder with any."""
        return self._manifest(key) is not None or self._find(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        """Whether there is a folder with any files."""
        if self._manifest(key) is not None or any(self._visible(key)):
            return True
        return any(
            name.startswith(f"{_beneath(folder, key)}/")
            for folder in folders_above(key)
            if (manifest := self._manifest(folder)) is not None
            for name in manifest[1].files
        )

    def names(self, key: str) -> list[str]:
        """The names of the files and folders in a folder.

        Raises:
            FileNotFoundError: If there are none.
        """
        found: set[str] = set()
        for folder in (key, *folders_above(key)):
            if (manifest := self._manifest(folder)) is not None:
                below = _beneath(folder, key)
                inside = f"{below}/" if below else ""
                found |= {
                    name.removeprefix(inside).partition("/")[0]
                    for name in manifest[1].files
                    if name.startswith(inside)
                }
        for entry in self._retrier.call(lambda: list(self._store.list_level(_inside(key)))):
            if not isinstance(entry, str):
                name = entry.key.rpartition("/")[2]
                if self._sees(entry.key) and name != MANIFEST:
                    found.add(name_of_record(name)[0] if is_record_name(name) else name)
            elif any(self._visible(_inside(key) + entry)):
                found.add(entry)
        if not found:
            raise FileNotFoundError(self._store.uri(key))
        return sorted(found)

    def _visible(self, folder: str) -> Iterator[ObjectInfo]:
        """What this job sees beneath a folder, in any folder of it; asked for as it is wanted."""
        return (info for info in self._store.list(_inside(folder)) if self._sees(info.key))

    def _sees(self, key: str) -> bool:
        """Whether an object is a file, a manifest, or the record of a file that this job sees."""
        name = key.rpartition("/")[2]
        if is_record_name(name):
            return not is_pending_record(name) or name_of_record(name)[1] == self._job
        return bool(name) and not is_content_name(name) and not is_drawn_name(name)

    def _find(self, key: str) -> _Found | None:
        """What a file is, if there is one: what is committed comes first."""
        for folder in folders_above(key):
            if (manifest := self._manifest(folder)) is not None:
                version, said = manifest
                if (file := said.files.get(_beneath(folder, key))) is not None:
                    return _Committed(file, folder, version)
        if (recorded := self._recorded(key)) is not None:
            return recorded
        try:
            return _Plain(self._retrier.call(lambda: self._store.head(key)))
        except ObjectNotFoundError:
            return None

    def _existing(self, key: str) -> _Found:
        found = self._find(key)
        if found is None:
            raise FileNotFoundError(self._store.uri(key))
        return found

    def _recorded(self, key: str) -> _Recorded | None:
        """What this job has written there, or else what another one has written last."""
        records = [info for info in self._records(f"{key}.") if _path_of(info.key) == key]
        if not records:
            return None
        own = {record_name(key, self._job, is_pending=pending) for pending in (False, True)}
        newest = max(records, key=lambda info: (info.key in own, info.modified or 0.0))
        try:
            return _Recorded(self._record(newest.key), newest.key)
        except ObjectNotFoundError:
            return None

    def _records(self, prefix: str) -> list[ObjectInfo]:
        listed = self._retrier.call(lambda: list(self._store.list(prefix)))
        return [info for info in listed if is_record_name(info.key) and self._sees(info.key)]

    def _record(self, key: str) -> StoredFile:
        data, _ = self._retrier.call(lambda: self._store.get_latest(key))
        return read_record(data, self._store.uri(key))

    def _manifest(self, folder: str) -> tuple[str, FileManifest] | None:
        """The version of a folder's manifest, and the files that it names, if there is one."""
        key = _inside(folder) + MANIFEST
        try:
            version = self._retrier.call(lambda: self._store.head(key)).version
            known = self._manifests.get(folder)
            if known is not None and known[0] == version:
                return known
            data, info = self._retrier.call(lambda: self._store.get_latest(key))
        except ObjectNotFoundError:
            return None
        read = (info.version, read_manifest(data, folder, self._store.uri(key)))
        self._manifests = {folder: read}  # of the checkpoint that is read just now
        return read

    # ---- commits

    def rename_folder(self, source: str, target: str) -> None:
        """Commits what this job has written into a folder, as another one.

        Nothing is copied if the name of the source is that of the target behind the prefix of
        temporary folders; else the store copies what lies elsewhere, by itself where it can.

        Raises:
            FileNotFoundError: If this job has written nothing there.
            FileExistsError: If something is at the target: both stay as they are.
            CheckpointCorruptError: If what was written is not there any more.
            IncompleteSaveError: If the first file was written too long ago.
            CommitUnknownError: If the store does not say whether the commit took place.
            StoreError: If it did not, and will not.
        """
        records = self._own_records(source)
        if self.exists(target):
            raise CheckpointExistsError(
                f"{self._store.uri(source)} can't be renamed to this, where something is: remove "
                "that, or save elsewhere",
                uri=self._store.uri(target),
            )
        self._commit(source, target, records)
        forget_listings()

    def publish(self, folder: str) -> None:
        """Commits what this job has written into a folder where it is; more ranks may say so.

        Raises:
            FileExistsError: If another job has committed there before.
            CheckpointCorruptError: As of :meth:`rename_folder`, and so are the others.
        """
        there = self._manifest(folder)
        if there is None:
            try:
                self._commit(folder, folder, self._own_records(folder))
            except (FileExistsError, FileNotFoundError):
                there = self._manifest(folder)
                if there is None or there[1].job != self._job:
                    raise
        elif there[1].job != self._job:
            raise CheckpointExistsError(
                "another job has committed this: remove it, or save elsewhere",
                uri=self._store.uri(folder),
            )
        forget_listings()

    def _own_records(self, folder: str) -> list[ObjectInfo]:
        """Those of this job in a folder, which must not have files of others."""
        records = []
        for info in self._retrier.call(lambda: list(self._visible(folder))):
            if not is_record_name(info.key):
                if info.key != _inside(folder) + MANIFEST:
                    raise FileExistsError(
                        f"{self._store.uri(info.key)} was not written by this storage, and can't "
                        "be committed with the folder that it is in: remove it, or write elsewhere"
                    )
            elif name_of_record(info.key)[1] == self._job:
                records.append(info)
        if not records:
            raise FileNotFoundError(
                f"{self._store.uri(folder)}: this job has written nothing there"
            )
        return records

    def _read_all(self, folder: str, records: Iterable[ObjectInfo]) -> dict[str, StoredFile]:
        """The files of records, by their names in a folder."""
        files: dict[str, StoredFile] = {}

        def read(key: str) -> None:
            files[_beneath(folder, _path_of(key))] = self._record(key)

        self._each([info.key for info in records], read)
        return files

    def _commit(self, source: str, target: str, records: list[ObjectInfo]) -> None:
        store, key = self._store, _inside(target) + MANIFEST
        oldest = min((info.modified for info in records if info.modified is not None), default=None)
        if oldest is not None and time.time() - oldest > LONGEST_SAVE:
            raise IncompleteSaveError(
                f"its first file was written more than {LONGEST_SAVE / 3600:g} hours ago, and may "
                "be swept as a leftover: save again; nothing was committed",
                uri=store.uri(target),
            )
        files = self._read_all(source, records)
        self._check_written(target, files)
        elsewhere = [
            name for name, file in files.items() if not file.key.startswith(_inside(target))
        ]
        if elsewhere:
            files |= self._brought(target, {name: files[name] for name in elsewhere})
        trial = _inside(target) + trial_name(random_suffix())
        conditional = conditions_work(store, self._config.conditional_writes, trial, self._retrier)
        manifest = FileManifest(job=self._job, files=files)
        body = [memoryview(manifest_bytes(target, manifest))]
        try:
            commit(store, Baseline(key, None), body, conditional=conditional, retrier=self._retrier)
        except CheckpointConflictError as error:
            raise CheckpointExistsError(
                "another writer has committed this meanwhile: theirs is kept",
                uri=store.uri(target),
                cause=error,
            ) from error
        keys = [info.key for info in records]
        delete_quietly(store, keys, self._config.retry, threads=self._config.requests_at_once)

    def _check_written(self, target: str, files: dict[str, StoredFile]) -> None:
        """Whether each object is there, of its size: other ranks may write to another store."""
        keys = [file.key for file in files.values()]
        folders = {_folder_of(key) for key in keys if not key.startswith(_inside(target))}
        there = {
            (info.key, info.size)
            for folder in (target, *folders)
            for info in self._retrier.call(functools.partial(_listed, self._store, folder))
        }
        for name, file in files.items():
            if (file.key, file.size) not in there:
                raise CheckpointCorruptError(
                    f"{name} was written, but is not there with its {file.size} bytes; nothing was "
                    "committed. Compare on all ranks what leads to the store",
                    uri=self._store.uri(file.key),
                )

    def _brought(self, target: str, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        """Copies of files beneath a folder."""
        logger.warning(
            "%s: %d files are copied, for they were written elsewhere: set temporary to what the "
            "names of temporary folders begin with",
            self._store.uri(target),
            len(files),
        )
        copies = {
            name: replace(file, key=_inside(target) + content_name(name, random_suffix()))
            for name, file in files.items()
        }
        self._copy([(file.key, copies[name].key) for name, file in files.items()])
        return copies

    def move_file(self, source: str, target: str) -> None:
        """Gives a file another path; what was a file there is replaced.

        In a temporary folder that is a new record. Elsewhere the file becomes a plain object, which
        other programs read, too: the store copies it, by itself where it can.

        Raises:
            FileNotFoundError: If there is no such file.
            FileExistsError: If a folder is at the target, or a committed folder has it.
        """
        found = self._existing(source)
        there = self._find(target)
        if isinstance(there, _Committed) or (there is None and self.is_folder(target)):
            raise FileExistsError(
                f"{self._store.uri(source)} can't be renamed to {self._store.uri(target)}, which "
                "is a folder, or part of a committed one"
            )
        if isinstance(found, _Committed):
            raise FileExistsError(f"{self._store.uri(source)} is part of a committed folder")
        if isinstance(found, _Recorded) and self._temporary_folder(target) is not None:
            record = self._record_key(target)
            content = memoryview(record_bytes(found.file))
            put_whole(self._store, record, content, self._retrier)
            self._delete([found.record])
            return
        self._make_plain(source if isinstance(found, _Plain) else found.file.key, source, target)
        if isinstance(there, _Recorded):  # it would come before what is there now
            self._delete([info.key for info in self._records(f"{target}.")])
        self.delete(source)
        forget_listings()

    def _make_plain(self, key: str, source: str, target: str) -> None:
        """Replaces what is at a key by the object of a file."""
        found = self._retrier.call(lambda: self._store.head(key))
        if copies_within(self._store, self._store, found.size) and (
            found.size <= self._store.capabilities.max_copy_size
        ):
            self._retrier.call(lambda: self._store.copy(self._store, found, target))
            return
        with self.opened(source) as read, WrittenFile(self._store, target, self._config) as file:
            shutil.copyfileobj(read, file, _PIECE)

    def remove_folder(self, key: str) -> None:
        """Removes a folder: its manifest first, on the condition that it is still that one.

        Objects that may belong to a save under way stay, and are swept when they are old.

        Raises:
            FileNotFoundError: If there is none.
            FileExistsError: If another writer has committed there meanwhile; that stays.
            StoreError: If something could not be removed; all else was tried.
        """
        listed = self._retrier.call(lambda: list(self._store.list(_inside(key))))
        visible = [info for info in listed if self._sees(info.key)]
        if not visible:
            raise FileNotFoundError(self._store.uri(key))
        there = {info.key for info in listed}
        named: set[str] = set()
        rest: list[str] = []
        for info in visible:
            if info.key.rpartition("/")[2] != MANIFEST:
                rest.append(info.key)
                if is_record_name(info.key):
                    named |= self._named_by_record(info.key)
                continue
            folder = _folder_of(info.key)
            try:
                manifest = self._manifest(folder)
            except CheckpointCorruptError:  # then all that is beneath it is its own
                manifest = (info.version, FileManifest(job="", files={}))
                named |= {one for one in there if one.startswith(_inside(folder))}
            if manifest is None:
                continue
            self._remove_manifest(info.key, manifest[0])
            named |= {file.key for file in manifest[1].files.values()}
        self._delete([*rest, *sorted(named & there - set(rest))])
        forget_listings()

    def _named_by_record(self, key: str) -> set[str]:
        """The object of a record in its own folder: of another, a manifest may name it since."""
        try:
            file = self._record(key)
        except (ObjectNotFoundError, CheckpointCorruptError):
            return set()
        return {file.key} if _folder_of(file.key) == _folder_of(key) else set()

    def _remove_manifest(self, key: str, version: str) -> None:
        try:
            self._retrier.call(lambda: self._store.delete(key, if_version=version))
        except PreconditionFailedError as error:
            raise FileExistsError(
                f"{self._store.uri(key)} was written anew meanwhile: what is there now was left"
            ) from error

    # ---- all of these

    def _place(self, key: str) -> str:
        """The key of the object for a file: beneath the folder that a temporary one becomes."""
        *folders, name = key.split("/")
        if (at := self._temporary_folder(key)) is not None:
            folders[at] = folders[at].removeprefix(self._temporary)
        return "/".join([*folders, content_name(name, random_suffix())])

    def _record_key(self, key: str) -> str:
        is_pending = self._is_published or self._temporary_folder(key) is not None
        return record_name(key, self._job, is_pending=is_pending)

    def _temporary_folder(self, key: str) -> int | None:
        """Which of the folders of a file is a temporary one: that which it is in, or the next."""
        folders, prefix = key.split("/")[:-1], self._temporary
        for at in range(len(folders) - 1, max(-1, len(folders) - 1 - _DEPTH), -1):
            if prefix and folders[at].startswith(prefix) and folders[at] != prefix:
                return at
        return None

    def _copy(self, pairs: list[tuple[str, str]]) -> None:
        store, passages = self._store, []
        for source, target in pairs:
            found = self._retrier.call(functools.partial(store.head, source))
            within = found if copies_within(store, store, found.size) else None
            kind = store.capabilities.checksum
            passages.append(Passage(source, target, found.size, found.checksum, kind, within))
        stats = TransferStats(store.uri(pairs[0][1]))
        relay(
            store,
            store,
            passages,
            self._config,
            stats,
            moved=lambda count: None,
            arrived=lambda passage: None,
        )

    def _delete(self, keys: list[str]) -> None:
        threads = self._config.requests_at_once
        delete_all(self._store, keys, self._config.retry, threads=threads, what="files that are")

    def _each(self, keys: list[str], action: Callable[[str], None]) -> None:
        group = TaskGroup(
            self._config.requests_at_once, name="cloudckpt-commit", interrupt=self._store.interrupt
        )

        def submit() -> None:
            for key in keys:
                group.submit(functools.partial(action, key))

        group.run(submit)


def _listed(store: ObjectStore, folder: str) -> list[ObjectInfo]:
    return list(store.list(_inside(folder)))


def _inside(folder: str) -> str:
    return f"{folder}/" if folder else ""


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _beneath(folder: str, key: str) -> str:
    """The name of a key beneath a folder that it is in."""
    return key.removeprefix(_inside(folder)) if key != folder else ""


def _path_of(record: str) -> str:
    """The path of the file that a record is of, given its key."""
    return name_of_record(record)[0]
