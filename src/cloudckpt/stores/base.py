"""The interface between cloudckpt and an object store.

A store does not repeat a failed request, unless the refusal names what to change (such as
the credentials or the region), and maps the vendor's errors to :mod:`cloudckpt.errors`; retries,
parallelism and clean-up are up to the caller. Large buffers are not copied: an upload is a sequence
of memoryviews sent in order, a download fills the caller's memoryviews.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB
from cloudckpt.errors import ObjectNotFoundError, ObjectTooLargeError, RangeNotSatisfiableError
from cloudckpt.stores.capabilities import Capabilities

__all__ = [
    "Body",
    "CopySource",
    "ObjectInfo",
    "ObjectStore",
    "Part",
    "Progress",
    "RangeReader",
    "Retry",
    "Upload",
    "once",
]

T = TypeVar("T")

_PIECE = 16 * 1024**2  # bytes read at a time to compute a checksum

MOST_READ = 256 * MIB
"""The maximum number of bytes that `get` reads unless its caller sets another limit."""

Body = Sequence[memoryview]
"""Byte views (format ``B``), sent in order."""

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call; may raise to stop the transfer."""


class Retry(Protocol):
    """Calls a request, repeats it after temporary failures, and returns its result."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


def once(request: Callable[[], T], /) -> T:
    """Calls a request without retries, and returns its result."""
    return request()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as the store describes it.

    Attributes:
        key: The key in the bucket.
        size: Bytes.
        version: An opaque identifier, such as an ETag or a generation; it changes when the object
            is replaced, in some stores only if the bytes differ.
        checksum: The checksum of the bytes, by ``capabilities.checksum``; None if the store did not
            report it.
        modified: The time of the last write, in seconds since 1970 by the store's clock; set by
            listings, ``head``, ``get`` and ``get_range``, None if the store did not report it. Some
            stores report whole seconds only.
        attempt: The name of the write that made the object, see :meth:`ObjectStore.put`; set by
            ``head``. Empty if the object has none, or the store keeps none.
        arrived: The time of the last change of a local file's bytes, names or permissions (ctime),
            in seconds since 1970; None for other stores. A copied file may keep the ``modified`` of
            the original, but not this time.
        answered: The time of the response that described the object, in whole seconds since 1970 by
            the store's clock; set by ``head``, ``get`` and ``get_range``, None in listings, for
            local files, and if the response has no valid date.
    """

    key: str
    size: int
    version: str
    checksum: int | None = field(default=None, compare=False)
    modified: float | None = field(default=None, compare=False)
    attempt: str = field(default="", compare=False)
    arrived: float | None = field(default=None, compare=False)
    answered: float | None = field(default=None, compare=False)

    @property
    def age(self) -> float | None:
        """Seconds from the last write to the response, accurate to a second.

        It is None if either time is unknown, or if the write is later than the response.
        """
        if self.answered is None or self.modified is None or self.answered < self.modified:
            return None
        return self.answered - self.modified


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload under way; its object is invisible until it is completed.

    Attributes:
        key: The key that the object will have.
        id: The store's identifier of this upload.
        part_size: Bytes of every part but the last; 0 if a listing does not report it.
        began: When it began, in seconds since 1970 by the store's clock; for a local file, the time
            of the last write to it. None unless a listing reports it.
        is_ours: Whether the id shows that cloudckpt began the upload, whatever its key: True in
            listings of local files, whose ids are names that cloudckpt gives, else False.
        attempt: The name of the write, which `create_upload` chooses and the object will keep;
            empty if a listing does not report it, or the store keeps none.
    """

    key: str
    id: str
    part_size: int
    began: float | None = field(default=None, compare=False)
    is_ours: bool = field(default=False, compare=False)
    attempt: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the store has received.

    Attributes:
        number: The part's number, from 1.
        size: Bytes.
        tag: The store's identifier of the part.
        checksum: The checksum of the bytes; None if the store copied them itself and reported none.
    """

    number: int
    size: int
    tag: str
    checksum: int | None


@dataclass(frozen=True, slots=True)
class CopySource:
    """An object to copy: the store that holds it, and its description at the version to copy."""

    store: ObjectStore
    info: ObjectInfo


