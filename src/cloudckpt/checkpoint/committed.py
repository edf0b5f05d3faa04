"""Reads a commit object, and only the bytes of it that a reader of the checkpoint needs.

A commit object of cloudckpt has all that a reader needs at its end, so one request for its size and
one for its last megabytes usually suffice. torch's pickle, at the beginning, is for other readers;
it is not fetched if the commit object is large.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.foreign import load_metadata
from cloudckpt.checkpoint.lazy import lazy_metadata, save_id_of
from cloudckpt.checkpoint.objects import METADATA, WrittenObject, checked
from cloudckpt.checkpoint.record import Record, bound
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checkpoint.trailer import Trailer, notes_at_end, pickle_in, read_range, record_in
from cloudckpt.checksum import CRC32C, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError, CheckpointReplacedError, Damage
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["CommitObject", "Fetched", "fetch", "read_commit"]

logger = logging.getLogger("cloudckpt")

_TAIL = 4 * 1024 * 1024
"""Bytes at the end of a commit object that are read first: enough for half a million chunks."""
_MOST_BYTES = 1 << 33
"""Maximum bytes of a commit object: torch's pickle of ten million shards takes some two billion."""


@dataclass(frozen=True)
class Fetched:
    """The last bytes of a commit object, or all of them.

    Attributes:
        info: Key, size and version of the commit object.
        data: The bytes of the commit object from some offset to its end.
    """

    info: ObjectInfo
    data: bytearray


def fetch(store: ObjectStore, key: str, *, whole: bool = False) -> Fetched:
    """Reads the bytes of a commit object that a load needs, usually in two requests.

    Of a large commit object with a record of cloudckpt, these are the bytes after torch's pickle;
    any other commit object is read completely.

    Args:
        store: The store.
        key: The key of the commit object.
        whole: Whether to read all bytes in any case.

    Raises:
        ObjectNotFoundError: If the commit object does not exist.
        CheckpointReplacedError: If the commit object was replaced or deleted meanwhile.
        ObjectTooLargeError: If the object is larger than any commit object.
        StoreError: If the store refuses or stays unreachable.
    """
    try:
        return _fetch(store, key, whole=whole)
    except CheckpointReplacedError:
        store.look(key)  # if the object does not exist, some stores fail the condition: this raises
        raise


def _fetch(store: ObjectStore, key: str, *, whole: bool) -> Fetched:
    info = store.head(key)
    store.check_size(key, info.size, _MOST_BYTES)
    start = 0 if whole else max(0, info.size - _TAIL)
    data = read_range(store, info, start, info.size)
    if start:
        needed = info.size
        with contextlib.suppress(CheckpointCorruptError):  # a newer version: parsing it raises
            trailer = Trailer.at_end_of(data, store.uri(info.key))
            if trailer is not None and trailer.size + trailer.size_after_pickle == info.size:
                needed = trailer.size_after_pickle if trailer.body_size else info.size
        if needed > len(data):
            data = read_range(store, info, info.size - needed, start) + data
        elif needed < info.size:
            data = data[-needed:]
    return Fetched(info, data)


