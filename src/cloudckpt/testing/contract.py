"""The contract of a store, as a class of tests that every store passes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.checksum import crc32c
from cloudckpt.errors import (
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    StoreError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Part, Progress, Upload

__all__ = ["StoreContract"]

_SMALLEST_PART = 64 * 1024
_SEVERAL_STEPS = 9 * 1024 * 1024 + 17  # bytes that no store moves in one go
_THREADS = 8


class _StopError(Exception):
    """What a progress callback raises."""


class StoreContract:
    """What :class:`~cloudckpt.stores.base.ObjectStore` promises, verb by verb.

    Subclass it in a test module under a name that pytest collects, provide the fixture ``store``,
    and the two hooks that put and read bytes *around* the store under test, so that a store which
    reads back its own mistakes is found out::

        class TestMyStore(StoreContract):
            @pytest.fixture
            def store(self):
                store = MyStore("bucket")
                yield store
                store.close()

            def put_directly(self, store, key, data):
                vendor_sdk.upload("bucket", key, data)

            def get_directly(self, store, key):
                return vendor_sdk.download("bucket", key)

    Each test needs an empty place beneath ``prefix``. A store must take parts of
    ``capabilities.min_part_size`` bytes, or of 64 KiB if that is more. For failures that show what
    was compared, call ``pytest.register_assert_rewrite("cloudckpt.testing.contract")`` in a
    ``conftest.py``.

    Attributes:
        object_count: How many objects the tests of listing and deleting make. Choose more than the
            store lists or deletes in one request (1,000 for S3).
        atomic_conditions: Whether of several ``put`` with ``if_absent`` at the same moment only one
            may succeed. Only for an emulator that can't do what the real store does.
    """

    object_count = 1100
    atomic_conditions = True

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        """The store under test."""
        raise NotImplementedError("a subclass of StoreContract provides the fixture 'store'")

    @pytest.fixture
    def prefix(self) -> str:
        """What all keys of a test begin with; an absolute path for a file system."""
        return "contract/"

    def put_directly(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Creates an object without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'put_directly'")

    def get_directly(self, store: ObjectStore, key: str) -> bytes:
        """The bytes of an object that exists, without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'get_directly'")

    # put

    @pytest.mark.parametrize("size", [0, 1, 1000, _SEVERAL_STEPS])
    def test_put_writes_exactly_the_bytes_of_the_body(
        self, store: ObjectStore, prefix: str, size: int
    ) -> None:
        data = some_bytes(size)
        put(store, prefix + "object", data)
        assert self.get_directly(store, prefix + "object") == data

    def test_put_sends_the_views_of_the_body_one_after_the_other(
        self, store: ObjectStore, prefix: str
    ) -> None:
        data = some_bytes(_SEVERAL_STEPS)
        views = cut(data, [0, 1, 0, 5000, 70_000, 2 * 1024 * 1024, 3])
        store.put(prefix + "object", views, crc32c=crc32c(data))
        assert self.get_directly(store, prefix + "object") == data

    def test_put_without_a_view_makes_an_empty_object(
        self, store: ObjectStore, prefix: str
    ) -> None:
        store.put(prefix + "object", [], crc32c=0)
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
        store.delete([prefix + "object"])
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
        store.delete([prefix + "object"])
        with pytest.raises(PreconditionFailedError):
            put(store, prefix + "object", b"new", if_version=old.version)
        with pytest.raises(ObjectNotFoundError):
            store.head(prefix + "object")

    # uploads in parts

    def test_parts_sent_in_any_order_make_the_object(self, store: ObjectStore, prefix: str) -> None:
        data = some_bytes(3 * part_size(store) + 1000)
        upload = store.create_upload(prefix + "object", part_size(store))
        pieces = parts_of(store, data)
        sent = [put_part(store, upload, n, pieces[n - 1]) for n in (3, 1, 4, 2)]
        info = store.complete_upload(upload, in_order(sent))
        assert self.get_directly(store, prefix + "object") == data
        assert (info.key, info.size) == (prefix + "object", len(data))
        assert info == store.head(prefix + "object")

    def test_put_part_tells_number_size_and_checksum(self, store: ObjectStore, prefix: str) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"twelve bytes")
        store.abort_upload(upload)
        assert (part.number, part.size, part.crc32c) == (1, 12, crc32c(b"twelve bytes"))

    def test_a_part_is_sent_from_many_views(self, store: ObjectStore, prefix: str) -> None:
        data = some_bytes(part_size(store))
        upload = store.create_upload(prefix + "object", part_size(store))
        views = cut(data, [1, 0, 17, 30_000])
        part = store.put_part(upload, 1, views, crc32c=crc32c(data))
        store.complete_upload(upload, [part])
        assert self.get_directly(store, prefix + "object") == data

    def test_a_part_that_is_sent_again_replaces_the_first(
        self, store: ObjectStore, prefix: str
    ) -> None:
        size = part_size(store)
        first, wrong, last = some_bytes(size, 1), some_bytes(size, 2), some_bytes(100, 3)
        upload = store.create_upload(prefix + "object", size)
        put_part(store, upload, 1, wrong)
        end = put_part(store, upload, 2, last)
        begin = put_part(store, upload, 1, first)
        store.complete_upload(upload, [begin, end])
        assert self.get_directly(store, prefix + "object") == first + last

    def test_a_last_part_that_is_sent_again_may_be_shorter(
        self, store: ObjectStore, prefix: str
    ) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        put_part(store, upload, 1, b"longer than the second try")
        part = put_part(store, upload, 1, b"short")
        info = store.complete_upload(upload, [part])
        assert info.size == 5
        assert self.get_directly(store, prefix + "object") == b"short"

    def test_an_upload_is_invisible_until_it_is_complete(
        self, store: ObjectStore, prefix: str
    ) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        assert list(store.list(prefix)) == []
        with pytest.raises(ObjectNotFoundError):
            store.head(prefix + "object")
        store.complete_upload(upload, [part])
        assert [info.key for info in store.list(prefix)] == [prefix + "object"]

    def test_an_upload_leaves_the_object_that_it_will_replace(
        self, store: ObjectStore, prefix: str
    ) -> None:
        old = put(store, prefix + "object", b"old")
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"new")
        assert store.head(prefix + "object") == old
        info = store.complete_upload(upload, [part])
        assert info.version != old.version
        assert self.get_directly(store, prefix + "object") == b"new"

    def test_two_uploads_of_one_key_do_not_mix(self, store: ObjectStore, prefix: str) -> None:
        uploads = [store.create_upload(prefix + "object", part_size(store)) for _ in range(2)]
        assert uploads[0].id != uploads[1].id
        parts = [
            put_part(store, upload, 1, text)
            for upload, text in zip(uploads, (b"first", b"second"), strict=True)
        ]
        store.complete_upload(uploads[1], [parts[1]])
        store.complete_upload(uploads[0], [parts[0]])
        assert self.get_directly(store, prefix + "object") == b"first"

    def test_an_upload_is_listed_until_it_is_complete(
        self, store: ObjectStore, prefix: str
    ) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        assert [(found.key, found.id) for found in store.list_uploads(prefix)] == [
            (upload.key, upload.id)
        ]
        store.complete_upload(upload, [part])
        assert list(store.list_uploads(prefix)) == []

    def test_uploads_are_listed_by_the_beginning_of_their_keys(
        self, store: ObjectStore, prefix: str
    ) -> None:
        wanted = [store.create_upload(prefix + "run/step-1", part_size(store)) for _ in range(2)]
        wanted.append(store.create_upload(prefix + "run/step-10", part_size(store)))
        store.create_upload(prefix + "run/other", part_size(store))
        found = list(store.list_uploads(prefix + "run/step-1"))
        assert sorted((upload.key, upload.id) for upload in found) == sorted(
            (upload.key, upload.id) for upload in wanted
        )

    def test_an_upload_that_was_listed_can_be_aborted(
        self, store: ObjectStore, prefix: str
    ) -> None:
        put_part(store, store.create_upload(prefix + "object", part_size(store)), 1, b"orphan")
        for upload in store.list_uploads(prefix):
            store.abort_upload(upload)
        assert list(store.list_uploads(prefix)) == []
        assert list(store.list(prefix)) == []

    def test_an_aborted_upload_is_gone(self, store: ObjectStore, prefix: str) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        store.abort_upload(upload)
        assert list(store.list_uploads(prefix)) == []
        with pytest.raises(StoreError):
            store.complete_upload(upload, [part])
        with pytest.raises(ObjectNotFoundError):
            store.head(prefix + "object")

    def test_no_part_is_taken_after_an_abort(self, store: ObjectStore, prefix: str) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        store.abort_upload(upload)
        with pytest.raises(StoreError):
            put_part(store, upload, 1, b"too late")
        assert list(store.list_uploads(prefix)) == []

    def test_an_upload_can_be_aborted_again(self, store: ObjectStore, prefix: str) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        store.abort_upload(upload)
        store.abort_upload(upload)
        assert list(store.list_uploads(prefix)) == []

    def test_an_abort_after_completion_leaves_the_object(
        self, store: ObjectStore, prefix: str
    ) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        store.complete_upload(upload, [put_part(store, upload, 1, b"data")])
        store.abort_upload(upload)
        assert self.get_directly(store, prefix + "object") == b"data"

    def test_completing_again_leaves_the_object(self, store: ObjectStore, prefix: str) -> None:
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        info = store.complete_upload(upload, [part])
        try:
            again = store.complete_upload(upload, [part])
        except ObjectNotFoundError:
            again = info  # a store may have forgotten the upload, or remember its result
        assert again == info == store.head(prefix + "object")

    # get and get_range

    @pytest.mark.parametrize("size", [0, 1, _SEVERAL_STEPS])
    def test_get_reads_a_whole_object(self, store: ObjectStore, prefix: str, size: int) -> None:
        data = some_bytes(size)
        self.put_directly(store, prefix + "object", data)
        found, info = store.get(prefix + "object")
        assert bytes(found) == data
        assert info == store.head(prefix + "object")

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, 1), (0, _SEVERAL_STEPS), (1, 1_500_000), (77_777, _SEVERAL_STEPS), (-1, None)],
    )
    def test_get_range_reads_these_bytes_and_no_others(
        self, store: ObjectStore, prefix: str, start: int, stop: int | None
    ) -> None:
        data = some_bytes(_SEVERAL_STEPS)
        self.put_directly(store, prefix + "object", data)
        start, stop, _ = slice(start, stop).indices(len(data))
        memory = bytearray(b"\xaa" * (stop - start + 2))
        info = store.get_range(prefix + "object", start, [memoryview(memory)[1:-1]])
        assert memory == b"\xaa" + data[start:stop] + b"\xaa"
        assert info == store.head(prefix + "object")
        assert info.size == len(data)

    def test_get_range_fills_the_views_one_after_the_other(
        self, store: ObjectStore, prefix: str
    ) -> None:
        data = some_bytes(_SEVERAL_STEPS)
        self.put_directly(store, prefix + "object", data)
        memory = bytearray(len(data) - 100)
        views = cut(memory, [0, 3, 1, 0, 100_000, 2 * 1024 * 1024, 0])
        store.get_range(prefix + "object", 50, views)
        assert memory == data[50:-50]

    def test_get_range_fills_thousands_of_views(self, store: ObjectStore, prefix: str) -> None:
        data = some_bytes(6000)
        self.put_directly(store, prefix + "object", data)
        memory = bytearray(len(data))
        store.get_range(prefix + "object", 0, cut(memory, [2] * 3000))
        assert memory == data

    @pytest.mark.parametrize("start", [0, 5, 12, 1000])
    def test_get_range_refuses_what_the_object_does_not_have(
        self, store: ObjectStore, prefix: str, start: int
    ) -> None:
        self.put_directly(store, prefix + "object", b"twelve bytes")
        with pytest.raises(RangeNotSatisfiableError):
            store.get_range(prefix + "object", start, [memoryview(bytearray(13))])

    def test_get_range_accepts_the_version_that_is_there(
        self, store: ObjectStore, prefix: str
    ) -> None:
        info = put(store, prefix + "object", b"twelve bytes")
        memory = bytearray(5)
        found = store.get_range(prefix + "object", 7, [memoryview(memory)], if_version=info.version)
        assert (bytes(memory), found) == (b"bytes", info)

    def test_get_range_refuses_another_version(self, store: ObjectStore, prefix: str) -> None:
        old = put(store, prefix + "object", b"old")
        self.put_directly(store, prefix + "object", b"replaced")
        with pytest.raises(PreconditionFailedError):
            store.get_range(
                prefix + "object", 0, [memoryview(bytearray(3))], if_version=old.version
            )

    # head, list and delete

    def test_head_tells_the_size(self, store: ObjectStore, prefix: str) -> None:
        self.put_directly(store, prefix + "object", b"twelve bytes")
        self.put_directly(store, prefix + "empty", b"")
        assert store.head(prefix + "object").size == 12
        assert store.head(prefix + "empty").size == 0

    @pytest.mark.parametrize("verb", ["get", "get_range", "head"])
    @pytest.mark.parametrize("name", ["missing", "folder", "folder/other", "folder/object/below"])
    def test_reading_what_is_not_there_says_so_and_where(
        self, store: ObjectStore, prefix: str, verb: str, name: str
    ) -> None:
        self.put_directly(store, prefix + "folder/object", b"data")
        key = prefix + name

        def read() -> None:
            if verb == "get":
                store.get(key)
            elif verb == "get_range":
                store.get_range(key, 0, [memoryview(bytearray(1))])
            else:
                store.head(key)

        with pytest.raises(ObjectNotFoundError) as caught:
            read()
        assert caught.value.uri == store.uri(key)
        assert store.uri(key) in str(caught.value)

    def test_list_finds_keys_by_their_beginning_in_the_order_of_keys(
        self, store: ObjectStore, prefix: str
    ) -> None:
        names = ["a", "a-b", "a.b", "a/b", "a/b-", "a/b/c", "a/c", "a0", "aé", "b", "A"]
        for name in names:
            self.put_directly(store, f"{prefix}in-{name}/x", name.encode())
        self.put_directly(store, prefix + "out", b"not looked for")
        found = [info.key for info in store.list(prefix + "in-")]
        assert found == sorted(f"{prefix}in-{name}/x" for name in names)

    def test_list_takes_a_prefix_that_ends_inside_of_a_name(
        self, store: ObjectStore, prefix: str
    ) -> None:
        for name in ("run/step-1", "run/step-10/a", "run/step-2", "run/other"):
            self.put_directly(store, prefix + name, b"")
        assert [info.key for info in store.list(prefix + "run/step-1")] == [
            prefix + "run/step-1",
            prefix + "run/step-10/a",
        ]

    def test_list_tells_sizes_and_versions(self, store: ObjectStore, prefix: str) -> None:
        infos = [put(store, f"{prefix}{n}", b"x" * n) for n in range(3)]
        assert list(store.list(prefix)) == infos

    def test_list_of_nothing_is_empty(self, store: ObjectStore, prefix: str) -> None:
        assert list(store.list(prefix + "nothing/")) == []

    def test_many_objects_are_listed_and_deleted(self, store: ObjectStore, prefix: str) -> None:
        keys = [f"{prefix}{n:05}" for n in range(self.object_count)]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda key: self.put_directly(store, key, b""), keys))
        assert [info.key for info in store.list(prefix)] == keys
        store.delete(keys[:-1])
        assert [info.key for info in store.list(prefix)] == keys[-1:]

    def test_delete_takes_what_is_there_and_minds_nothing_else(
        self, store: ObjectStore, prefix: str
    ) -> None:
        for name in ("a", "b", "c"):
            self.put_directly(store, prefix + name, b"")
        store.delete(prefix + name for name in ("a", "missing", "c", "a", "no/folder"))
        store.delete([prefix + "a"])
        store.delete([])
        assert [info.key for info in store.list(prefix)] == [prefix + "b"]

    # keys, progress, threads

    @pytest.mark.parametrize(
        "name",
        [
            "with spaces in it",
            "a+b",
            "100%",
            "a%2Fb%20c",
            "a&b=c;d,e",
            "(a)'b'!*~$@:",
            "größe/ñandú",
            "重み",
            "\U0001f525",
            "#1",
            "a?b",
            ".hidden",
            "double..dots",
        ],
    )
    def test_a_key_is_taken_as_it_is(self, store: ObjectStore, prefix: str, name: str) -> None:
        key = prefix + name
        self.put_directly(store, key, b"put around the store")
        assert bytes(store.get(key)[0]) == b"put around the store"
        put(store, key, b"put")
        assert self.get_directly(store, key) == b"put"
        upload = store.create_upload(key, part_size(store))
        assert [found.key for found in store.list_uploads(prefix)] == [key]
        info = store.complete_upload(upload, [put_part(store, upload, 1, b"in parts")])
        assert self.get_directly(store, key) == b"in parts"
        assert store.head(key) == info
        assert [info.key for info in store.list(prefix)] == [key]
        store.delete([key])
        assert list(store.list(prefix)) == []

    @pytest.mark.parametrize("verb", ["put", "put_part", "get_range"])
    def test_progress_adds_up_to_the_payload(
        self, store: ObjectStore, prefix: str, verb: str
    ) -> None:
        moved: list[int] = []
        size = self._move(store, prefix, verb, moved.append)
        assert sum(moved) == size
        assert min(moved) >= 0

    @pytest.mark.parametrize("verb", ["put", "put_part", "get_range"])
    def test_an_error_of_progress_stops_the_transfer_and_comes_out(
        self, store: ObjectStore, prefix: str, verb: str
    ) -> None:
        def stop(count: int) -> None:
            raise _StopError

        with pytest.raises(_StopError):
            self._move(store, prefix, verb, stop)
        assert [info.key for info in store.list(prefix)] == (
            [prefix + "object"] if verb == "get_range" else []
        )

    def _move(self, store: ObjectStore, prefix: str, verb: str, progress: Progress) -> int:
        """Moves some bytes by ``verb``; returns how many."""
        data, key = some_bytes(_SEVERAL_STEPS), prefix + "object"
        views = cut(data, [10, 20, 1_000_000])
        if verb == "put":
            store.put(key, views, crc32c=crc32c(data), progress=progress)
        elif verb == "put_part":
            upload = store.create_upload(key, max(part_size(store), len(data)))
            store.put_part(upload, 1, views, crc32c=crc32c(data), progress=progress)
        else:
            self.put_directly(store, key, data)
            store.get_range(
                key, 0, cut(bytearray(len(data)), [10, 20, 1_000_000]), progress=progress
            )
        return len(data)

    def test_threads_do_not_disturb_each_other(self, store: ObjectStore, prefix: str) -> None:
        def work(number: int) -> bool:
            key, data = f"{prefix}{number}", some_bytes(300_000 + number, number)
            put(store, key, data)
            memory = bytearray(len(data) - 1000)
            store.get_range(key, 1000, [memoryview(memory)])
            upload = store.create_upload(key, part_size(store))
            store.complete_upload(upload, [put_part(store, upload, 1, data[::-1])])
            whole, _ = store.get(key)
            return memory == data[1000:] and whole == data[::-1]

        with ThreadPoolExecutor(_THREADS) as threads:
            assert all(threads.map(work, range(3 * _THREADS)))
        assert len(list(store.list(prefix))) == 3 * _THREADS

    def test_uri_begins_with_the_root(self, store: ObjectStore, prefix: str) -> None:
        assert store.uri(prefix + "object").startswith(store.root)


