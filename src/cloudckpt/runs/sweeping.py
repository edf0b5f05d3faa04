"""Sweeps what saves that were killed have left: data that no checkpoint names, and open uploads.

A leftover looks like the objects of a save that is under way. The two are told apart by their age:
a save does not commit when it has taken longer than :data:`LONGEST_SAVE`, so an object that is
twice as old is of no save that ever will. The age is by the store's clock on both ends: of the
object, and of one that is written for the purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from cloudckpt.checkpoint.commit import LONGEST_SAVE, named_objects
from cloudckpt.checkpoint.committed import fetch
from cloudckpt.checkpoint.objects import METADATA, is_drawn_name, probe_name
from cloudckpt.config import Config
from cloudckpt.errors import CloudCheckpointError, ObjectNotFoundError, StoreError
from cloudckpt.runs.catalog import Run
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Upload, random_suffix
from cloudckpt.transfer.deleting import delete_all, delete_quietly
from cloudckpt.transfer.retry import Retrier, begun_anew
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["LEFTOVERS_AGE", "Leftovers", "Sweep", "clock_of", "find_leftovers", "sweep"]

LEFTOVERS_AGE = 2 * LONGEST_SAVE
"""Seconds after which what no checkpoint names is a leftover."""


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What saves that were killed have left in a run.

    Attributes:
        objects: The URIs of data that no checkpoint names.
        nbytes: Their bytes.
        uploads: The URIs of objects whose upload cloudckpt has begun, and not completed.
        unread: The URIs of commit objects that can't be read: beside them, nothing is a leftover.
    """

    objects: tuple[str, ...]
    nbytes: int
    uploads: tuple[str, ...]
    unread: tuple[str, ...]


def find_leftovers(
    run: URILike, *, older_than: float = LEFTOVERS_AGE, config: Config | None = None
) -> Leftovers:
    """What :func:`sweep` would delete.

    Args:
        run: The folder of a run, or any other; all that is beneath it is looked at.
        older_than: Seconds; less than a day only if no job is saving there.
        config: Options.

    Raises:
        InvalidURIError: If it is not a valid location.
        StoreError: If the store refuses or stays unreachable.
    """
    return Sweep(run, older_than=older_than, config=config).found()


def sweep(
    run: URILike, *, older_than: float = LEFTOVERS_AGE, config: Config | None = None
) -> Leftovers:
    """Deletes what saves that were killed have left, and returns what it was.

    Never what a checkpoint names, what a save may still commit, and what cloudckpt has not written:
    other files, uploads of other programs, and the objects of torch's own writers, whose names do
    not tell one save from another. Uploads of models and of single files stay in S3 and Google's
    Cloud Storage, too: their names are those that other programs give to theirs. Arguments and
    errors are those of :func:`find_leftovers`.

    Raises:
        StoreError: If something can't be deleted; all else is.
    """
    return Sweep(run, older_than=older_than, config=config).carried_out()


class Sweep:
    """What was left over when it was looked for, and the deletion of just this.

    Between the two somebody may be asked. What has become a leftover by then was not shown to him,
    and what no longer is one has become part of a checkpoint: :meth:`narrow` it before.
    """

    def __init__(
        self, run: URILike, *, older_than: float = LEFTOVERS_AGE, config: Config | None = None
    ) -> None:
        """Looks. Arguments and errors are those of :func:`find_leftovers`."""
        self._run = Run(run, config=config)
        self._older_than = older_than
        self._objects: list[ObjectInfo] = []
        self._uploads: list[Upload] = []
        self._unread: list[str] = []
        self._look()

    def found(self) -> Leftovers:
        """What there is to be deleted, or was."""
        uri = self._run.store.uri
        return Leftovers(
            objects=tuple(uri(info.key) for info in self._objects),
            nbytes=sum(info.size for info in self._objects),
            uploads=tuple(uri(upload.key) for upload in self._uploads),
            unread=tuple(self._unread),
        )

    def narrow(self) -> None:
        """Looks once more, and keeps of what was found before what is a leftover still.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        objects, uploads = set(self._objects), set(self._uploads)
        self._look()
        self._objects = [info for info in self._objects if info in objects]
        self._uploads = [upload for upload in self._uploads if upload in uploads]

    def carried_out(self) -> Leftovers:
        """Deletes what was found.

        Raises:
            StoreError: If something can't be deleted; all else is.
        """
        run, config = self._run, self._run.config
        for upload in self._uploads:
            run.retrier.call(partial(run.store.abort_upload, upload))
        keys = [info.key for info in self._objects]
        delete_all(
            run.store,
            keys,
            config.retry,
            threads=config.connections,
            what="leftovers that are",
        )
        return self.found()

    def _look(self) -> None:
        store, retrier = self._run.store, self._run.retrier
        below = self._run.root.key("")
        limit = clock_of(store, self._run.root, self._run.config) - self._older_than
        uploads = retrier.call(lambda: list(store.list_uploads(below)))
        self._uploads = [
            upload
            for upload in uploads
            if upload.began is not None
            and upload.began <= limit
            and (upload.is_ours or _is_ours(upload.key))
        ]
        listed = retrier.call(lambda: [info for info in store.list(below) if _is_ours(info.key)])
        folders: dict[str, list[ObjectInfo]] = {}
        for info in listed:
            if info.modified is not None and info.modified <= limit:  # clocks tell seconds
                folders.setdefault(info.key.rpartition("/")[0], []).append(info)
        self._objects, self._unread = [], []
        for folder, old in folders.items():
            self._objects += self._unnamed(folder, old)

    def _unnamed(self, folder: str, old: list[ObjectInfo]) -> Iterable[ObjectInfo]:
        """Those of a folder's old objects that its checkpoint, as it is now, does not name."""
        store, start = self._run.store, f"{folder}/" if folder else ""
        key = start + METADATA
        try:
            look = partial(self._run.retrier.call, partial(fetch, store, key))
            named = named_objects(begun_anew(look), store.uri(key))
        except ObjectNotFoundError:
            named = set()
        except (StoreError, MemoryError):
            raise
        except CloudCheckpointError:
            self._unread.append(store.uri(key))
            return ()
        return [info for info in old if info.key.removeprefix(start) not in named]


def clock_of(store: ObjectStore, folder: CheckpointURI, config: Config) -> float:
    """What a store's clock says: when it has written an object just now, in a folder.

    Raises:
        StoreError: If it does not say, refuses, or stays unreachable.
    """
    retrier, key = Retrier(config.retry), folder.key(probe_name("sweep", random_suffix()))
    put_whole(store, key, memoryview(b""), retrier, if_absent=creates_only(store, config))
    try:
        listed = retrier.call(lambda: list(store.list(key)))
    finally:
        delete_quietly(store, [key], config.retry, threads=1)
    if not listed or listed[0].modified is None:
        raise StoreError(
            "the store does not say when objects were written, so leftovers can't be "
            "distinguished from a save in progress",
            uri=str(folder),
        )
    return listed[0].modified


def _is_ours(key: str) -> bool:
    return is_drawn_name(key.rpartition("/")[2])
