"""A store that fails when it is told to, for tests of what happens then."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cloudckpt.errors import ConnectionLostError
from cloudckpt.stores.base import CopySource, ObjectInfo, ObjectStore, Progress, Retry, Upload, once
from cloudckpt.stores.capabilities import Capabilities

T = TypeVar("T")

When = Literal["before", "during", "after"]
"""``before``: nothing happened. ``during``: some bytes moved. ``after``: the answer was lost."""


@dataclass
class _Fault:
    """A rule, and how many calls it has looked at."""

    verb: str
    make: Callable[[str], BaseException]
    calls: Collection[int] | None
    probability: float
    when: When
    moved: int
    where: Callable[[str], bool]
    name: str
    seen: int = 0

    def strikes(self, verb: str, key: str) -> int:
        """The number of this call if it fails, else 0; to be asked exactly once for each call."""
        if verb != self.verb or not self.where(key):
            return 0
        self.seen += 1
        if self.calls is not None:
            fails = self.seen in self.calls
        else:
            # drawn from the number of the call, so that threads can't change which ones fail
            fails = random.Random(f"{self.name}/{self.seen}").random() < self.probability
        return self.seen if fails else 0

    def error(self, number: int) -> BaseException:
        error = self.make(f"injected: {self.when} {self.verb} number {number}")
        if isinstance(error, ConnectionLostError) and self.when == "during":
            error.received = self.moved
        return error


def _passing(verb: str) -> Any:
    """A method that passes calls on, and makes some of them fail.

    Its first argument is a key, an upload, or the object that is copied.
    """

    def method(self: FaultyStore, about: Any, *rest: Any, **options: Any) -> Any:
        of = rest[0] if isinstance(about, CopySource) else about
        if isinstance(about, CopySource) and isinstance(about.store, FaultyStore):
            about = CopySource(about.store.inner, about.info)
        key = of.key if isinstance(of, Upload) else of
        call = getattr(self.inner, verb)
        return self._call(verb, key, lambda: call(about, *rest, **options), options.get("progress"))

    return method


class FaultyStore(ObjectStore):
    """Passes every call on to another store and makes chosen ones fail.

    >>> from cloudckpt.errors import ConnectionLostError, ThrottledError
    >>> from support.memory_store import MemoryStore
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
        verb: str,
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
            verb: The method of :class:`~cloudckpt.stores.base.ObjectStore`.
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

    put, get, head, delete = map(_passing, ("put", "get", "head", "delete"))
    create_upload, put_part = _passing("create_upload"), _passing("put_part")
    complete_upload, abort_upload = _passing("complete_upload"), _passing("abort_upload")
    copy, copy_part = _passing("copy"), _passing("copy_part")

    def copies_from(self, source: ObjectStore) -> bool:
        return self.inner.copies_from(getattr(source, "inner", source))

    def get_range(
        self, key: str, start: int, into: Sequence[memoryview], **options: Any
    ) -> ObjectInfo:
        def get(views: Sequence[memoryview]) -> ObjectInfo:
            return self.inner.get_range(key, start, views, **options)

        fault, number = self._struck("get_range", key)
        if fault is None:
            return get(into)
        version = None
        if fault.when == "after":
            get(into)
        elif fault.when == "during" and (views := _first(into, fault.moved)):
            version = get(views).version
        error = self._failure(fault, number)
        if isinstance(error, ConnectionLostError):
            error.version = version
        raise error

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        return self._listed("list_uploads", prefix, self.inner.list_uploads, retry)

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        return self._listed("list", prefix, self.inner.list, retry)

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        return self._listed("list", prefix, self.inner.list_level, retry)

    def _listed(
        self, verb: str, prefix: str, listing: Callable[[str], Iterator[T]], retry: Retry
    ) -> Iterator[T]:
        return iter(retry(lambda: self._call(verb, prefix, lambda: [*listing(prefix)])))

    def interrupt(self, threads: Collection[int]) -> None:
        self.inner.interrupt(threads)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        return self.inner.moved(threads)

    def close(self) -> None:
        self.inner.close()

    def uri(self, key: str) -> str:
        return self.inner.uri(key)

    def _struck(self, verb: str, key: str) -> tuple[_Fault | None, int]:
        """The fault that strikes a call, and the number of the call."""
        with self._lock:
            self.calls[verb] += 1
            # every rule is asked, so that each counts all the calls that it is about
            asked = [(fault, fault.strikes(verb, key)) for fault in self._faults]
        return next(((fault, number) for fault, number in asked if number), (None, 0))

    def _failure(self, fault: _Fault, number: int) -> BaseException:
        with self._lock:
            self.failed[fault.verb] += 1
        return fault.error(number)

    def _call(
        self, verb: str, key: str, call: Callable[[], T], progress: Progress | None = None
    ) -> T:
        fault, number = self._struck(verb, key)
        if fault is None:
            return call()
        if fault.when == "after":
            call()
        elif fault.when == "during" and progress is not None:
            progress(fault.moved)
        raise self._failure(fault, number)


def _first(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """The views of the first ``count`` bytes."""
    taken: list[memoryview] = []
    for view in views:
        taken.append(view[: max(0, count)])
        count -= view.nbytes
    return [view for view in taken if view.nbytes]