class RangeReader(ABC):
    """Reads byte ranges of objects, for downloads. Safe to use from many threads."""

    @abstractmethod
    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        """Fills `into`, view by view, with the object's bytes from `start`.

        Args:
            key: The key.
            start: The offset of the first byte.
            into: Writable byte views, not empty in total.
            if_version: Fail with PreconditionFailedError unless the object has this version; None
                for no condition.
            progress: See :data:`Progress`.

        Returns:
            The description of the whole object.

        Raises:
            ConnectionLostError: If the connection broke, or the body was short; ``received`` is the
                number of bytes that arrived.
            ObjectNotFoundError: If there is no such object.
            RangeNotSatisfiableError: If the object ends before the range does.
        """

    def interrupt(self, threads: Collection[int]) -> None:  # noqa: B027 - most need nothing
        """Breaks the connections that these threads are using, so that their calls fail soon.

        Does nothing in stores without connections. `threads` are identifiers of threads.
        """

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        """Returns how many bytes each thread's connection has moved since the last call.

        It is 0 for a thread without a request under way, and at the first call for a connection.
        The result is None if the store or the platform does not count bytes: then the effect of
        adding connections can't be measured.

        Args:
            threads: The identifiers of the threads.
        """
        return None

    @abstractmethod
    def uri(self, key: str) -> str:
        """Returns the URI of `key`, for messages."""


