"""A store that fails when it is told to, for tests of what happens then."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cloudckpt.errors import ConnectionLostError
from cloudckpt.stores.base import (
    Body,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Retry,
    Upload,
    once,
)
from cloudckpt.stores.capabilities import Capabilities

__all__ = ["FaultyStore", "Verb", "When"]

T = TypeVar("T")

Verb = Literal[
    "put",
    "create_upload",
    "put_part",
    "complete_upload",
    "copy",
    "copy_part",
    "abort_upload",
    "list_uploads",
    "get",
    "get_range",
    "head",
    "list",
    "delete",
]
"""A method of :class:`~cloudckpt.stores.base.ObjectStore` that talks to the store."""

When = Literal["before", "during", "after"]
"""``before``: nothing happened. ``during``: some bytes moved. ``after``: the answer was lost."""


@dataclass
class _Fault:
    """A rule, and how many calls it has looked at."""

    verb: Verb
    error: Callable[[str], BaseException]
    calls: Collection[int] | None
    probability: float
    when: When
    moved: int
    where: Callable[[str], bool]
    name: str
    seen: int = 0

    def strike(self, verb: Verb, key: str) -> _Strike | None:
        """Whether this call fails; to be asked exactly once for each call."""
        if verb != self.verb or not self.where(key):
            return None
        self.seen += 1
        if self.calls is not None:
            fails = self.seen in self.calls
        else:
            # drawn from the number of the call, so that threads can't change which ones fail
            fails = random.Random(f"{self.name}/{self.seen}").random() < self.probability
        return _Strike(self, self.seen) if fails else None


@dataclass(frozen=True)
class _Strike:
    """A fault, and the number of the call that it makes fail."""

    fault: _Fault
    number: int

    @property
    def when(self) -> When:
        return self.fault.when

    def error(self) -> BaseException:
        fault = self.fault
        error = fault.error(f"injected: {fault.when} {fault.verb} number {self.number}")
        if isinstance(error, ConnectionLostError) and fault.when == "during":
            error.received = fault.moved
        return error


class FaultyStore(ObjectStore):
    """Passes every call on to another store and makes chosen ones fail.

    >>> from cloudckpt.errors import ConnectionLostError, ThrottledError
    >>> from memory_store import MemoryStore
    >>> store = FaultyStore(MemoryStore("doctest"))
    >>> store.fail("put_part", ThrottledError, calls=[2])
    >>> store.fail("complete_upload", ConnectionLostError, calls=[1], when="after")
    >>> store.fail("get_range", ConnectionLostError, probability=0.1)

    Any number of faults may be set; the first that strikes a call decides. It may be used by many
    threads.

    Attributes:
        inner: The store beneath, which can be looked at without faults.
        calls: How often each verb was called.
        failed: How often each verb failed by a fault. A call that is to lose its answer, and fails
            by itself before that, is not counted.
    """

    capabilities: Capabilities

    def __init__(self, inner: ObjectStore, *, seed: int = 0) -> None:
        """
        Args:
            inner: The store that does the work.
            seed: Chooses which calls a ``probability`` strikes.
        """
        self.inner = inner
        self.root = inner.root
        self.capabilities = inner.capabilities
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._seed = seed
        self._faults: list[_Fault] = []
        self._made = 0
        self._lock = threading.Lock()

    def fail(
        self,
        verb: Verb,
        error: Callable[[str], BaseException],
        *,
        calls: Collection[int] | None = None,
        probability: float = 1.0,
        when: When = "before",
        moved: int = 0,
        where: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """Makes calls of ``verb`` fail from now on.

        Args:
            verb: The method.
            error: Makes the error from a message: an error class, or a function that may also do
                something at this moment.
            calls: Which calls fail, counted from 1 since this fault was set; by default all do,
                or those that ``probability`` strikes.
            probability: The share of calls that fail. Which ones depends on the seed and the
                number of the call alone, not on threads.
            when: Before the call reached the store; during it, after ``moved`` bytes were sent (of
                an object or part that does not come about) or received; or after it took effect,
                when its answer is lost.
            moved: See ``when``; ConnectionLostError gets it as ``received``, and the version of
                the object that was read.
            where: Which keys (or prefixes) the fault is about; calls for others are not counted.
        """
        if when == "during" and verb not in ("put", "put_part", "get_range"):
            raise ValueError(f"{verb} moves no payload that could be cut short")
        with self._lock:
            self._made += 1
            name = f"{self._seed}/{self._made}/{verb}"
            self._faults.append(_Fault(verb, error, calls, probability, when, moved, where, name))

    def heal(self) -> None:
        """Forgets all faults; the counters stay."""
        with self._lock:
            self._faults.clear()

    def put(
        self, key: str, body: Body, *, progress: Progress | None = None, **options: Any
    ) -> ObjectInfo:
        def put() -> ObjectInfo:
            return self.inner.put(key, body, progress=progress, **options)

        return self._call("put", key, put, progress)

    def create_upload(self, key: str, part_size: int) -> Upload:
        return self._call("create_upload", key, lambda: self.inner.create_upload(key, part_size))

    def put_part(
        self, upload: Upload, *part: Any, progress: Progress | None = None, **options: Any
    ) -> Part:
        def put() -> Part:
            return self.inner.put_part(upload, *part, progress=progress, **options)

        return self._call("put_part", upload.key, put, progress)

    def complete_upload(self, upload: Upload, *parts: Any, **options: Any) -> ObjectInfo:
        def complete() -> ObjectInfo:
            return self.inner.complete_upload(upload, *parts, **options)

        return self._call("complete_upload", upload.key, complete)

    def copies_from(self, source: ObjectStore) -> bool:
        return self.inner.copies_from(_faultless(source))

    def copy(self, source: ObjectStore, found: ObjectInfo, key: str, **options: Any) -> ObjectInfo:
        inner = _faultless(source)
        return self._call("copy", key, lambda: self.inner.copy(inner, found, key, **options))

    def copy_part(self, source: ObjectStore, found: ObjectInfo, upload: Upload, *part: int) -> Part:
        inner = _faultless(source)
        return self._call(
            "copy_part", upload.key, lambda: self.inner.copy_part(inner, found, upload, *part)
        )

    def abort_upload(self, upload: Upload) -> None:
        self._call("abort_upload", upload.key, lambda: self.inner.abort_upload(upload))

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        def ask() -> list[Upload]:
            return self._call("list_uploads", prefix, lambda: [*self.inner.list_uploads(prefix)])

        return iter(retry(ask))

    def get(self, key: str, **options: Any) -> tuple[bytearray, ObjectInfo]:
        return self._call("get", key, lambda: self.inner.get(key, **options))

    def get_range(
        self, key: str, start: int, into: Sequence[memoryview], **options: Any
    ) -> ObjectInfo:
        def get(views: Sequence[memoryview]) -> ObjectInfo:
            return self.inner.get_range(key, start, views, **options)

        strike = self._struck("get_range", key)
        if strike is None:
            return get(into)
        version = None
        if strike.when == "after":
            get(into)
        elif strike.when == "during" and (views := _first(into, strike.fault.moved)):
            version = get(views).version
        error = self._failure(strike)
        if isinstance(error, ConnectionLostError):
            error.version = version
        raise error

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        return self._listed(prefix, lambda: self.inner.list(prefix), retry)

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        return self._listed(prefix, lambda: self.inner.list_level(prefix), retry)

    def _listed(self, prefix: str, listing: Callable[[], Iterator[T]], retry: Retry) -> Iterator[T]:
        return iter(retry(lambda: self._call("list", prefix, lambda: [*listing()])))

    def delete(self, key: str, *, if_version: str | None = None) -> None:
        self._call("delete", key, lambda: self.inner.delete(key, if_version=if_version))

    def interrupt(self, threads: Collection[int]) -> None:
        self.inner.interrupt(threads)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        return self.inner.moved(threads)

    def close(self) -> None:
        self.inner.close()

    def uri(self, key: str) -> str:
        return self.inner.uri(key)

    def _struck(self, verb: Verb, key: str) -> _Strike | None:
        with self._lock:
            self.calls[verb] += 1
            # every rule is asked, so that each counts all the calls that it is about
            strikes = [fault.strike(verb, key) for fault in self._faults]
        return next((strike for strike in strikes if strike is not None), None)

    def _failure(self, strike: _Strike) -> BaseException:
        with self._lock:
            self.failed[strike.fault.verb] += 1
        return strike.error()

    def _call(
        self,
        verb: Verb,
        key: str,
        call: Callable[[], T],
        progress: Progress | None = None,
    ) -> T:
        strike = self._struck(verb, key)
        if strike is None:
            return call()
        if strike.when == "after":
            call()
        elif strike.when == "during" and progress is not None:
            progress(strike.fault.moved)
        raise self._failure(strike)


def _faultless(store: ObjectStore) -> ObjectStore:
    return store.inner if isinstance(store, FaultyStore) else store


def _first(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """The views of the first ``count`` bytes."""
    taken: list[memoryview] = []
    for view in views:
        taken.append(view[: max(0, count)])
        count -= view.nbytes
    return [view for view in taken if view.nbytes]
