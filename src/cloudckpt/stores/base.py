"""The interface between cloudckpt and an object store.

A store makes exactly one attempt per call (and one more if its credentials were replaced) and maps
the vendor's errors to :mod:`cloudckpt.errors`; retries, parallelism and clean-up are up to the
caller. Buffers are never copied: an upload is a sequence of memoryviews sent in order, a download
fills the caller's memoryviews.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB
from cloudckpt.errors import (
    InvalidRequestError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    RangeNotSatisfiableError,
)
from cloudckpt.stores.capabilities import Capabilities

__all__ = [
    "Body",
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

_PIECE = 16 * 1024**2  # bytes read at a time

MOST_READ = 256 * MIB
"""Bytes that `get` reads of an object about which its caller says nothing."""

Body = Sequence[memoryview]
"""Byte views (format ``B``), sent in order."""

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call; may raise to stop the transfer."""


class Retry(Protocol):
    """How a request of a listing is tried again: what is given is called until it succeeds."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


def once(request: Callable[[], T], /) -> T:
    """Tries a request once."""
    return request()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as the store describes it.

    Attributes:
        key: The key in the bucket.
        size: Bytes.
        version: What changes when the object is replaced (ETag, generation); opaque.
        checksum: The bytes' checksum, by ``capabilities.checksum``, if the store reported it.
        modified: When it was written, in seconds since 1970 by the store's clock; set by listings,
            ``head`` and ``get_range``.
        attempt: The name of the write that made it, see :meth:`ObjectStore.put`; set by ``head``.
            Empty if it has none, or the store keeps none.
        arrived: When it came to its place, where that may be later than ``modified``: a copy of a
            file may have the time of the original.
        answered: When the store said so, in seconds since 1970 by its clock; set by ``head`` and
            ``get_range``. Both times are known to a second.
    """

    key: str
    size: int
    version: str
    checksum: int | None = field(default=None, compare=False)
    modified: float | None = field(default=None, compare=False)
    attempt: str = field(default="", compare=False)
    arrived: float | None = field(default=None, compare=False)

    answered: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.size < 1 << 63:
            raise ValueError(f"the size of an object can't be {self.size} bytes")

    @property
    def age(self) -> float | None:
        """Seconds from when it was written to the answer, to a second; None if unknown."""
        if self.answered is None or self.modified is None or self.answered < self.modified:
            return None
        return self.answered - self.modified


@dataclass(frozen=True, slots=True)
class Upload:
    """An object under construction; invisible until it is completed.

    Attributes:
        key: The key that the object will have.
        id: The store's name for this upload.
        part_size: Bytes of every part but the last.
        began: When it began, in seconds since 1970 by the store's clock, if a listing reports it.
        is_ours: Whether its id shows that cloudckpt began it, whatever its key; always False where
            the store chooses the id.
        attempt: The name of the write, which `create_upload` draws and the object will keep.
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
        number: From 1.
        size: Bytes.
        tag: The store's name for the part.
        checksum: Of its bytes; None if the store copied them itself and reported none.
    """

    number: int
    size: int
    tag: str
    checksum: int | None


class RangeReader(ABC):
    """Reads ranges of objects, for downloads. Safe to use from many threads."""

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
        """Fills ``into``, one view after the other, with the object's bytes from ``start``.

        Args:
            key: The key.
            start: The first byte.
            into: Writable byte views, not empty in total.
            if_version: Fail with PreconditionFailedError if the object was replaced.
            progress: See :data:`Progress`.

        Raises:
            ConnectionLostError: Also if the body was short; ``received`` says what arrived.
            RangeNotSatisfiableError: If the object ends before the range does.
        """

    def interrupt(self, threads: Collection[int]) -> None:  # noqa: B027 - most need nothing
        """Interrupts what these threads (by identifier) are waiting for; their calls fail soon.

        Readers whose calls do not wait for a network do nothing.
        """

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        """Bytes that each of these threads' connections has moved since the last call.

        Includes requests under way. None if bytes are not counted: the effect of more connections
        is then not visible.
        """
        return None

    @abstractmethod
    def uri(self, key: str) -> str:
        """The URI of ``key``, for messages."""


