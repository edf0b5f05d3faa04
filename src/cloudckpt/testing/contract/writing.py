"""The contract of ``put``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.errors import (
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.testing.contract.data import (
    SEVERAL_STEPS,
    checksum,
    cut,
    put,
    some_bytes,
)
from cloudckpt.testing.contract.hooks import Hooks

__all__ = ["WritingContract"]

_THREADS = 8


class WritingContract(Hooks):
    """Objects that are written in one request."""

    @pytest.mark.parametrize("size", [0, 1, 1000, SEVERAL_STEPS])
    def test_put_writes_exactly_the_bytes_of_the_body(
        self, store: ObjectStore, prefix: str, size: int
    ) -> None:
        data = some_bytes(size)
        put(store, prefix + "object", data)
        assert self.get_directly(store, prefix + "object") == data

    def test_put_sends_the_views_of_the_body_one_after_the_other(
        self, store: ObjectStore, prefix: str
    ) -> None:
        data = some_bytes(SEVERAL_STEPS)
        views = cut(data, [0, 1, 0, 5000, 70_000, 2 * 1024 * 1024, 3])
        store.put(prefix + "object", views, checksum=checksum(store, data))
        assert self.get_directly(store, prefix + "object") == data

    def test_put_without_a_view_makes_an_empty_object(
        self, store: ObjectStore, prefix: str
    ) -> None:
        store.put(prefix + "object", [], checksum=0)
        assert self.get_directly(store, prefix + "object") == b""

    def test_put_tells_key_size_and_version(self, store: ObjectStore, prefix: str) -> None:
        info = put(store, prefix + "object", b"twelve bytes")
        assert (info.key, info.size) == (prefix + "object", 12)
        assert info == store.head(prefix + "object")

    def test_put_replaces_an_object_and_changes_its_version(
        self, store: ObjectStore, prefix: str
    ) -> None:
        first = put(store, prefix + "object", b"the first, which is longer")
        second = put(store, prefix + "object", b"the second")
        assert first.version != second.version
        assert self.get_directly(store, prefix + "object") == b"the second"
        assert store.head(prefix + "object") == second

    def test_put_if_absent_writes_when_there_is_nothing(
        self, store: ObjectStore, prefix: str
    ) -> None:
        info = put(store, prefix + "object", b"new", if_absent=True)
        assert info == store.head(prefix + "object")
        assert self.get_directly(store, prefix + "object") == b"new"

    def test_put_if_absent_leaves_an_object_that_is_there(
        self, store: ObjectStore, prefix: str
    ) -> None:
        self.put_directly(store, prefix + "object", b"old")
        with pytest.raises(PreconditionFailedError):
            put(store, prefix + "object", b"new", if_absent=True)
        assert self.get_directly(store, prefix + "object") == b"old"

    def test_put_if_absent_writes_again_after_a_delete(
        self, store: ObjectStore, prefix: str
    ) -> None:
        put(store, prefix + "object", b"old", if_absent=True)
        store.delete(prefix + "object")
        put(store, prefix + "object", b"new", if_absent=True)
        assert self.get_directly(store, prefix + "object") == b"new"

    def test_one_of_many_writers_that_put_if_absent_at_once_wins(
        self, store: ObjectStore, prefix: str
    ) -> None:
        if not self.atomic_conditions:
            pytest.skip("this emulator looks first and writes later")

        def attempt(number: int) -> bytes | None:
            try:
                put(store, prefix + "object", b"writer %d" % number, if_absent=True)
            except PreconditionFailedError:
                return None
            return b"writer %d" % number

        with ThreadPoolExecutor(_THREADS) as threads:
            written = [data for data in threads.map(attempt, range(4 * _THREADS)) if data]
        assert written == [self.get_directly(store, prefix + "object")]

    def test_put_if_version_replaces_that_version(self, store: ObjectStore, prefix: str) -> None:
        old = put(store, prefix + "object", b"old")
        new = put(store, prefix + "object", b"new", if_version=old.version)
        assert new.version != old.version
        assert self.get_directly(store, prefix + "object") == b"new"

    def test_put_if_version_leaves_another_version(self, store: ObjectStore, prefix: str) -> None:
        old = put(store, prefix + "object", b"old")
        self.put_directly(store, prefix + "object", b"of another writer")
        with pytest.raises(PreconditionFailedError):
            put(store, prefix + "object", b"new", if_version=old.version)
        assert self.get_directly(store, prefix + "object") == b"of another writer"

    def test_put_if_version_does_not_bring_a_deleted_object_back(
        self, store: ObjectStore, prefix: str
    ) -> None:
        old = put(store, prefix + "object", b"old")
        store.delete(prefix + "object")
        with pytest.raises(PreconditionFailedError):
            put(store, prefix + "object", b"new", if_version=old.version)
        with pytest.raises(ObjectNotFoundError):
            store.head(prefix + "object")
