"""The contract of a store, as a class of tests that every store passes."""

from support.contract.copies import CopyContract
from support.contract.data import part_size, put_part
from support.contract.objects import ReadingContract, WritingContract
from support.contract.uploads import CommonContract, UploadContract

__all__ = ["StoreContract", "part_size", "put_part"]


class StoreContract(WritingContract, UploadContract, CopyContract, ReadingContract, CommonContract):
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
    was compared, call ``pytest.register_assert_rewrite("support.contract")`` in a
    ``conftest.py``.
    """
