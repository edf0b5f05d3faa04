"""The contract of objects that are written in one request, read, listed and deleted."""

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.errors import (
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from support.contract.data import SEVERAL_STEPS, Hooks, checksum, cut, put, some_bytes

_THREADS = 8


class WritingContract(Hooks):
    """Objects that are written in one request."""

    @pytest.mark.parametrize("size", [0, 1, 1000, SEVERAL_STEPS])
    def test_put_writes_exactly_the_bytes_of_the_body(self, store, prefix, size):
        data = some_bytes(size)
        info = put(store, prefix + "object", data)
        assert self.get_directly(store, prefix + "object") == data
        assert (info.key, info.size) == (prefix + "object", size)
        assert info == store.head(prefix + "object")

    def test_put_sends_the_views_of_the_body_one_after_the_other(self, store, prefix):
        data = some_bytes(SEVERAL_STEPS)
        views = cut(data, [0, 1, 0, 5000, 70_000, 2 * 1024 * 1024, 3])
        store.put(prefix + "object", views, checksum=checksum(store, data))
        assert self.get_directly(store, prefix + "object") == data

        store.put(prefix + "object", [], checksum=0)
        assert self.get_directly(store, prefix + "object") == b""

    def test_an_object_is_known_by_the_name_of_its_write_and_not_by_its_bytes(self, store, prefix):
        key = prefix + "object"
        info = put(store, key, b"data", attempt="0123456789abcdef")
        assert store.written(key, "0123456789abcdef") == (info if self.keeps_attempts else None)
        put(store, key, b"data", attempt="fedcba9876543210")
        assert store.written(key, "0123456789abcdef") is None
        assert store.written(prefix + "missing", "0123456789abcdef") is None

    def test_an_object_without_a_name_is_nobodys(self, store, prefix):
        put(store, prefix + "object", b"data")
        self.put_directly(store, prefix + "foreign", b"data")
        for name in ("object", "foreign"):
            assert store.head(prefix + name).attempt == ""
            assert store.written(prefix + name, "0123456789abcdef") is None
            assert store.written(prefix + name, "") is None

    def test_put_replaces_an_object_and_changes_its_version(self, store, prefix):
        first = put(store, prefix + "object", b"the first, which is longer")
        second = put(store, prefix + "object", b"the second")
        assert first.version != second.version
        assert self.get_directly(store, prefix + "object") == b"the second"
        assert store.head(prefix + "object") == second

    def test_put_if_absent_leaves_an_object_that_is_there(self, store, prefix):
        self.put_directly(store, prefix + "object", b"old")
        with pytest.raises(PreconditionFailedError):
            put(store, prefix + "object", b"new", if_version="")
        assert self.get_directly(store, prefix + "object") == b"old"

    def test_put_if_absent_writes_when_there_is_nothing_or_nothing_any_more(self, store, prefix):
        for data in (b"first", b"after a delete"):
            info = put(store, prefix + "object", data, if_version="")
            assert info == store.head(prefix + "object")
            assert self.get_directly(store, prefix + "object") == data
            store.delete(prefix + "object")

    def test_one_of_many_writers_that_put_if_absent_at_once_wins(self, store, prefix):
        def attempt(number):
            try:
                put(store, prefix + "object", b"writer %d" % number, if_version="")
            except PreconditionFailedError:
                return None
            return b"writer %d" % number

        with ThreadPoolExecutor(_THREADS) as threads:
            written = [data for data in threads.map(attempt, range(4 * _THREADS)) if data]
        assert written == [self.get_directly(store, prefix + "object")]

    def test_put_if_version_replaces_that_version_and_brings_nothing_back(self, store, prefix):
        key = prefix + "object"
        old = put(store, key, b"old")
        new = put(store, key, b"new", if_version=old.version)
        assert new.version != old.version
        with pytest.raises(PreconditionFailedError):
            put(store, key, b"late", if_version=old.version)
        assert self.get_directly(store, key) == b"new"
        store.delete(key)
        with pytest.raises(PreconditionFailedError):
            put(store, key, b"late", if_version=new.version)
        assert list(store.list(prefix)) == []


class ReadingContract(Hooks):
    """Objects that are read, listed and deleted."""

    @pytest.mark.parametrize("size", [0, 1, SEVERAL_STEPS])
    def test_get_reads_a_whole_object(self, store, prefix, size):
        data = some_bytes(size)
        self.put_directly(store, prefix + "object", data)
        found, info = store.get(prefix + "object", limit=size)
        assert bytes(found) == data
        assert info == store.head(prefix + "object")

    def test_what_is_larger_than_its_reader_takes_is_refused_before_it_is_read(self, store, prefix):
        key = prefix + "object"
        self.put_directly(store, key, bytes(SEVERAL_STEPS))
        tracemalloc.start()
        try:
            with pytest.raises(ObjectTooLargeError) as caught:
                store.get(key, limit=SEVERAL_STEPS - 1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert caught.value.uri == store.uri(key)
        assert peak < SEVERAL_STEPS / 2 or not self.memory_is_ours

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, 1), (0, SEVERAL_STEPS), (1, 1_500_000), (77_777, SEVERAL_STEPS), (-1, None)],
    )
    def test_get_range_reads_these_bytes_and_no_others(self, store, prefix, start, stop):
        data = some_bytes(SEVERAL_STEPS)
        self.put_directly(store, prefix + "object", data)
        start, stop, _ = slice(start, stop).indices(len(data))
        memory = bytearray(b"\xaa" * (stop - start + 2))
        info = store.get_range(prefix + "object", start, [memoryview(memory)[1:-1]])
        assert memory == b"\xaa" + data[start:stop] + b"\xaa"
        assert info == store.head(prefix + "object")
        assert info.size == len(data)

    @pytest.mark.parametrize("sizes", [[0, 3, 1, 0, 100_000, 2 * 1024 * 1024, 0], [2] * 3000])
    def test_get_range_fills_the_views_one_after_the_other(self, store, prefix, sizes):
        data = some_bytes(SEVERAL_STEPS)
        self.put_directly(store, prefix + "object", data)
        memory = bytearray(len(data) - 100)
        store.get_range(prefix + "object", 50, cut(memory, sizes))
        assert memory == data[50:-50]

    @pytest.mark.parametrize("start", [0, 5, 12, 1000])
    def test_get_range_refuses_what_the_object_does_not_have(self, store, prefix, start):
        self.put_directly(store, prefix + "object", b"twelve bytes")
        with pytest.raises(RangeNotSatisfiableError):
            store.get_range(prefix + "object", start, [memoryview(bytearray(13))])

    def test_get_range_accepts_the_version_that_is_there_and_refuses_another(self, store, prefix):
        info = put(store, prefix + "object", b"twelve bytes")
        memory = bytearray(5)
        found = store.get_range(prefix + "object", 7, [memoryview(memory)], if_version=info.version)
        assert (bytes(memory), found) == (b"bytes", info)
        self.put_directly(store, prefix + "object", b"other bytes!")
        with pytest.raises(PreconditionFailedError):
            store.get_range(prefix + "object", 7, [memoryview(memory)], if_version=info.version)

    @pytest.mark.parametrize("verb", ["get", "get_range", "head"])
    @pytest.mark.parametrize("name", ["missing", "folder", "folder/other", "folder/object/below"])
    def test_reading_what_is_not_there_says_so_and_where(self, store, prefix, verb, name):
        self.put_directly(store, prefix + "folder/object", b"data")
        more = [0, [memoryview(bytearray(1))]] if verb == "get_range" else []
        with pytest.raises(ObjectNotFoundError) as caught:
            getattr(store, verb)(prefix + name, *more)
        assert caught.value.uri == store.uri(prefix + name)

    def test_list_finds_keys_by_their_beginning_in_the_order_of_keys(self, store, prefix):
        names = ["a", "a-b", "a.b", "a/b", "a/b-", "a/b/c", "a/c", "a0", "aé", "b", "A"]
        for name in names:
            self.put_directly(store, f"{prefix}in-{name}/x", name.encode())
        self.put_directly(store, prefix + "out", b"not looked for")
        keys = sorted(f"{prefix}in-{name}/x" for name in names)
        for beginning in ("in-", "in-a/b", "in-A/x"):  # also amid a name, and a whole key
            found = [info.key for info in store.list(prefix + beginning)]
            assert found == [key for key in keys if key.startswith(prefix + beginning)]

    def test_list_tells_sizes_versions_and_when_objects_were_written(self, store, prefix):
        infos = [put(store, f"{prefix}{n}", b"x" * n) for n in range(3)]
        listed = list(store.list(prefix))
        assert listed == infos
        for written in (info.modified for info in listed):
            assert written is not None
            assert abs(written - time.time()) < 86_400  # the store has a clock of its own

        assert list(store.list(prefix + "nothing/")) == []
        assert list(store.list_level(prefix + "nothing/")) == []

    def test_one_level_has_its_objects_and_each_folder_once(self, store, prefix):
        for name in ("file", "b/x", "a/1", "a/2", "a/deep/3", "a b/x", "é+%/x", "a-file"):
            self.put_directly(store, f"{prefix}run/{name}", b"")
        self.put_directly(store, prefix + "running/x", b"")
        objects = {info.key: info for info in store.list(prefix)}
        whole = list(store.list_level(prefix + "run/"))
        folders = [found for found in whole if isinstance(found, str)]
        assert sorted(folders) == ["a", "a b", "b", "é+%"]
        files = [objects[f"{prefix}run/{name}"] for name in ("a-file", "file")]
        assert [found for found in whole if not isinstance(found, str)] == files
        inner = [*(objects[f"{prefix}run/a/{name}"] for name in "12"), "deep"]
        assert list(store.list_level(prefix + "run/a/")) == inner
        assert list(store.list_level(prefix + "run/a/deep/")) == [objects[f"{prefix}run/a/deep/3"]]

    def test_many_objects_are_listed(self, store, prefix):
        keys = [f"{prefix}{n:05}" for n in range(self.object_count)]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda key: self.put_directly(store, key, b""), keys))
        assert [info.key for info in store.list(prefix)] == keys

    def test_delete_takes_what_is_there_and_minds_nothing_else(self, store, prefix):
        for name in ("a", "b", "c"):
            self.put_directly(store, prefix + name, b"")
        for name in ("a", "missing", "c", "a", "no/folder"):
            store.delete(prefix + name)
        assert [info.key for info in store.list(prefix)] == [prefix + "b"]

    def test_delete_on_a_condition_takes_that_version_only(self, store, prefix):
        key = prefix + "object"
        old = put(store, key, b"old")
        new = put(store, key, b"new one")
        if self.honours_conditional_deletes:
            with pytest.raises(PreconditionFailedError) as caught:
                store.delete(key, if_version=old.version)
            assert caught.value.uri == store.uri(key)
            assert store.head(key) == new
        store.delete(key, if_version=new.version)
        with pytest.raises(ObjectNotFoundError):
            store.head(key)
        store.delete(key, if_version=new.version)
