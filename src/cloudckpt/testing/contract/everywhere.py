"""What holds for all verbs: keys, progress, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.stores.base import ObjectStore, Progress
from cloudckpt.testing.contract.data import (
    SEVERAL_STEPS,
    checksum,
    cut,
    part_size,
    put,
    put_part,
    some_bytes,
)
from cloudckpt.testing.contract.hooks import Hooks

__all__ = ["CommonContract"]

_THREADS = 8


class _StopError(Exception):
    """What a progress callback raises."""


class CommonContract(Hooks):
    """Keys, progress and threads."""

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
        store.delete(key)
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
        data, key = some_bytes(SEVERAL_STEPS), prefix + "object"
        views = cut(data, [10, 20, 1_000_000])
        if verb == "put":
            store.put(key, views, checksum=checksum(store, data), progress=progress)
        elif verb == "put_part":
            upload = store.create_upload(key, max(part_size(store), len(data)))
            store.put_part(upload, 1, views, checksum=checksum(store, data), progress=progress)
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
