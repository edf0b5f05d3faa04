"""What is known of an endpoint, and conditions are tried where no vendor documents them."""

import google.auth.credentials
import pytest

from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.config import RetryPolicy
from cloudckpt.errors import ConfigError
from cloudckpt.transfer.retry import Retrier
from support.dialects import DIALECTS, resource


@pytest.fixture(params=["other", "minio", "aws", "r2", "azure", "google"])
def ignoring(request, server, open_s3, open_azure, open_gcs):
    """A store at a server that carries out every write, whatever its conditions are."""
    kind = request.param
    written = {"body": resource(size=0)} if kind == "google" else {"headers": {"ETag": '"tag"'}}
    deleted = {"status": 202 if kind == "azure" else 204}
    server.respond(lambda asked: server.Answer(**deleted if asked.method == "DELETE" else written))
    if kind == "azure":
        return open_azure(anonymous=True)
    return open_gcs() if kind == "google" else open_s3(dialect=kind, anonymous=True)


def test_a_server_that_ignores_conditions_is_refused_by_name_after_one_trial(ignoring, server):
    retrier = Retrier(RetryPolicy(deadline=1))
    for _ in range(2):
        with pytest.raises(ConfigError, match="ignores conditional writes") as caught:
            conditions_work(ignoring, "auto", "run/trial", retrier)
        assert caught.value.uri == ignoring.root
    asked = [request.method for request in server.requests]
    assert asked == [asked[0], asked[0], "DELETE"]  # the object, and a write that should fail


def test_who_knows_that_conditions_hold_says_so_and_nothing_is_tried(ignoring, server):
    assert conditions_work(ignoring, "on", "run/trial", Retrier(RetryPolicy(deadline=1)))
    assert server.requests == []


# what is known of an endpoint

AZURE = "http://account.blob.core.windows.net"
AWS = "http://s3.us-east-1.amazonaws.com"


@pytest.fixture
def open_at(request, open_s3, open_gcs, open_azure, monkeypatch):
    """Opens a store of a dialect at an endpoint."""
    nobody = google.auth.credentials.AnonymousCredentials()
    monkeypatch.setattr("google.auth.default", lambda: (nobody, "project"))
    openers = {"s3": open_s3, "google": open_gcs, "azure": open_azure}

    def open_one(dialect, endpoint, **more):
        region = {"region": "us-east-1"} if dialect == "s3" else {}
        return openers[dialect](endpoint_url=endpoint, **region, **more)

    return open_one


@pytest.mark.parametrize(
    ("dialect", "endpoint", "known"),
    [
        ("s3", AWS, True),
        ("s3", "http://s3.cn-north-1.amazonaws.com.cn", True),
        ("s3", "http://s3.eusc-de-east-1.amazonaws.eu", True),
        ("s3", "http://s3.us-iso-east-1.c2s.ic.gov", True),
        ("s3", "https://s3-us-west-2.amazonaws.com", True),
        ("s3", "https://s3-fips.dualstack.us-gov-west-1.amazonaws.com", True),
        ("s3", "https://bucket.vpce-1a2b3c-d4e5f6.s3.us-east-1.vpce.amazonaws.com", True),
        ("s3", "http://ec2-3-4-5-6.compute-1.amazonaws.com:9000", None),
        ("s3", "https://minio-1234.elb.us-east-1.amazonaws.com", None),
        ("s3", "https://a1b2c3.execute-api.us-east-1.amazonaws.com", None),
        ("s3", "https://op-01ac5.s3-outposts.us-east-1.amazonaws.com", None),
        ("s3", "http://store.example", None),
        ("s3", "http://amazonaws.com.example", None),
        ("azure", "https://account.blob.core.windows.net", True),
        ("azure", "https://account.z12.blob.storage.azure.net", True),
        ("azure", "https://account.blob.core.chinacloudapi.cn", True),
        ("azure", "https://account.blob.local.azurestack.external", None),
        ("azure", "https://data.example", None),
        ("azure", "https://core.windows.net.example/account", None),
        ("azure", "http://127.0.0.1:10000/account", None),
        ("google", "https://storage.googleapis.com", True),
        ("google", "https://storage.europe-west3.rep.googleapis.com", True),
        ("google", "https://googleapis.com.example", None),
        ("google", "http://storage.googleapis.com", None),
    ],
)
def test_only_the_vendor_itself_is_known_to_honour_conditions(open_at, dialect, endpoint, known):
    found = open_at(dialect, endpoint).capabilities
    assert (found.conditional_writes, found.conditional_deletes) == (known, known is True)
    assert found.create_only is bool(known)


CHECKSUMS = (b"checksumcrc32c", b"x-amz-checksum", b"x-ms-content-crc64", b"crc32c")


def has_checksum(request):
    text = repr(request.headers.items()).encode() + request.body
    return any(name in text.lower() for name in CHECKSUMS)


@pytest.mark.parametrize(
    ("dialect", "setting", "endpoint", "sent"),
    [
        ("s3", "auto", AWS, True),
        ("s3", "auto", "http://store.example", False),
        ("s3", "on", "http://store.example", True),
        ("s3", "off", AWS, False),
        ("azure", "auto", AZURE, True),
        ("azure", "auto", "http://account.blob.core.chinacloudapi.cn", True),
        ("azure", "auto", "http://account.z12.blob.storage.azure.net", True),
        ("azure", "auto", "http://blob.core.windows.net.example", False),
        ("azure", "auto", "http://127.0.0.1:1/devstoreaccount1", False),
        ("azure", "on", "http://store.example", True),
        ("azure", "off", AZURE, False),
        ("google", "auto", "http://store.example", False),
        ("google", "on", "http://store.example", True),
        ("google", "off", "http://store.example", False),
    ],
)
def test_checksums_go_to_the_vendor_and_to_whom_it_is_told(
    open_at, server, monkeypatch, dialect, setting, endpoint, sent
):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    store, spoken = open_at(dialect, endpoint, checksum=setting), DIALECTS[dialect]
    verbs = {"s3": "put put_part create_upload complete_upload", "google": "put put_part"}
    for verb in verbs.get(dialect, "put put_part complete_upload").split():
        assert has_checksum(spoken.call(store, server, verb)) == sent, verb
