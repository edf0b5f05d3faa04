"""The contract of uploads in parts, and of what holds for all verbs: keys, progress, threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.errors import ObjectNotFoundError, StoreError
from support.contract.data import (
    SEVERAL_STEPS,
    Hooks,
    checksum,
    cut,
    part_size,
    parts_of,
    put,
    put_part,
    some_bytes,
)

_THREADS = 8


class UploadContract(Hooks):
    """Objects that are sent in parts."""

    def test_parts_sent_in_any_order_make_the_object(self, store, prefix):
        data = some_bytes(3 * part_size(store) + 1000)
        upload = store.create_upload(prefix + "object", part_size(store))
        pieces = parts_of(store, data)
        sent = {}
        for n in (3, 1, 4, 2):
            views = cut(pieces[n - 1], [1, 0, 17, 300])
            sent[n] = store.put_part(upload, n, views, checksum=checksum(store, pieces[n - 1]))
        parts = [sent[n] for n in (1, 2, 3, 4)]
        info = store.complete_upload(upload, parts)
        assert self.get_directly(store, prefix + "object") == data
        assert (info.key, info.size) == (prefix + "object", len(data))
        assert info == store.head(prefix + "object")
        told = [(part.number, part.size, part.checksum) for part in parts]
        assert told == [(n, len(raw), checksum(store, raw)) for n, raw in enumerate(pieces, 1)]

    def test_an_object_is_known_by_the_name_of_its_upload(self, store, prefix):
        key = prefix + "object"
        infos, uploads = [], []
        for _ in range(2):
            uploads.append(store.create_upload(key, part_size(store)))
            part = put_part(store, uploads[-1], 1, b"the same bytes")
            infos.append(store.complete_upload(uploads[-1], [part]))
        assert store.written(key, uploads[0].attempt) is None
        found = store.written(key, uploads[1].attempt)
        assert found == (infos[1] if self.keeps_attempts else None)

    def test_a_part_that_is_sent_again_replaces_the_first_and_the_last_may_be_shorter(
        self, store, prefix
    ):
        size = part_size(store)
        first, wrong, last = some_bytes(size, 1), some_bytes(size, 2), some_bytes(100, 3)
        upload = store.create_upload(prefix + "object", size)
        put_part(store, upload, 1, wrong)
        put_part(store, upload, 2, some_bytes(200))
        end = put_part(store, upload, 2, last)
        begin = put_part(store, upload, 1, first)
        info = store.complete_upload(upload, [begin, end])
        assert info.size == size + 100
        assert self.get_directly(store, prefix + "object") == first + last

    def test_an_upload_is_listed_and_the_object_is_not_until_it_is_complete(self, store, prefix):
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        assert list(store.list(prefix)) == []
        with pytest.raises(ObjectNotFoundError):
            store.head(prefix + "object")
        open_ones = [(found.key, found.id) for found in store.list_uploads(prefix)]
        assert open_ones == [(upload.key, upload.id)]
        store.complete_upload(upload, [part])
        assert [info.key for info in store.list(prefix)] == [prefix + "object"]
        assert list(store.list_uploads(prefix)) == []

    def test_an_upload_leaves_the_object_that_it_will_replace(self, store, prefix):
        old = put(store, prefix + "object", b"old")
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"new")
        assert store.head(prefix + "object") == old
        info = store.complete_upload(upload, [part])
        assert info.version != old.version
        assert self.get_directly(store, prefix + "object") == b"new"

    def test_two_uploads_of_one_key_do_not_mix(self, store, prefix):
        uploads = [store.create_upload(prefix + "object", part_size(store)) for _ in range(2)]
        assert uploads[0].id != uploads[1].id
        parts = [
            put_part(store, upload, 1, text)
            for upload, text in zip(uploads, (b"first", b"second"), strict=True)
        ]
        store.complete_upload(uploads[1], [parts[1]])
        store.complete_upload(uploads[0], [parts[0]])
        assert self.get_directly(store, prefix + "object") == b"first"

    def test_uploads_are_listed_by_the_beginning_of_their_keys(self, store, prefix):
        wanted = [store.create_upload(prefix + "run/step-1", part_size(store)) for _ in range(2)]
        wanted.append(store.create_upload(prefix + "run/step-10", part_size(store)))
        store.create_upload(prefix + "run/other", part_size(store))
        found = store.list_uploads(prefix + "run/step-1")
        assert {(one.key, one.id) for one in found} == {(one.key, one.id) for one in wanted}

    def test_an_upload_that_was_listed_can_be_aborted_and_is_gone(self, store, prefix):
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"orphan")
        for found in [*store.list_uploads(prefix), upload]:  # also again
            store.abort_upload(found)
        assert list(store.list_uploads(prefix)) == []
        with pytest.raises(StoreError):
            store.complete_upload(upload, [part])
        with pytest.raises(StoreError):
            put_part(store, upload, 2, b"too late")
        assert [*store.list(prefix), *store.list_uploads(prefix)] == []

    def test_completing_again_and_a_late_abort_leave_the_object(self, store, prefix):
        upload = store.create_upload(prefix + "object", part_size(store))
        part = put_part(store, upload, 1, b"data")
        info = store.complete_upload(upload, [part])
        try:
            again = store.complete_upload(upload, [part])
        except ObjectNotFoundError:
            again = info  # a store may have forgotten the upload, or remember its result
        assert again == info == store.head(prefix + "object")
        store.abort_upload(upload)
        assert self.get_directly(store, prefix + "object") == b"data"


class CommonContract(Hooks):
    """Keys, progress and threads."""

    @pytest.mark.parametrize(
        "name",
        [
            *("with spaces in it", "a+b", "100%", "a%2Fb%20c", "a&b=c;d,e", "(a)'b'!*~$@:", "#1"),
            *("größe/ñandú", "重み", "\U0001f525", "a?b", ".hidden", "double..dots"),
        ],
    )
    def test_a_key_is_taken_as_it_is(self, store, prefix, name):
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
    def test_progress_adds_up_to_the_payload_and_its_error_stops_the_transfer(
        self, store, prefix, verb
    ):
        data, key, moved = some_bytes(SEVERAL_STEPS), prefix + "object", []
        if verb == "get_range":
            self.put_directly(store, key, data)

        def move(progress):
            views = cut(bytearray(data), [10, 20, 1_000_000])
            told = {"checksum": checksum(store, data), "progress": progress}
            if verb == "put":
                store.put(key, views, **told)
            elif verb == "put_part":
                upload = store.create_upload(key, max(part_size(store), len(data)))
                store.put_part(upload, 1, views, **told)
            else:
                store.get_range(key, 0, views, progress=progress)

        def stop(count):
            raise LookupError

        with pytest.raises(LookupError):
            move(stop)
        assert len(list(store.list(prefix))) == (verb == "get_range")
        move(moved.append)
        assert sum(moved) == len(data)
        assert min(moved) >= 0

    def test_threads_do_not_disturb_each_other(self, store, prefix):
        def work(number):
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

    def test_uri_begins_with_the_root(self, store, prefix):
        assert store.uri(prefix + "object").startswith(store.root)
