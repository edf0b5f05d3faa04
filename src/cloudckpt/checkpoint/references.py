"""Keeps the objects of a checkpoint for as long as another checkpoint refers to them.

A save may refer to data objects of sibling checkpoints: of its *base*, an earlier checkpoint, and
of those that the base itself refers to. Deleting or replacing a checkpoint must keep what others
need, including what a save needs that has not committed yet. Saves and deletions share nothing but
the store, which has no transactions. So there are *marks*: a save puts a small object
``.cloudckpt-keep.<a>``, named after its own random name, into each folder that it may refer to.

**Holding a base** (:class:`Hold`). The save reads the base's commit object, puts its marks into the
base's folder and into all folders that the base refers to, checks that all objects exist, and
checks that the commit object is still the one it read. Only then does it refer to anything. After
its commit it removes the marks that it does not need, and leaves the others until it is itself
deleted or replaced.

**Deleting** (:func:`release`). The checkpoint's commit object has been deleted or replaced
*before*. Then its marks in other folders are deleted, if they name this checkpoint's own folder.
Then, for each folder that has objects of the checkpoint, the marks are listed. The mark of a
committed save protects what that save names; any other mark protects all objects in its folder. An
object that no mark protects, and that the folder's commit object does not name, is deleted.

What this rules out, with a save N whose base is B, and an object of the older A that B refers to:

- *B is deleted before N commits.* N saw B's commit object after putting its own mark into B's
  folder. So the commit object went later, and the marks were listed later still: N's is among them,
  and protects everything.
- *A is deleted, and B, while N begins.* As long as B's commit object existed, B's mark was in A's
  folder, or B's deletion had not begun. N's mark came before N checked B's commit object for the
  last time. So whenever A's marks are listed, one of the two marks exists. If it is B's, and B's
  commit object is gone when it is read, the mark protects everything; if it still exists, it names
  everything that N could refer to.
- *B is replaced at the same location.* N sees another version and refers to nothing.
- *N is killed.* Its marks protect everything until they are swept, like all leftovers of a save.
- *Two delete at once.* Each deletes its own mark before it lists. The one that lists last sees all
  the other's deletions.

The sweep (:mod:`cloudckpt.runs.sweeping`) keeps what any commit object names, and everything in a
folder with a mark younger than what it sweeps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.committed import CommitObject, read_commit
from cloudckpt.checkpoint.objects import (
    METADATA,
    WrittenObject,
    check_folder,
    keep_name,
    keeps_in,
    look_for,
)
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConfigError,
    ObjectNotFoundError,
    ObjectTooLargeError,
)
from cloudckpt.fork import module_lock
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.retry import Retrier, retry_if_replaced
from cloudckpt.transfer.upload import only_if_new, put_whole
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = [
    "Hold",
    "check_beside",
    "commit_at",
    "data_keys",
    "distrust",
    "protected",
    "release",
]

logger = logging.getLogger("cloudckpt")

_MOST_BYTES = 1 << 16  # maximum bytes of a mark
_TRIES = 3


@dataclass(frozen=True)
class Hold:
    """A base, an earlier checkpoint whose objects are kept while a save may refer to them.

    Attributes:
        base: The location of the base.
        commit: The commit object of the base.
        folders: The names of the folders with a mark of the save, a small object that protects
            the data objects there.
    """

    base: CheckpointURI
    commit: CommitObject
    folders: frozenset[str]
    _store: ObjectStore
    _uri: CheckpointURI
    _config: Config
    _attempt: str

    @classmethod
    def of(
        cls,
        store: ObjectStore,
        uri: CheckpointURI,
        base: CheckpointURI,
        config: Config,
        attempt: str,
    ) -> Hold | None:
        """Marks a base and all folders that it refers to, so that a save can use their objects.

        The module's docstring has the protocol.

        Args:
            store: The store of the checkpoint and its base.
            uri: The checkpoint to be saved.
            base: The earlier checkpoint, in the same parent folder.
            config: Options.
            attempt: The random name of the save.

        Returns:
            The base, whose objects are kept from now on; None if it has no digests, or was replaced
            or deleted meanwhile.

        Raises:
            ConfigError: If the base is not in the same parent folder as ``uri``, or has other
                checksums than the store needs; or if the name of the base's folder, or of a folder
                that it refers to, can't be part of a reference.
            CheckpointCorruptError: If one of the base's objects is missing, has another size, or is
                known to be damaged (:func:`distrust`).
            CloudCheckpointError: If the base can't be read, or marks can't be written.
        """
        check_beside(uri, base)
        retrier = Retrier(config.retry)
        key = base.key(METADATA)
        commit, _ = read_commit(store, key, retrier)
        if not commit.has_digests:
            return None
        folders = frozenset({base.folder, *(one.folder or base.folder for one in commit.objects)})
        _check_readable(store, base, commit, folders)
        _check_trusted(store, base, commit)
        made = cls(base, commit, folders, store, uri, config, attempt)
        try:
            made._mark()
            if retrier.call(lambda: store.head(key)).version == commit.info.version:
                return made
        except ObjectNotFoundError:
            pass
        except BaseException:
            made.let_go()
            raise
        made.let_go()
        return None

    @property
    def attempt(self) -> str:
        """The random name of the save that made the base."""
        assert self.commit.record is not None  # as it has digests
        return self.commit.record.attempt

    @property
    def contents(self) -> Base:
        """An object that looks up the items of the base by their digests."""
        found = self.commit.record
        assert found is not None
        return Base(found, self.base.folder)

    def let_go(self, needed: Collection[str] = ()) -> None:
        """Deletes the save's marks in all folders except those in ``needed``; logs failures."""
        keys = [_mark_in(self._uri, one, self._attempt) for one in self.folders.difference(needed)]
        delete_quietly(self._store, keys, self._config.retry, threads=self._config.requests_at_once)

    def _mark(self) -> None:
        body = memoryview(json.dumps({"checkpoint": self._uri.folder}).encode())
        store, config, view = self._store, self._config, View(self._uri, self._config)
        only = only_if_new(store, config)

        def put(folder: str) -> None:
            key = _mark_in(self._uri, folder, self._attempt)
            put_whole(store, key, body, view.retrier, if_version=only)

        view.each(put, sorted(self.folders))
        look_for(store, self.base, self.commit.objects, config, self._damaged)

    def _damaged(self, record: WrittenObject, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"in the checkpoint {self.base}, the object {record.name} {what}: run cloudckpt verify "
            f"{self.base}",
            uri=str(self.base),
        )