class ObjectStore(RangeReader):
    """One bucket. Safe to use from many threads; every process makes its own.

    All methods raise :class:`~cloudckpt.errors.StoreError` or a subclass, which is ``certain`` only
    if the request was certainly not carried out: a commit depends on that. Methods that move
    payload take ``progress``, see :data:`Progress`.
    """

    root: str
    """``scheme://bucket``, for messages."""

    capabilities: Capabilities

    @abstractmethod
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
        """Writes one object in one request; it appears whole or not at all.

        Args:
            key: The key.
            body: The bytes.
            checksum: The bytes' checksum, by ``capabilities.checksum``.
            attempt: A random name of this write, the same for all tries of it. The store keeps it
                in the object's metadata, so `written` can tell after a lost answer whose object is
                there. A local file system keeps none: its calls return when all is done, and `put`
                itself finds out what an answer that a network file system lost was about.
            if_absent: Fail with PreconditionFailedError if the key is taken.
            if_version: Fail with PreconditionFailedError unless the key holds this version.
            progress: See :data:`Progress`.
        """

    @abstractmethod
    def create_upload(self, key: str, part_size: int) -> Upload:
        """Begins an object sent in parts of ``part_size`` bytes; the last may be shorter.

        Parts may have other sizes where ``capabilities.equal_parts`` says nothing else. In a local
        file a part's number is its place: with a ``part_size`` of 1, the first byte, from 1.
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
        """Sends part ``number`` (from 1), replacing any earlier one. Arguments as in `put`."""

    @abstractmethod
    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_absent: bool = False
    ) -> ObjectInfo:
        """Makes the object visible, from all its parts in order; ``if_absent`` as in `put`."""

    def copies_from(self, source: ObjectStore) -> bool:
        """Whether `copy` takes objects from that bucket: same kind, place and credentials.

        Read permission there is not checked; `copy` fails without it.
        """
        return False

    def copy(
        self,
        source: ObjectStore,
        found: ObjectInfo,
        key: str,
        *,
        attempt: str = "",
        if_absent: bool = False,
    ) -> ObjectInfo:
        """Copies an object from this or another bucket within the store: no bytes come here.

        The copy gets what `put` gives new objects (class, encryption, tags), whatever the source
        has. Its checksum is set if the store reports it.

        Args:
            source: A store that this one ``copies_from``.
            found: The object there, at most ``capabilities.max_copy_size`` bytes.
            key: The key here.
            attempt: As in `put`; the source's is not copied.
            if_absent: As in `put`.

        Raises:
            PreconditionFailedError: If the source is no longer ``found.version``, or the key is
                taken.
            ObjectNotFoundError: If the source is gone.
        """
        raise self._makes_no_copies(key)

    def copy_part(
        self,
        source: ObjectStore,
        found: ObjectInfo,
        upload: Upload,
        number: int,
        start: int,
        stop: int,
    ) -> Part:
        """Makes bytes ``start`` to ``stop`` of another object part ``number``, as `copy` does."""
        raise self._makes_no_copies(upload.key)

    def _makes_no_copies(self, key: str) -> InvalidRequestError:
        text = "the store can't copy this object by itself"
        return InvalidRequestError(text, uri=self.uri(key), certain=True)

    @abstractmethod
    def abort_upload(self, upload: Upload) -> None:
        """Discards an upload; doing so again, or after completion, is not an error."""

    @abstractmethod
    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        """The uploads under ``prefix`` that were neither completed nor aborted.

        ``retry`` as in `list`.
        """

    @abstractmethod
    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        """Reads a whole object into memory: for metadata, not for shards.

        Args:
            key: The key.
            limit: Most bytes that such an object may have.

        Raises:
            ObjectTooLargeError: If it has more; no memory is taken for them.
        """

    def get_latest(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        """As `get`, but never from a cache that may hold an earlier version.

        For keys that are rewritten.
        """
        return self.get(key, limit=limit)

    def check_size(self, key: str, size: int, limit: int) -> None:
        """Whether an object of this size is read into memory.

        Raises:
            ObjectTooLargeError: If it is larger than ``limit``.
        """
        if size > limit:
            raise ObjectTooLargeError(
                f"the object has {size} bytes, but at most {limit} are expected, so it was not "
                "read: is it damaged, or something else?",
                uri=self.uri(key),
                certain=True,
            )

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size, version and attempt of an object.

        Raises:
            ObjectNotFoundError: If there is no such object.
        """

    def look(self, key: str) -> ObjectInfo:
        """Size and version of what is there now; no cache that may hold an older one is asked.

        Unlike `head`, this distinguishes a missing bucket from a missing object on every store. It
        reads the first byte, unless that may come from a cache.

        Raises:
            ObjectNotFoundError: If the store says that there is no such object.
        """
        try:
            return self.get_range(key, 0, [memoryview(bytearray(1))])
        except RangeNotSatisfiableError:  # it is empty
            return self.head(key)

    def written(self, key: str, attempt: str) -> ObjectInfo | None:
        """The object, if that attempt has written it; else None.

        For use after a request whose answer was lost: it may have been carried out. An object that
        another writer has made of the same bytes is not taken for this one. None proves nothing:
        the request may be carried out yet, and some stores keep no metadata.
        """
        try:
            info = self.head(key)
        except ObjectNotFoundError:
            return None
        return info if attempt and info.attempt == attempt else None

    def checksum_of(self, info: ObjectInfo) -> int:
        """The checksum of an object, as the store keeps it; read and computed if it keeps none.

        Raises:
            PreconditionFailedError: If the object is no longer ``info.version``.
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
        """The objects whose key begins with ``prefix``, in the order of keys, page by page.

        Args:
            prefix: Of the keys.
            retry: Tries the request for each page again. A whole listing should not be retried: of
                a thousand pages one is refused each time.
        """

    @abstractmethod
    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        """The objects and folders directly beneath ``prefix``, page by page.

        A folder is a name that has keys beneath it. In each page the objects come first, and both
        are in order. It takes one request per thousand of them, however many keys are beneath the
        folders.

        Args:
            prefix: Empty, or ends in a slash.
            retry: As in `list`.
        """

    @abstractmethod
    def delete(self, key: str, *, if_version: str | None = None) -> None:
        """Removes an object; a missing object is not an error.

        Args:
            key: The key.
            if_version: Fail with PreconditionFailedError if the key holds another version. Where
                ``capabilities.conditional_deletes`` is not True, a write may come between the look
                and the deletion.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections; the store can't be used afterwards."""

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"


def whole_checksum(parts: Iterable[Part], algorithm: ChecksumAlgorithm) -> int | None:
    """The checksum of an object made of ``parts``, in order; None if a part's is unknown."""
    sums: list[tuple[int, int]] = []
    for part in parts:
        if part.checksum is None:
            return None
        sums.append((part.checksum, part.size))
    return algorithm.combine(sums)


def nbytes(views: Iterable[memoryview]) -> int:
    """Total bytes of ``views``."""
    return sum(view.nbytes for view in views)


def skip(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """``views`` without their first ``count`` bytes."""
    rest: list[memoryview] = []
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
            continue
        rest.append(view[count:] if count else view)
        count = 0
    return rest


ATTEMPT = "cloudckptattempt"
"""What stores call the attempt that made an object, in its metadata. Azure takes no hyphens in such
a name, and some proxies drop headers with underscores."""


def random_suffix() -> str:
    """Sixteen hexadecimal digits that no other attempt, process or host will draw."""
    return os.urandom(8).hex()
