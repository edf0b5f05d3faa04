"""How an account and its key are found, on Azurite: by what the environment and the options say."""

import uuid

import pytest
from azure.storage.blob import generate_container_sas

import cloudckpt
from cloudckpt import AzureOptions, Config
from cloudckpt.checksum import CRC64NVME
from cloudckpt.stores.azure.store import AzureStore
from dcp.values import assert_same, numbered
from support.emulators import Azurite

pytestmark = [
    pytest.mark.only_on("azurite"),
    pytest.mark.parametrize("cloud", ["azure"], indirect=True),
]


@pytest.fixture
def account(cloud, monkeypatch):
    """Azurite's account, which the environment does not name any more."""
    text = cloud.environment["AZURE_STORAGE_CONNECTION_STRING"]
    fields = dict(field.split("=", 1) for field in text.strip(";").split(";"))
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    return Azurite(
        url=fields["BlobEndpoint"], account=fields["AccountName"], key=fields["AccountKey"]
    )


def _save(uri, config):
    cloudckpt.save({"t": numbered(100)}, checkpoint_id=uri, config=config)


def _load(uri, config):
    state = {"t": numbered(100, first=7)}
    cloudckpt.load(state, checkpoint_id=uri, config=config)
    assert_same(state, {"t": numbered(100)})


def _there_and_back(uri, config):
    _save(uri, config)
    _load(uri, config)


def test_the_environment_names_endpoint_account_and_key(place, account, monkeypatch):
    monkeypatch.setenv("CLOUDCKPT_AZURE_ENDPOINT_URL", account.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", account.account)
    monkeypatch.setenv("AZURE_STORAGE_KEY", account.key)
    _there_and_back(place.uri, Config())


def test_a_signature_is_all_that_is_needed(cloud, place, account, monkeypatch):
    sas = generate_container_sas(
        account.account,
        cloud.look.client.container_name,
        account_key=account.key,
        permission="rwdl",
        expiry="2099-01-01T00:00:00Z",
    )
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas)
    _there_and_back(place.uri, Config(azure=AzureOptions(endpoint_url=account.url)))


def test_a_key_signs_the_deletion_of_any_name(cloud, account, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_KEY", account.key)
    container = cloud.look.client.container_name
    store = AzureStore(container, Config(azure=AzureOptions(endpoint_url=account.url)))
    keys = [f"{uuid.uuid4().hex}/{name}" for name in ("a b/größe", "x%2Fy", "a+b", "a&b=c~'(*)!")]
    for key in keys:
        store.put(key, [memoryview(b"data")], checksum=CRC64NVME.of(b"data"))
        store.delete(key)
    store.close()
    assert not any(store_key in cloud.look.client.list_blob_names() for store_key in keys)


@pytest.fixture
def saved(place, account):
    """The place, with a checkpoint that was saved by the account's owner."""
    config = Config(azure=AzureOptions(endpoint_url=account.url))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_KEY", account.key)
        _save(place.uri, config)
    return place


def _load_as_anybody(place, account):
    options = AzureOptions(endpoint_url=account.url, anonymous=True)
    _load(place.uri, Config(azure=options))


def test_anybody_may_load_from_a_public_container(cloud, saved, account):
    container = cloud.look.client
    container.set_container_access_policy(signed_identifiers={}, public_access="container")
    try:
        _load_as_anybody(saved, account)
    finally:
        container.set_container_access_policy(signed_identifiers={})
