"""Azure's store against Azurite: the contract of the seam."""

import uuid

import pytest
from azure.storage.blob import BlobServiceClient

from cloudckpt import Config
from cloudckpt.errors import StoreError
from cloudckpt.stores.azure import AzureStore
from cloudckpt.testing.contract import StoreContract, part_size, put_part


@pytest.fixture(scope="module")
def direct(azurite):
    with BlobServiceClient.from_connection_string(azurite.connection_string) as client:
        yield client


@pytest.fixture(scope="module")
def azure_store(azurite, direct):
    container = f"contract-{uuid.uuid4().hex[:12]}"
    direct.create_container(container)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
        store = AzureStore(container, Config())
    yield store
    store.close()


class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, azure_store, direct):
        self.client = direct
        return azure_store

    @pytest.fixture
    def prefix(self):
        return f"{uuid.uuid4().hex}/"

    def blob(self, store, key):
        return self.client.get_blob_client(store.root.removeprefix("az://"), key)

    def put_directly(self, store, key, data):
        self.blob(store, key).upload_blob(data, overwrite=True)

    def get_directly(self, store, key):
        return self.blob(store, key).download_blob().readall()

    def test_two_uploads_of_one_key_do_not_mix(self, store, prefix):
        """Azure discards the blocks of the other one when the first is completed."""
        uploads = [store.create_upload(prefix + "object", part_size(store)) for _ in range(2)]
        assert uploads[0].id != uploads[1].id
        parts = [
            put_part(store, upload, 1, text)
            for upload, text in zip(uploads, (b"first", b"second"), strict=True)
        ]
        store.complete_upload(uploads[1], [parts[1]])
        with pytest.raises(StoreError):
            store.complete_upload(uploads[0], [parts[0]])
        assert self.get_directly(store, prefix + "object") == b"second"
