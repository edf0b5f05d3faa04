"""What errors advise where the cause is on this side: proxies, roles, metadata services, names."""

import logging

import pytest

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    InvalidRequestError,
    PreconditionFailedError,
)
from cloudckpt.stores.azure.access import Secret
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.local import LocalStore
from cloudckpt.transfer.retry import Retrier
from support.dialects import error_xml

PATIENT = RetryPolicy(base=0.01, cap=0.05, deadline=20.0)


@pytest.mark.parametrize("status", [403, 407])
def test_a_proxy_that_refuses_to_connect_ends_it_at_once_and_is_named(
    server, open_s3, monkeypatch, status
):
    proxy = server.url.replace("://", "://user:of-the-proxy@")
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    server.respond(lambda request: server.Answer(status))
    store = open_s3(endpoint_url="https://store.example")
    with pytest.raises(InvalidRequestError, match="HTTPS_PROXY") as caught:
        Retrier(PATIENT).call(lambda: store.get("run/object"))
    assert caught.value.certain
    assert "of-the-proxy" not in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("root", ["s3", "gs"])
def test_a_denied_read_names_the_permission_that_tells_missing_objects(
    server, open_s3, open_gcs, root
):
    body = error_xml("AccessDenied")
    server.respond(lambda request: server.Answer(403, body=body))
    store = open_s3() if root == "s3" else open_gcs()
    right = {"s3": "s3:ListBucket", "gs": "storage.objects.list"}[root]
    with pytest.raises(AccessDeniedError, match=right):
        store.get_range("run/object", 0, [memoryview(bytearray(1))])
    with pytest.raises(AccessDeniedError) as caught:
        store.put("run/object", [memoryview(b"x")], checksum=0)
    assert right not in str(caught.value)


class Strict(LocalStore):
    """Answers as stores do that find a condition unmet where there is no object."""

    def __init__(self):
        super().__init__()
        self.deleted = None

    def head(self, key):
        found = super().head(key)
        if self.deleted is None and key.endswith(".metadata"):
            self.deleted = found
        return self.deleted if key.endswith(".metadata") else found

    def get_range(self, key, start, into, *, if_version=None, progress=None):
        if not key.endswith(".metadata"):
            return super().get_range(key, start, into, if_version=if_version, progress=progress)
        if if_version is None:
            return super().get_range(f"{key}-gone", start, into)
        raise PreconditionFailedError("the condition is not met", uri=self.uri(key))


def test_a_checkpoint_that_is_gone_is_not_called_replaced(tmp_path, monkeypatch):
    cloudckpt.save({"n": 1}, checkpoint_id=tmp_path / "step-1")
    store = Strict()
    monkeypatch.setattr(cloudckpt.stores.registry, "open_store", lambda uri, config: store)
    with pytest.raises(CheckpointNotFoundError):
        cloudckpt.load({"n": 0}, checkpoint_id=tmp_path / "step-1")


# what holds a secret


@pytest.mark.parametrize("name", ["urllib3.connection", "urllib3.connectionpool"])
def test_a_signed_url_is_not_logged_by_urllib3(open_s3, caplog, name):
    open_s3()
    url = "https://account/x?sv=1&sig=S3cr3tOfTheSignature"
    with caplog.at_level(logging.DEBUG):
        logging.getLogger(name).warning("Failed to parse %s: %s", url, ValueError(url))
    assert "S3cr3t" not in caplog.text


@pytest.mark.parametrize(
    ("configured", "named", "is_sent"),
    [("", "account", False), ("account", "account", True), ("another", "account", False)],
)
def test_a_signature_is_sent_to_the_configured_account_only(
    monkeypatch, azure_key, configured, named, is_sent
):
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=S3cr3t")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", configured)
    host = f"{named}.blob.core.windows.net"
    store = AzureStore("container", Config(), host, f"az://{named}/container")
    source = store.access.credentials.current
    assert isinstance(source, Secret) is is_sent
    store.close()