class ObjectStore(RangeReader):
    """A bucket of an object store. Safe to use from many threads; every process opens its own.

    A method that fails raises :class:`~cloudckpt.errors.StoreError` or a subclass, which is
    ``certain`` only if the request was certainly not carried out: a commit depends on that. Writes
    of local files may also raise CommitUnknownError. Methods that move payload take ``progress``,
    see :data:`Progress`.
    """

    root: str
    """The URI of the bucket for messages, such as ``s3://bucket``; ``file://`` for local files."""

    capabilities: Capabilities

    @abstractmethod
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
        """Writes one object in one request; it appears whole or not at all.

        Args:
            key: The key.
            body: The bytes.
            checksum: The checksum of the bytes, by ``capabilities.checksum``.
            attempt: A random name of this write, the same for all of its retries. The store keeps
                it in the object's metadata, so that `written` can tell after a lost response which
                write made the object. A local file system keeps no such name: its calls return when
                the work is done, and if a network file system loses a response, `put` itself
                determines the outcome.
            if_version: Fail with PreconditionFailedError unless the key holds this version; "" for
                a key that must not exist, None for no condition. Some stores ignore it, see
                ``capabilities.conditional_writes``.
            progress: See :data:`Progress`.

        Returns:
            The description of the new object.
        """

    @abstractmethod
    def create_upload(self, key: str, part_size: int) -> Upload:
        """Begins and returns an upload in parts of `part_size` bytes; the last part may be shorter.

        Unless ``capabilities.equal_parts``, parts may also have other sizes. In a local file, part
        ``number`` begins at byte ``(number - 1) * part_size``. To write parts of any size there,
        pass a `part_size` of 1, and the offset of a part's first byte plus 1 as its number.
        """

    @abstractmethod
    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        checksum: int,
        progress: Progress | None = None,
    ) -> Part:
        """Sends and returns part `number` (from 1), replacing an earlier part of that number.

        `body`, `checksum` and `progress` are as in `put`.
        """

    @abstractmethod
    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_version: str | None = None
    ) -> ObjectInfo:
        """Makes the object visible, from all its parts in order, and returns its description.

        `if_version` is as in `put`. Google Cloud Storage, and some stores that speak S3, ignore it.
        """

    def copies_from(self, source: ObjectStore) -> bool:
        """Returns whether `copy` takes objects of `source`.

        `source` must be a store of the same kind. On S3 and Google Cloud Storage, both must have
        the same endpoint (on AWS: the same domain, such as ``amazonaws.com``, in any region) and
        the same options for credentials, and directory buckets must be in the same zone; on Azure,
        both must be in the same cloud, or have the same emulator's endpoint; a local store copies
        nothing. Read permission on the source is not checked; `copy` fails without it.
        """
        return False

    def copy(
        self, source: CopySource, key: str, *, attempt: str = "", if_version: str | None = None
    ) -> ObjectInfo:
        """Copies an object within the store, from this or another bucket, without downloading it.

        The copy gets the storage class, encryption and tags that `put` gives to new objects,
        whatever the source has. The result's checksum is set if the store reports it.

        Args:
            source: The object, at most ``capabilities.max_copy_size`` bytes, in a store for which
                ``copies_from`` is True.
            key: The key of the copy.
            attempt: As in `put`; the source's attempt is not copied.
            if_version: As in `put`.

        Raises:
            PreconditionFailedError: If the source no longer has this version, or the key
                does not hold ``if_version``.
            ObjectNotFoundError: If the source no longer exists.
            NotImplementedError: If this kind of store can't copy, see ``copies_from``.
        """
        raise NotImplementedError

    def copy_part(
        self, source: CopySource, upload: Upload, number: int, start: int, stop: int
    ) -> Part:
        """Has the store copy an object's bytes, from `start` to before `stop`, into a part.

        The other arguments and the errors are those of `copy` and `put_part`.
        """
        raise NotImplementedError

    @abstractmethod
    def abort_upload(self, upload: Upload) -> None:
        """Discards an upload; doing so again, or after completion, is not an error.

        Azure may keep the parts of an upload for up to a week.
        """

    @abstractmethod
    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        """Yields the uploads under `prefix` that were neither completed nor aborted.

        On Azure, uploads of other processes that would replace an object are left out.

        Args:
            prefix: The beginning of the keys.
            retry: As in `list`.
        """

    @abstractmethod
    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        """Returns the bytes and the description of a whole object: for metadata, not for shards.

        Args:
            key: The key.
            limit: The most bytes that the object may have.

        Raises:
            ObjectTooLargeError: If the object is larger; no memory is allocated for it.
            ObjectNotFoundError: If there is no such object.
        """

    def check_size(self, key: str, size: int, limit: int) -> None:
        """Raises an error if an object is too large to be read into memory.

        Raises:
            ObjectTooLargeError: If `size` exceeds `limit`.
        """
        if size > limit:
            raise ObjectTooLargeError(
                f"the object has {size} bytes, but at most {limit} are expected, so it was not "
                "read: it is damaged, or another program has written it; check the URI",
                uri=self.uri(key),
                certain=True,
            )

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Returns the description of an object, with its attempt if the store keeps one.

        Raises:
            ObjectNotFoundError: If there is no such object.
        """

    def look(self, key: str) -> ObjectInfo:
        """Returns the description of the current object, never of an earlier one from a cache.

        It reads the first byte, so that unlike `head`, it distinguishes a missing bucket from a
        missing object in every store.

        Raises:
            ObjectNotFoundError: If the store says that there is no such object.
        """
        try:
            return self.get_range(key, 0, [memoryview(bytearray(1))])
        except RangeNotSatisfiableError:  # the object is empty
            return self.head(key)

    def written(self, key: str, attempt: str) -> ObjectInfo | None:
        """Returns the object's description if the write named `attempt` made it; else None.

        It is None for an empty `attempt`, too. For use after the response to a write was lost: the
        store may have carried it out. The same bytes written by another write don't count. None
        does not prove a failure: the request may still be carried out, and some stores keep no
        metadata.
        """
        try:
            info = self.head(key)
        except ObjectNotFoundError:
            return None
        return info if attempt and info.attempt == attempt else None

    def checksum_of(self, info: ObjectInfo) -> int:
        """Returns an object's checksum: the store's, or else one computed from a download.

        Raises:
            PreconditionFailedError: If `info` has no checksum, and the object was replaced since
                `info` was obtained.
        """
        if info.checksum is not None:
            return info.checksum
        buffer = memoryview(bytearray(min(info.size, _PIECE)))
        sums: list[tuple[int, int]] = []
        for start in range(0, info.size, _PIECE):
            view = buffer[: min(_PIECE, info.size - start)]
            self.get_range(info.key, start, [view], if_version=info.version)
            sums.append((self.capabilities.checksum.of(view), view.nbytes))
        return self.capabilities.checksum.combine(sums)

    @abstractmethod
    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        """Yields the objects whose key begins with `prefix`, ordered by key, page by page.

        Args:
            prefix: The beginning of the keys.
            retry: Retries the request of each page. The caller can't retry the whole listing: of a
                thousand pages, one would fail every time.
        """

    @abstractmethod
    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        """Yields the objects and folder names directly beneath `prefix`, page by page.

        A folder is a path segment with keys beneath it. Within each page the objects come first,
        then the folders, each in order. The keys within the folders are not requested.

        Args:
            prefix: Empty, or ends in a slash.
            retry: As in `list`.
        """

    @abstractmethod
    def delete(self, key: str, *, if_version: str | None = None) -> None:
        """Deletes an object; a missing object is not an error.

        Args:
            key: The key.
            if_version: Fail with PreconditionFailedError if the key holds another version. Unless
                ``capabilities.conditional_deletes`` is True, another write may come between the
                check and the deletion.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; the store can't be used afterwards."""

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"


def whole_checksum(parts: Iterable[Part], algorithm: ChecksumAlgorithm) -> int | None:
    """Returns the checksum of an object made of `parts`, in order; None if a part's is unknown."""
    sums: list[tuple[int, int]] = []
    for part in parts:
        if part.checksum is None:
            return None
        sums.append((part.checksum, part.size))
    return algorithm.combine(sums)


def nbytes(views: Iterable[memoryview]) -> int:
    """Returns the total number of bytes of `views`."""
    return sum(view.nbytes for view in views)


def skip(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns `views` without their first `count` bytes."""
    rest: list[memoryview] = []
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
            continue
        rest.append(view[count:] if count else view)
        count = 0
    return rest


ATTEMPT = "cloudckptattempt"
"""The key of the metadata entry that holds the name of the write that made the object.

Azure allows no hyphens in such a name, and some proxies drop headers with underscores.
"""


def random_suffix() -> str:
    """Returns 16 random hexadecimal digits (64 bits), for a unique name."""
    return os.urandom(8).hex()