def check_beside(uri: CheckpointURI, base: CheckpointURI) -> None:
    """Checks that a base, to which ``uri`` is to refer, is in the same parent folder as ``uri``.

    Raises:
        ConfigError: If the base is in another folder, or either location is a root, which has no
            parent folder.
    """
    if not base.folder or not uri.folder or base.parent != uri.parent:
        raise ConfigError(
            f"base={base} is not in the same folder as the checkpoint: save both as steps of "
            "one run",
            uri=str(uri),
        )


def _check_readable(
    store: ObjectStore, base: CheckpointURI, commit: CommitObject, folders: Collection[str]
) -> None:
    """Checks that readers would accept a checkpoint that refers to the objects of a base.

    Raises:
        ConfigError: If the base has other checksums than this store needs, or the name of a folder
            can't be in a reference.
    """
    kind, own = commit.checksum, store.capabilities.checksum
    assert kind is not None  # as it has digests
    if kind is not own:  # a copy from another cloud keeps that cloud's algorithm
        raise ConfigError(
            f"the checkpoint {base} has {kind.name} checksums, but this store needs {own.name}, "
            "and a checkpoint can't mix them: save without a base, or with one that was saved to "
            "this store",
            uri=str(base),
        )
    for folder in folders:
        try:
            check_folder(folder)
        except ValueError as exc:
            raise ConfigError(
                f"an incremental save can't refer to the folder {folder!r}: use step names in "
                "UTF-8 without control characters",
                uri=str(base),
                cause=exc,
            ) from exc


_damaged: set[str] = set()  # URIs of damaged objects
_lock = module_lock()


def distrust(error: CheckpointCorruptError) -> None:
    """Keeps later saves of this process from referring to objects that ``error`` calls damaged."""
    with _lock:
        _damaged.update(damage.object for damage in error.damages)
        if error.uri is not None:
            _damaged.add(error.uri)


def _check_trusted(store: ObjectStore, base: CheckpointURI, commit: CommitObject) -> None:
    """Checks that no object of a base is known to be damaged (:func:`distrust`).

    Raises:
        CheckpointCorruptError: If an object is known to be damaged.
    """
    with _lock:
        found = _damaged.intersection(store.uri(base.key(one.name)) for one in commit.objects)
    if found:
        raise CheckpointCorruptError(
            f"a load has found damage in this checkpoint, for example in {min(found)}: run "
            f"cloudckpt verify {base}",
            uri=str(base),
        )


def _mark_in(uri: CheckpointURI, folder: str, attempt: str) -> str:
    """Returns the key of a save's mark in ``folder``, a sibling of the checkpoint ``uri``."""
    return uri.beside(folder).key(keep_name(attempt))


def data_keys(uri: CheckpointURI, commit: CommitObject) -> dict[str, set[str]]:
    """Returns the keys of a checkpoint's data objects, by the folder that contains them.

    The result is empty if another library saved the checkpoint.
    """
    found: dict[str, set[str]] = {}
    for one in commit.objects:
        found.setdefault(one.folder or uri.folder, set()).add(uri.key(one.name))
    return found


