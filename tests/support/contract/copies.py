"""The contract of copies that a store makes by itself."""

import pytest

from cloudckpt.errors import ObjectNotFoundError, PreconditionFailedError
from cloudckpt.stores.base import CopySource
from support.contract.data import Hooks, checksum, part_size, put, put_part, some_bytes


class CopyContract(Hooks):
    """Objects that are copied within the store; nothing to keep for one that makes no copies."""

    @pytest.fixture
    def copier(self, store):
        """The store, if it can copy."""
        if not store.copies_from(store):
            pytest.skip("this store makes no copies by itself")
        return store

    @pytest.mark.parametrize("size", [0, 1, 1_000_000])
    def test_copy_makes_an_object_of_the_same_bytes(self, copier, prefix, size):
        data = some_bytes(size)
        source = put(copier, prefix + "a b/ü+%?", data)
        info = copier.copy(CopySource(copier, source), prefix + "target/ü+%?")
        assert self.get_directly(copier, prefix + "target/ü+%?") == data
        assert self.get_directly(copier, prefix + "a b/ü+%?") == data
        assert (info.key, info.size) == (prefix + "target/ü+%?", size)
        assert info == copier.head(prefix + "target/ü+%?")
        assert info.checksum in (None, checksum(copier, data))

    def test_a_copy_has_a_name_of_its_own(self, copier, prefix):
        source = put(copier, prefix + "source", b"data", attempt="0123456789abcdef")
        key = prefix + "target"
        info = copier.copy(CopySource(copier, source), key, attempt="fedcba9876543210")
        assert copier.written(key, "0123456789abcdef") is None
        found = copier.written(key, "fedcba9876543210")
        assert found == (info if self.keeps_attempts else None)

    def test_copy_replaces_an_object(self, copier, prefix):
        old = put(copier, prefix + "target", b"old")
        source = put(copier, prefix + "source", b"new")
        info = copier.copy(CopySource(copier, source), prefix + "target")
        assert self.get_directly(copier, prefix + "target") == b"new"
        assert info.version != old.version

    def test_copy_if_absent_copies_only_when_there_is_nothing(self, copier, prefix):
        if not self.honours_conditional_copies:
            pytest.skip("this server ignores conditions of copies")
        put(copier, prefix + "target", b"old")
        source = put(copier, prefix + "source", b"new")
        with pytest.raises(PreconditionFailedError):
            copier.copy(CopySource(copier, source), prefix + "target", if_version="")
        assert self.get_directly(copier, prefix + "target") == b"old"
        copier.delete(prefix + "target")
        copier.copy(CopySource(copier, source), prefix + "target", if_version="")
        assert self.get_directly(copier, prefix + "target") == b"new"

    @pytest.mark.parametrize("verb", ["copy", "copy_part"])
    def test_a_source_that_was_replaced_is_not_copied(self, copier, prefix, verb):
        if not self.honours_conditional_copies:
            pytest.skip("this server ignores conditions of copies")
        source = put(copier, prefix + "source", b"old")
        put(copier, prefix + "source", b"another, which is longer")
        with pytest.raises(PreconditionFailedError) as caught:
            self._copy(copier, verb, source, prefix)
        assert copier.uri(prefix + "source") in str(caught.value)
        assert [info.key for info in copier.list(prefix)] == [prefix + "source"]

    @pytest.mark.parametrize("verb", ["copy", "copy_part"])
    def test_a_source_that_is_gone_is_not_found(self, copier, prefix, verb):
        source = put(copier, prefix + "source", b"data")
        copier.delete(prefix + "source")
        with pytest.raises(ObjectNotFoundError) as caught:
            self._copy(copier, verb, source, prefix)
        assert copier.uri(prefix + "source") in str(caught.value)
        assert list(copier.list(prefix)) == []

    def _copy(self, store, verb, source, prefix):
        if verb == "copy":
            store.copy(CopySource(store, source), prefix + "target")
            return
        if not store.capabilities.copies_parts:
            pytest.skip("this store copies no parts")
        upload = store.create_upload(prefix + "target", part_size(store))
        try:
            store.copy_part(CopySource(store, source), upload, 1, 0, 4)
        finally:
            store.abort_upload(upload)

    def test_copied_and_sent_parts_make_one_object(self, copier, prefix):
        if not copier.capabilities.copies_parts:
            pytest.skip("this store copies no parts")
        size = part_size(copier)
        data, end = some_bytes(3 * size), some_bytes(1000, 1)
        source = put(copier, prefix + "source", data)
        upload = copier.create_upload(prefix + "target", size)
        parts = [
            copier.copy_part(CopySource(copier, source), upload, 1, size + 5, 2 * size + 5),
            copier.copy_part(CopySource(copier, source), upload, 2, 0, size),
            put_part(copier, upload, 3, end),
        ]
        assert [(part.number, part.size) for part in parts] == [(1, size), (2, size), (3, 1000)]
        assert parts[1].checksum in (None, checksum(copier, data[:size]))
        info = copier.complete_upload(upload, parts)
        made = data[size + 5 : 2 * size + 5] + data[:size] + end
        assert self.get_directly(copier, prefix + "target") == made
        assert info == copier.head(prefix + "target")
