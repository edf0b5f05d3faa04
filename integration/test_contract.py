"""The store of each cloud keeps the contract of the seam."""

import pytest

from cloudckpt.errors import StoreError
from servers import chosen
from support.contract import StoreContract, part_size, put_part


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, store, cloud):
        self.look = cloud.look
        deaf = {"gcp-storage-emulator", "moto"}
        self.honours_conditional_copies = chosen(cloud.name)[0] not in deaf
        if chosen(cloud.name)[0] == "gcp-storage-emulator":
            self.object_count = 120  # it has no pages, and connections queue up
            self.honours_conditional_deletes = False
            self.memory_is_ours = False  # it is a thread of this process
        return store

    @pytest.fixture
    def prefix(self, place):
        return f"{place.key}/"

    def put_directly(self, store, key, data):
        self.look.put(key, data)

    def get_directly(self, store, key):
        return self.look.get(key)


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_of_two_uploads_of_one_key_the_first_to_be_completed_wins(cloud, store, place):
    """Azure discards the blocks of the other one."""
    key = f"{place.key}/object"
    uploads = [store.create_upload(key, part_size(store)) for _ in range(2)]
    assert uploads[0].id != uploads[1].id
    parts = [
        put_part(store, upload, 1, text)
        for upload, text in zip(uploads, (b"first", b"second"), strict=True)
    ]
    store.complete_upload(uploads[1], [parts[1]])
    with pytest.raises(StoreError):
        store.complete_upload(uploads[0], [parts[0]])
    assert cloud.look.get(key) == b"second"