def release(
    store: ObjectStore,
    uri: CheckpointURI,
    commit: CommitObject,
    config: Config,
    *,
    needed: Collection[str] = (),
) -> list[str]:
    """Returns the keys of a deleted or replaced checkpoint's objects that nothing needs any more.

    It also deletes the marks by which that checkpoint has protected objects of other checkpoints.

    Args:
        store: The store.
        uri: The checkpoint, whose commit object is already deleted or replaced.
        commit: That commit object, written by cloudckpt.
        config: Options.
        needed: The keys of objects to leave out, since the checkpoint that replaced this one names
            them.

    Returns:
        The keys of the objects to delete.

    Raises:
        CloudCheckpointError: If the store refuses or stays unreachable, or a commit object can't be
            read: it is then unknown which objects are needed.
    """
    assert commit.record is not None  # cloudckpt wrote it
    by_folder = data_keys(uri, commit)
    others = [folder for folder in by_folder if folder != uri.folder]
    if others:
        marks = [_mark_in(uri, folder, commit.record.attempt) for folder in others]
        # a copy made by another tool has the random name of the original, whose marks must stay
        view = View(uri, config)
        whose = view.each(lambda mark: _owner_of(store, mark, view.retrier), marks)
        own = [mark for mark, who in zip(marks, whose, strict=True) if who == uri.folder]
        delete_quietly(store, own, config.retry, threads=config.requests_at_once)
    left = {folder: keys - set(needed) for folder, keys in by_folder.items()}
    shared = {
        folder: keys
        for folder, keys in left.items()
        if keys and (folder != uri.folder or commit.has_digests)
    }
    kept = protected(store, uri, shared, config)
    return sorted(set().union(*left.values()) - kept)


def protected(
    store: ObjectStore, uri: CheckpointURI, wanted: Mapping[str, set[str]], config: Config
) -> set[str]:
    """Returns the keys in ``wanted`` of objects that another checkpoint or save still needs.

    The folders are listed, and the checkpoints that refer to them are read, concurrently.

    Args:
        store: The store.
        uri: A checkpoint in the same parent folder as these folders.
        wanted: Keys of data objects, by the folder that contains them.
        config: Options.

    Raises:
        CloudCheckpointError: If the store refuses or stays unreachable, or a commit object can't be
            read.
    """
    view, kept, unclear = View(uri, config), dict[str, set[str]](), {*wanted}

    def look_into(folder: str) -> list[tuple[str, str]]:
        inside = uri.beside(folder)
        marks = [(folder, info.key) for info in store.list(keeps_in(inside), view.retrier.call)]
        commit = commit_at(store, inside, view.retrier)
        named = {} if commit is None else data_keys(inside, commit)
        kept[folder] = wanted[folder] & set().union(*named.values())
        return marks

    def look_at(mark: tuple[str, str]) -> None:
        folder, key = mark
        if kept[folder] == wanted[folder]:
            return
        if (referring := _owner_of(store, key, view.retrier)) is None:
            unclear.add(folder)
            return
        beside = uri.beside(referring)
        commit = commit_at(store, beside, view.retrier) if referring else None
        record = None if commit is None else commit.record
        if commit is not None and record is not None and key.endswith(f".{record.attempt}"):
            kept[folder] |= wanted[folder] & data_keys(beside, commit).get(folder, set())
        else:
            inside = uri.beside(folder)
            logger.info("objects of %s are kept, as an uncommitted save may refer to them", inside)
            kept[folder] |= wanted[folder]

    for _ in range(_TRIES):
        folders = sorted(unclear)
        unclear.clear()
        view.each(look_at, chain.from_iterable(view.each(look_into, folders)))
        # a mark that is gone meanwhile may be of a save that was deleted: any later save has its
        # own mark by now, and reading again shows it
        if not unclear:
            break
    return set().union(*kept.values(), *(wanted[folder] for folder in unclear))


def commit_at(store: ObjectStore, uri: CheckpointURI, retrier: Retrier) -> CommitObject | None:
    """Reads the commit object of a checkpoint; returns None if the checkpoint is not committed.

    Raises:
        CloudCheckpointError: If the commit object can't be read, so that the objects that the
            checkpoint needs are unknown.
    """
    try:
        return retry_if_replaced(lambda: read_commit(store, uri.key(METADATA), retrier))[0]
    except ObjectNotFoundError:
        return None


def _owner_of(store: ObjectStore, key: str, retrier: Retrier) -> str | None:
    """Returns the folder of the checkpoint whose save left a mark; None if the mark is gone.

    The result is empty if the mark can't be read: it then counts as that of an uncommitted save.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    try:
        data, _ = retrier.call(lambda: store.get(key, limit=_MOST_BYTES))
        return str(json.loads(bytes(data))["checkpoint"])
    except ObjectNotFoundError:
        return None
    except (ObjectTooLargeError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.warning(
            "%s, which records that a checkpoint uses data of this folder, can't be read, so such "
            "data is not deleted now. To delete what nothing needs, run cloudckpt sweep on the run "
            "a day later: %s",
            store.uri(key), error,
        )  # fmt: skip
    return ""