@dataclass(frozen=True)
class CommitObject:
    """The parsed contents of a commit object: metadata, record, notes and trailer.

    Attributes:
        info: Key, size and version of the commit object.
        metadata: torch's metadata; made lazily if there is a record.
        record: The items and their locations, as cloudckpt stores them; None if another library
            saved the checkpoint.
        notes: The notes (:mod:`cloudckpt.checkpoint.notes`), as stored; empty if there are none.
        trailer: The lengths and checksums of the other parts; None if another library wrote the
            commit object. The copy of another library's checkpoint has a trailer, but no record.
        is_whole: Whether all bytes were read, so that torch's pickle was also compared with its
            checksum, if it has one.
    """

    info: ObjectInfo
    metadata: Metadata
    record: Record | None
    notes: bytes = b""
    trailer: Trailer | None = None
    is_whole: bool = False

    @property
    def has_digests(self) -> bool:
        """Whether the checkpoint has digests of its items, so that later saves can refer to it."""
        return self.record is not None and self.record.extents.has_digests

    @property
    def objects(self) -> Sequence[WrittenObject]:
        """The data objects of the checkpoint; empty if another library saved it."""
        return () if self.record is None else self.record.objects

    @property
    def checksum(self) -> ChecksumAlgorithm | None:
        """The algorithm of the checkpoint's checksums; None if another library saved it."""
        return None if self.record is None else self.record.checksum

    @property
    def structure(self) -> Structure:
        """The keys that are not strings and the empty dicts, both of which torch's metadata lacks.

        It is empty if another library saved the checkpoint.
        """
        return Structure() if self.record is None else self.record.structure

    @classmethod
    def parse(cls, fetched: Fetched, uri: str, *, trust_pickle: bool = False) -> CommitObject:
        """Parses the fetched bytes of a commit object.

        Args:
            fetched: The bytes.
            uri: The URI of the commit object, for messages.
            trust_pickle: Whether another writer's pickle may run any code.

        Raises:
            UntrustedPickleError: If another writer's metadata names code that is not on the
                allow-list.
            CheckpointCorruptError: If the bytes are damaged, or not metadata.
        """
        data = fetched.data
        is_whole = len(data) == fetched.info.size
        trailer = Trailer.at_end_of(data, uri)
        notes = b"" if trailer is None else notes_at_end(data, uri)
        if trailer is not None:
            if is_whole:
                pickle_in(data, uri)  # only other readers need it, but damage must be reported
            if trailer.body_size:
                body = record_in(data, trailer, uri)
                record = Record.parse(body, uri, bound(trailer.size))
                if record.table is None or record.table.count != len(record.extents):
                    raise CheckpointCorruptError(
                        "invalid metadata record: it lacks the names or the locations of items; "
                        "restore the object from a backup, or load an older checkpoint",
                        uri=uri,
                    )
                return cls(fetched.info, lazy_metadata(record), record, notes, trailer, is_whole)
        metadata = load_metadata(data, uri, trust_pickle=trust_pickle)
        save_id = str(getattr(metadata.storage_meta, "save_id", ""))
        if trailer is None and data[-1:] != pickle.STOP and save_id.startswith(save_id_of("")):
            raise CheckpointCorruptError(
                "the end of the metadata, with its checksums, is missing or damaged: restore "
                "the object from a backup, or load an older checkpoint",
                uri=uri,
            )
        return cls(fetched.info, metadata, None, notes, trailer, is_whole)

    def check_pickle(self, store: ObjectStore, retrier: Retrier) -> None:
        """Compares torch's pickle, which only other readers need, with its checksum.

        Nothing is compared if :meth:`parse` has done that, or if the pickle has no checksum.

        Raises:
            CheckpointCorruptError: If the pickle is damaged.
            CheckpointReplacedError: If the commit object was replaced or deleted meanwhile.
            StoreError: If the store refuses or stays unreachable.
        """
        if self.trailer is None or self.is_whole:
            return
        uri, size, checksum = store.uri(self.info.key), self.trailer.size, 0
        for start in range(0, size, _TAIL):
            stop = min(start + _TAIL, size)
            piece = retrier.call(functools.partial(read_range, store, self.info, start, stop))
            checksum = CRC32C.of(piece, checksum)
        if checksum != self.trailer.crc:
            raise CheckpointCorruptError(
                "the metadata for readers other than cloudckpt (torch's pickle) does not match "
                "its checksum: save the checkpoint again, or restore the object from a backup",
                uri=uri,
                damages=[Damage(uri, "", "does not match its checksum", 0, size)],
            )

    def names(self, uri: str) -> set[str]:
        """Returns the names of the checkpoint's data objects, relative to its folder.

        Another writer's metadata may name anything beneath this folder, even the current commit
        object or another checkpoint. Of these names, it returns those that can be data objects of
        this checkpoint, and logs a warning if there are others.

        Args:
            uri: The checkpoint or its commit object, for messages.

        Raises:
            CheckpointCorruptError: If a name in another writer's metadata is invalid, or leads out
                of the folder.
        """
        if self.record is not None:
            return {one.name for one in self.record.objects}
        places = self.metadata.storage_data
        found = places.values() if isinstance(places, dict) else ()
        named = {checked(one.relative_path, uri) for one in found if isinstance(one, StorageInfo)}
        data = {name for name in named if "/" not in name and not name.endswith(METADATA)}
        if data != named:
            logger.warning(
                "%s: the metadata, which another library wrote, names objects (%d, such as %s) "
                "that may belong to other checkpoints: cloudckpt does not delete these. Delete "
                "those that no checkpoint needs",
                uri, len(named - data), min(named - data),
            )  # fmt: skip
        return data


def read_commit(
    store: ObjectStore,
    key: str,
    retrier: Retrier,
    *,
    trust_pickle: bool = False,
) -> tuple[CommitObject, Fetched]:
    """Fetches and parses a commit object; fetches all of it once more if it seems damaged.

    Returns:
        The commit object, and the bytes that were fetched.

    Raises:
        ObjectNotFoundError: If the commit object does not exist.
        UntrustedPickleError: If another writer's metadata names code that is not on the allow-list.
        CheckpointCorruptError: If the commit object is damaged.
        CheckpointReplacedError: If the commit object was replaced or deleted while it was read.
        StoreError: If the store refuses or stays unreachable.
    """
    uri = store.uri(key)
    fetched = retrier.call(functools.partial(fetch, store, key))
    try:
        return CommitObject.parse(fetched, uri, trust_pickle=trust_pickle), fetched
    except CheckpointCorruptError as error:
        logger.warning("the metadata seems damaged and is read again: %s", error)
    fetched = retrier.call(functools.partial(fetch, store, key, whole=True))
    return CommitObject.parse(fetched, uri, trust_pickle=trust_pickle), fetched