def some_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes without a pattern, the same in each run."""
    return random.Random(seed).randbytes(size)


def cut(data: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Views of ``data`` of these sizes, and one of the rest."""
    views, rest = [], memoryview(data)
    for size in sizes:
        views.append(rest[:size])
        rest = rest[size:]
    return [*views, rest]


def put(
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    if_absent: bool = False,
    if_version: str | None = None,
) -> ObjectInfo:
    """``store.put`` of plain bytes."""
    body = [memoryview(data)]
    return store.put(key, body, crc32c=crc32c(data), if_absent=if_absent, if_version=if_version)


def put_part(store: ObjectStore, upload: Upload, number: int, data: bytes) -> Part:
    """``store.put_part`` of plain bytes."""
    return store.put_part(upload, number, [memoryview(data)], crc32c=crc32c(data))


def part_size(store: ObjectStore) -> int:
    """Bytes of a part that the store accepts in the middle of an upload."""
    return max(store.capabilities.min_part_size, _SMALLEST_PART)


def parts_of(store: ObjectStore, data: bytes) -> list[bytes]:
    """``data`` in parts."""
    size = part_size(store)
    return [data[start : start + size] for start in range(0, len(data), size)]


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Parts by their numbers."""
    return sorted(parts, key=lambda part: part.number)
