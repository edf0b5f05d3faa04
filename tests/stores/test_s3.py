"""The S3 store: what it sends, and what it makes of the answers.

What moto does not show (errors, signatures, headers) is tested against the scripted stub of
``conftest.py``, the rest against moto.
"""

import base64
import dataclasses
import datetime
import hashlib
import hmac
import itertools
import json
import pickle
import re
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    InvalidRequestError,
    MissingDependencyError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    WrongRegionError,
)
from cloudckpt.stores.base import Part, Upload
from cloudckpt.stores.registry import open_store
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3_access import BucketAccess
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI
from emulators import free_port

UPLOAD = Upload("run/object", "id/with+odd=chars&more", 5 * 1024**2)
CRC = CRC32C.of(b"data")


@pytest.fixture(scope="module")
def stub(stub_server):
    """One server for the module, since a store for each test takes its time to make."""
    with stub_server() as stub:
        yield stub


@pytest.fixture
def server(stub):
    stub.reset_script()
    return stub


@pytest.fixture(scope="module")
def store(stub):
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=stub.url, addressing_style="path")))
    yield store
    store.close()


@pytest.fixture
def open_s3(server):
    """Opens other stores on the stub, with options of S3."""
    opened = []

    def open_one(bucket="bucket", **options):
        config = {"stall_timeout": options.pop("stall_timeout", 30.0), "connections": 2}
        values = {"endpoint_url": server.url, "addressing_style": "path", **options}
        opened.append(S3Store(bucket, Config(s3=S3Options(**values), **config)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def error_xml(code, message="no details"):
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def put(store, key="run/object", data=b"data", **conditions):
    return store.put(key, [memoryview(data)], checksum=CRC32C.of(data), **conditions)


def get_range(store, key="run/object", start=0, size=4, **conditions):
    memory = bytearray(size)
    store.get_range(key, start, [memoryview(memory)], **conditions)
    return bytes(memory)


def xml_of(tag, **fields):
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f"<{tag}>{inner}</{tag}>".encode()


# how each verb reaches the store

VERBS = {
    "put": (put, {"headers": {"ETag": '"tag"'}}),
    "create_upload": (
        lambda store: store.create_upload("run/object", 5 * 1024**2),
        {"body": xml_of("InitiateMultipartUploadResult", UploadId="id")},
    ),
    "put_part": (
        lambda store: store.put_part(UPLOAD, 3, [memoryview(b"data")], checksum=CRC),
        {"headers": {"ETag": '"tag"'}},
    ),
    "complete_upload": (
        lambda store: store.complete_upload(UPLOAD, [Part(1, 4, '"tag"', CRC)]),
        {"body": xml_of("CompleteMultipartUploadResult", ETag='"tag"')},
    ),
    "abort_upload": (lambda store: store.abort_upload(UPLOAD), {"status": 204}),
    "list_uploads": (
        lambda store: list(store.list_uploads("run/")),
        {"body": xml_of("ListMultipartUploadsResult", IsTruncated="false")},
    ),
    "get": (lambda store: store.get("run/object"), {"headers": {"ETag": '"tag"'}, "body": b"data"}),
    "get_range": (
        get_range,
        {
            "status": 206,
            "headers": {"ETag": '"tag"', "Content-Range": "bytes 0-3/9"},
            "body": b"data",
        },
    ),
    "head": (lambda store: store.head("run/object"), {"headers": {"ETag": '"tag"'}, "size": 9}),
    "list": (
        lambda store: list(store.list("run/")),
        {"body": xml_of("ListBucketResult", IsTruncated="false")},
    ),
    "delete": (lambda store: store.delete("run/object"), {"status": 204}),
}
WRITING = ("put", "create_upload")


def call(store, server, verb):
    """Carries out a verb against an answer that suits it; returns the request that was sent."""
    function, answer = VERBS[verb]
    server.answer(**answer)
    function(store)
    return server.requests[-1]


# signatures


def signature_of(request, secret, region="us-east-1"):
    """The Authorization that S3 computes for a request: SigV4, from AWS's documentation.

    It is built from what arrived, so that whatever happens to a request on its way out is noticed.
    """
    given = request.headers["Authorization"]
    fields = dict(
        part.strip().split("=", 1) for part in given.removeprefix("AWS4-HMAC-SHA256 ").split(",")
    )
    signed = fields["SignedHeaders"].split(";")
    parts = urlsplit(request.target)  # a whole URL at a proxy
    query = sorted(
        (quote(name, safe="-._~"), quote(value, safe="-._~"))
        for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        for value in values
    )
    canonical = "\n".join(
        [
            request.method,
            quote(unquote(parts.path), safe="/-._~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in signed),
            "",
            ";".join(signed),
            request.headers["x-amz-content-sha256"],
        ]
    )
    date = request.headers["x-amz-date"]
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    to_sign = "\n".join(
        ["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()]
    )
    key = f"AWS4{secret}".encode()
    for text in scope.split("/"):
        key = hmac.digest(key, text.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    access_key = fields["Credential"].partition("/")[0]
    return (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, "
        f"SignedHeaders={fields['SignedHeaders']}, Signature={signature}"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_request_is_signed_as_s3_wants_it(store, server, verb):
    request = call(store, server, verb)
    assert request.headers["Authorization"] == signature_of(request, "testing")


@pytest.mark.parametrize("verb", VERBS)
def test_small_bodies_are_signed(store, server, verb):
    """Policies may deny what is not: s3:x-amz-content-sha256 is UNSIGNED-PAYLOAD."""
    request = call(store, server, verb)
    assert request.headers["x-amz-content-sha256"] == hashlib.sha256(request.body).hexdigest()


def send_large(store, verb, data):
    body, crc = [memoryview(data)[:3], memoryview(data)[3:]], CRC32C.of(data)
    if verb == "put":
        store.put("run/object", body, checksum=crc)
    else:
        store.put_part(UPLOAD, 1, body, checksum=crc)


LARGE = bytes(2 * 1024**2)


@pytest.mark.parametrize("verb", ["put", "put_part"])
def test_large_bodies_are_not_hashed_for_the_signature(store, server, verb):
    server.answer(headers={"ETag": '"tag"'})
    send_large(store, verb, LARGE)
    (request,) = server.requests
    assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert request.headers["Authorization"] == signature_of(request, "testing")


@pytest.mark.parametrize("verb", ["put", "put_part"])
def test_large_bodies_are_hashed_if_that_is_wanted(open_s3, server, verb):
    server.answer(headers={"ETag": '"tag"'})
    send_large(open_s3(payload_signing="on"), verb, LARGE)
    (request,) = server.requests
    assert request.headers["x-amz-content-sha256"] == hashlib.sha256(LARGE).hexdigest()
    assert request.headers["Authorization"] == signature_of(request, "testing")


@pytest.mark.parametrize("verb", ["put", "put_part"])
def test_a_policy_against_unsigned_bodies_is_told_with_its_way_out(store, server, verb):
    server.respond(lambda request: server.Answer(403, body=error_xml("AccessDenied")))
    with pytest.raises(AccessDeniedError, match=r"payload_signing='on'.*PAYLOAD_SIGNING=on"):
        send_large(store, verb, LARGE)
    with pytest.raises(AccessDeniedError) as caught:
        put(store)
    assert "payload_signing" not in str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_the_length_is_not_part_of_the_signature(store, server, verb):
    """Gateways leave out a length of zero, or send the body in chunks."""
    request = call(store, server, verb)
    names = re.search(r"SignedHeaders=([^,]+)", request.headers["Authorization"])[1].split(";")
    assert "content-length" not in names
    assert {"host", "x-amz-content-sha256", "x-amz-date"} <= set(names)
    if request.method in ("PUT", "POST"):
        assert int(request.headers["Content-Length"]) == len(request.body)


@pytest.mark.parametrize(
    "key",
    [
        "with spaces",
        "a+b",
        "100%",
        "a%2Fb",
        "a&b=c;d,e:f@g",
        "(a)'b'!*~$",
        "größe/重み",
        "#1",
        "a?b=c",
        "a//b",
        '"quoted"',
        "[a]{b}|c\\d^e`f<g>",
    ],
)
@pytest.mark.parametrize("verb", ["put", "put_part", "get"])
def test_the_signature_holds_for_any_key(store, server, verb, key):
    upload = dataclasses.replace(UPLOAD, key=key)
    server.answer(headers={"ETag": '"tag"'})
    if verb == "put":
        put(store, key)
    elif verb == "put_part":
        store.put_part(upload, 1, [memoryview(b"data")], checksum=CRC)
    else:
        store.get(key)
    (request,) = server.requests
    assert unquote(urlsplit(request.target).path) == f"/bucket/{key}"
    assert request.headers["Authorization"] == signature_of(request, "testing")


@pytest.mark.parametrize("key", ["a/../b", "a/./b"])
def test_a_key_with_dot_segments_is_sent_as_it_is_or_refused(store, server, key):
    server.answer(headers={"ETag": '"tag"'})
    try:
        put(store, key)
    except InvalidRequestError:
        return
    assert unquote(server.requests[0].target) == f"/bucket/{key}"


@pytest.mark.parametrize("verb", ["put", "get_range"])
def test_conditions_are_part_of_the_signature(store, server, verb):
    function, answer = VERBS[verb]
    server.answer(**answer)
    function(store, if_version='"a tag"')
    (request,) = server.requests
    assert request.headers["If-Match"] == '"a tag"'
    assert request.headers["Authorization"] == signature_of(request, "testing")


def test_a_session_token_is_sent_and_signed(open_s3, server, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "temporary/token==")
    request = call(open_s3(), server, "put")
    assert request.headers["x-amz-security-token"] == "temporary/token=="
    assert "x-amz-security-token" in request.headers["Authorization"]
    assert request.headers["Authorization"] == signature_of(request, "testing")


@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_a_request_is_signed_for_the_region_that_was_asked_for(open_s3, server, verb):
    request = call(open_s3(region="eu-central-1"), server, verb)
    assert request.headers["Authorization"] == signature_of(request, "testing", "eu-central-1")


@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_without_a_region_it_is_us_east_1(open_s3, server, monkeypatch, verb):
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    request = call(open_s3(), server, verb)
    assert "/us-east-1/s3/aws4_request" in request.headers["Authorization"]


# credentials


@pytest.fixture
def aws_files(tmp_path, monkeypatch):
    """Writes ``~/.aws/config`` and ``~/.aws/credentials``."""

    def write(config="", credentials=""):
        (tmp_path / "config").write_text(config)
        (tmp_path / "credentials").write_text(credentials)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        return tmp_path

    return write


PROFILES = """
[default]
aws_access_key_id = DEFAULTKEY
aws_secret_access_key = defaultsecret
[work]
aws_access_key_id = WORKKEY
aws_secret_access_key = worksecret
"""


@pytest.mark.parametrize(
    ("environment", "options", "key", "secret"),
    [
        ({}, {}, "DEFAULTKEY", "defaultsecret"),
        ({"AWS_PROFILE": "work"}, {}, "WORKKEY", "worksecret"),
        ({}, {"profile": "work"}, "WORKKEY", "worksecret"),
        ({"AWS_PROFILE": "default"}, {"profile": "work"}, "WORKKEY", "worksecret"),
        (
            {"AWS_ACCESS_KEY_ID": "ENVKEY", "AWS_SECRET_ACCESS_KEY": "envsecret"},
            {},
            "ENVKEY",
            "envsecret",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_credentials_are_found_where_boto3_finds_them(
    open_s3, server, aws_files, monkeypatch, environment, options, key, secret, verb
):
    aws_files(credentials=PROFILES)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    request = call(open_s3(**options), server, verb)
    assert f"Credential={key}/" in request.headers["Authorization"]
    assert request.headers["Authorization"] == signature_of(request, secret)


def test_region_and_endpoint_of_the_profile_are_used(server, aws_files, monkeypatch):
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    aws_files(
        config=f"[default]\nregion = eu-west-3\nendpoint_url = {server.url}\n"
        "s3 =\n  addressing_style = path\n",
        credentials=PROFILES,
    )
    store = S3Store("bucket", Config(s3=S3Options(addressing_style="path")))
    request = call(store, server, "put")
    store.close()
    assert "/eu-west-3/s3/" in request.headers["Authorization"]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_endpoint_is_taken_from_aws_variables(server, monkeypatch, variable):
    monkeypatch.setenv(variable, server.url)
    store = S3Store("bucket", Config(s3=S3Options(addressing_style="path")))
    assert call(store, server, "put").target == "/bucket/run/object"
    store.close()


def test_credentials_are_renewed_while_the_store_is_open(open_s3, server, aws_files):
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=1)
    folder = aws_files()
    (folder / "renew.py").write_text(
        f"""
import json, pathlib
count = pathlib.Path({str(folder / "count")!r})
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
print(json.dumps(dict(Version=1, AccessKeyId=f"KEY{{number}}", SecretAccessKey="secret",
                      SessionToken=f"token{{number}}", Expiration={soon.isoformat()!r})))
"""
    )
    (folder / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} {folder}/renew.py\n"
    )
    store = open_s3()
    tokens = [call(store, server, "put").headers["x-amz-security-token"] for _ in range(2)]
    assert tokens[0] != tokens[1]
    request = server.requests[-1]
    assert request.headers["Authorization"] == signature_of(request, "secret")


def test_credentials_that_can_not_be_renewed_are_named(open_s3, server, aws_files):
    folder = aws_files()
    process = folder / "once.py"
    process.write_text(
        "import json, pathlib, sys\n"
        f"used = pathlib.Path({str(folder / 'used')!r})\n"
        "if used.exists(): sys.exit('the login has expired')\n"
        "used.touch()\n"
        "print(json.dumps(dict(Version=1, AccessKeyId='KEY', SecretAccessKey='SECRET',"
        " SessionToken='TOKEN', Expiration='2000-01-01T00:00:00Z')))\n"
    )
    (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {process}\n")
    with pytest.raises(CredentialsError) as caught:
        call(open_s3(), server, "put")
    assert "SECRET" not in str(caught.value)
    assert "TOKEN" not in str(caught.value)


def test_no_credentials_at_all_are_named_and_where_they_are_looked_for(open_s3, aws_files):
    aws_files()
    with pytest.raises(CredentialsError, match="AWS_ACCESS_KEY_ID") as caught:
        open_s3()
    assert caught.value.uri == "s3://bucket"


@pytest.mark.parametrize("verb", VERBS)
def test_an_anonymous_store_looks_for_no_credentials_and_sends_none(
    open_s3, server, aws_files, verb
):
    aws_files()
    request = call(open_s3(anonymous=True), server, verb)
    assert request.target.startswith("/bucket")
    assert "Authorization" not in request.headers
    assert "X-Amz" not in request.target


def test_half_of_the_credentials_is_named(open_s3, aws_files, monkeypatch):
    aws_files()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    with pytest.raises(CredentialsError):
        open_s3()


@pytest.mark.parametrize("source", ["option", "AWS_PROFILE"])
def test_a_profile_that_is_not_there_is_named(open_s3, monkeypatch, source):
    if source == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CredentialsError, match="nobody"):
        open_s3(profile="nobody" if source == "option" else None)


def test_an_impossible_bucket_name_is_refused_by_boto3(open_s3):
    with pytest.raises(InvalidRequestError, match="bucket"):
        open_s3("no/bucket at all")


def test_s3_without_boto3_says_what_to_install(monkeypatch):
    for name in ("cloudckpt.stores.s3", "cloudckpt.stores.s3_access"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cloudckpt\[s3\]'"):
        open_store(CheckpointURI.parse("s3://no-boto3/run"), Config())


# where requests go


@pytest.mark.parametrize(
    ("bucket", "style", "region", "host"),
    [
        ("bucket", "auto", "us-east-1", "bucket.s3.us-east-1.amazonaws.com"),
        ("bucket", "virtual", "eu-west-1", "bucket.s3.eu-west-1.amazonaws.com"),
        ("bucket", "path", "eu-west-1", "s3.eu-west-1.amazonaws.com"),
        ("a.b.c", "auto", "eu-west-1", "s3.eu-west-1.amazonaws.com"),
        ("bucket", "auto", "cn-north-1", "bucket.s3.cn-north-1.amazonaws.com.cn"),
    ],
)
@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_aws_is_addressed_as_boto3_does(server, monkeypatch, bucket, style, region, host, verb):
    monkeypatch.setenv("HTTPS_PROXY", server.url)  # the stub sees whom to connect to
    server.answer(status=502)
    store = S3Store(bucket, Config(s3=S3Options(addressing_style=style, region=region)))
    with pytest.raises(StoreError):
        VERBS[verb][0](store)
    store.close()
    assert [(r.method, r.target) for r in server.requests] == [("CONNECT", f"{host}:443")]


@pytest.mark.parametrize(
    ("style", "url"),
    [
        ("auto", "http://store.example:9000/bucket/run/object"),
        ("path", "http://store.example:9000/bucket/run/object"),
        ("virtual", "http://bucket.store.example:9000/run/object"),
    ],
)
@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_another_vendor_is_addressed_as_boto3_does(server, monkeypatch, style, url, verb):
    monkeypatch.setenv("HTTP_PROXY", server.url)  # the stub sees the whole URL
    options = S3Options(endpoint_url="http://store.example:9000", addressing_style=style)
    store = S3Store("bucket", Config(s3=options))
    request = call(store, server, verb)
    store.close()
    assert request.target.partition("?")[0] == url
    assert request.headers["Host"] == urlsplit(url).netloc
    assert request.headers["Authorization"] == signature_of(request, "testing")


def test_no_proxy_is_respected(server, monkeypatch, open_s3):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert call(open_s3(), server, "put").target == "/bucket/run/object"


def test_a_proxy_for_another_scheme_does_not_matter(server, monkeypatch, open_s3):
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
    assert call(open_s3(), server, "put").target == "/bucket/run/object"


def test_no_proxy_may_name_other_hosts(server, monkeypatch, open_s3):
    monkeypatch.setenv("NO_PROXY", ".internal,10.0.0.0/8")
    assert call(open_s3(), server, "put").target == "/bucket/run/object"


@pytest.mark.parametrize(
    ("endpoint", "known"),
    [
        ("http://s3.us-east-1.amazonaws.com", True),
        ("http://s3.cn-north-1.amazonaws.com.cn", True),
        ("http://s3.eusc-de-east-1.amazonaws.eu", True),
        ("http://s3.us-iso-east-1.c2s.ic.gov", True),
        ("http://store.example", None),
        ("http://amazonaws.com.example", None),
        ("http://notamazonaws.eu", None),
    ],
)
def test_only_aws_is_known_to_honour_conditions(endpoint, known):
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=endpoint)))
    assert store.capabilities.conditional_writes is known
    store.close()


def test_a_certificate_of_the_variable_is_trusted(tls_server, tls_files, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", tls_files[0])
    options = S3Options(endpoint_url=tls_server.url, addressing_style="path")
    store = S3Store("bucket", Config(s3=options))
    for verb in ("put", "create_upload"):
        call(store, tls_server, verb)
    store.close()


def test_a_certificate_of_the_profile_is_trusted(tls_server, tls_files, aws_files):
    aws_files(config=f"[default]\nca_bundle = {tls_files[0]}\n", credentials=PROFILES)
    options = S3Options(endpoint_url=tls_server.url, addressing_style="path")
    store = S3Store("bucket", Config(s3=options))
    for verb in ("put", "create_upload"):
        call(store, tls_server, verb)
    store.close()


# what is sent along


def test_object_options_are_sent_with_every_new_object(open_s3, server):
    store = open_s3(
        sse="aws:kms",
        kms_key_id="arn:aws:kms:us-east-1:1:key/2",
        storage_class="STANDARD_IA",
        acl="bucket-owner-full-control",
        tags={"team": "n l&p=", "run": "7"},
    )
    for verb in WRITING:
        headers = call(store, server, verb).headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert (
            headers["x-amz-server-side-encryption-aws-kms-key-id"]
            == "arn:aws:kms:us-east-1:1:key/2"
        )
        assert headers["x-amz-storage-class"] == "STANDARD_IA"
        assert headers["x-amz-acl"] == "bucket-owner-full-control"
        assert parse_qs(headers["x-amz-tagging"]) == {"team": ["n l&p="], "run": ["7"]}


@pytest.mark.parametrize("storage_class", ["GLACIER", "DEEP_ARCHIVE"])
def test_a_storage_class_that_can_not_be_loaded_from_is_refused_on_aws(open_s3, storage_class):
    with pytest.raises(ConfigError, match=f"storage_class='{storage_class}'"):
        open_s3(storage_class=storage_class, endpoint_url=None)
    open_s3(storage_class=storage_class)  # on others it may be the name of any class


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_nothing_of_it_is_sent_unasked(store, server, verb):
    names = {name.lower() for name in call(store, server, verb).headers}
    assert not {name for name in names if name.startswith("x-amz-")} - {
        "x-amz-date",
        "x-amz-content-sha256",
        "x-amz-sdk-checksum-algorithm",  # S3 wants a checksum of the list of keys to delete
        "x-amz-checksum-crc32",
        "x-amz-user-agent",
        "x-amz-meta-cloudckptattempt",
    }


@pytest.mark.parametrize("verb", VERBS)
def test_the_requester_pays_for_every_request(open_s3, server, verb):
    request = call(open_s3(requester_pays=True), server, verb)
    assert request.headers["x-amz-request-payer"] == "requester"
    assert "x-amz-request-payer" in request.headers["Authorization"]


@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_objects_in_moto_have_the_options(s3_config, s3_client, bucket, verb):
    options = dataclasses.replace(
        s3_config.s3,
        sse="aws:kms",
        kms_key_id="a-key",
        storage_class="STANDARD_IA",
        tags={"team": "nlp"},
        checksum="on",
    )
    store = S3Store(bucket, dataclasses.replace(s3_config, s3=options))
    if verb == "put":
        put(store)
    else:
        upload = store.create_upload("run/object", 5 * 1024**2)
        part = store.put_part(upload, 1, [memoryview(b"data")], checksum=CRC)
        store.complete_upload(upload, [part])
    store.close()
    found = s3_client.head_object(Bucket=bucket, Key="run/object")
    assert found["ServerSideEncryption"] == "aws:kms"
    assert found["SSEKMSKeyId"] == "a-key"
    assert found["StorageClass"] == "STANDARD_IA"
    tags = s3_client.get_object_tagging(Bucket=bucket, Key="run/object")["TagSet"]
    assert tags == [{"Key": "team", "Value": "nlp"}]


def test_checksums_are_sent_when_they_are_on(open_s3, server):
    store, expected = open_s3(dialect="aws"), base64.b64encode(CRC.to_bytes(4, "big")).decode()
    for verb in ("put", "put_part"):
        assert call(store, server, verb).headers["x-amz-checksum-crc32c"] == expected
    created = call(store, server, "create_upload")
    assert created.headers["x-amz-checksum-algorithm"] == "CRC32C"
    assert created.headers["x-amz-checksum-type"] == "FULL_OBJECT"


def test_the_checksum_of_a_whole_upload_follows_from_its_parts(open_s3, server):
    store = open_s3(dialect="aws")
    first, last = b"first part", b"the last part"
    parts = [
        Part(1, len(first), '"one"', CRC32C.of(first)),
        Part(2, len(last), '"two"', CRC32C.of(last)),
    ]
    server.answer(**VERBS["complete_upload"][1])
    info = store.complete_upload(UPLOAD, parts)
    request = server.requests[0]
    whole = CRC32C.of(first + last).to_bytes(4, "big")
    assert request.headers["x-amz-checksum-crc32c"] == base64.b64encode(whole).decode()
    assert request.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    listed = [
        {element.tag.rpartition("}")[2]: element.text for element in part}
        for part in ElementTree.fromstring(request.body)
    ]
    assert [entry["PartNumber"] for entry in listed] == ["1", "2"]
    assert [entry["ETag"] for entry in listed] == ['"one"', '"two"']
    assert [base64.b64decode(entry["ChecksumCRC32C"]) for entry in listed] == [
        part.checksum.to_bytes(4, "big") for part in parts
    ]
    assert info.size == len(first + last)


@pytest.mark.parametrize(
    ("setting", "endpoint", "sent"),
    [
        ("auto", "http://s3.us-east-1.amazonaws.com", True),
        ("auto", "http://store.example", False),
        ("on", "http://store.example", True),
        ("off", "http://s3.us-east-1.amazonaws.com", False),
    ],
)
def test_checksums_go_to_aws_and_to_whom_it_is_told(server, monkeypatch, setting, endpoint, sent):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=endpoint, checksum=setting)))
    for verb in ("put", "put_part", "create_upload"):
        headers = call(store, server, verb).headers
        assert any("checksum" in name.lower() for name in headers) == sent, verb
    assert (b"ChecksumCRC32C" in call(store, server, "complete_upload").body) == sent
    store.close()


def test_a_range_is_asked_for_inclusively(store, server):
    server.answer(
        status=206,
        headers={"ETag": '"tag"', "Content-Range": "bytes 100-103/999"},
        body=b"data",
    )
    memory = bytearray(4)
    info = store.get_range("run/object", 100, [memoryview(memory)[:1], memoryview(memory)[1:]])
    assert server.requests[0].headers["Range"] == "bytes=100-103"
    assert (bytes(memory), info.size, info.version) == (b"data", 999, '"tag"')


# what the answers mean

ANSWERS = [
    (404, "NoSuchKey", ObjectNotFoundError),
    (404, "NoSuchUpload", ObjectNotFoundError),
    (404, "NoSuchBucket", BucketNotFoundError),
    (404, "NoSuchAccessPoint", BucketNotFoundError),
    (404, "", ObjectNotFoundError),
    (403, "AccessDenied", AccessDeniedError),
    (403, "AllAccessDisabled", AccessDeniedError),
    (403, "", AccessDeniedError),
    (403, "InvalidAccessKeyId", CredentialsError),
    (403, "SignatureDoesNotMatch", CredentialsError),
    (403, "RequestTimeTooSkewed", CredentialsError),
    (403, "ExpiredToken", CredentialsError),
    (400, "ExpiredToken", CredentialsError),
    (400, "InvalidToken", CredentialsError),
    (401, "", CredentialsError),
    (301, "PermanentRedirect", WrongRegionError),
    (307, "TemporaryRedirect", WrongRegionError),
    (400, "AuthorizationHeaderMalformed", WrongRegionError),
    (400, "IllegalLocationConstraintException", WrongRegionError),
    (301, "", WrongRegionError),
    (412, "PreconditionFailed", PreconditionFailedError),
    (412, "", PreconditionFailedError),
    (400, "PriorRequestNotComplete", ThrottledError),
    (400, "ThrottledException", ThrottledError),
    (400, "RequestThrottledException", ThrottledError),
    (400, "BandwidthLimitExceeded", ThrottledError),
    (400, "RequestTimeoutException", ServerError),
    (500, "InternalFailure", ServerError),
    (400, "XAmzContentSHA256Mismatch", ServerError),
    (403, "InvalidSecurity", CredentialsError),
    (403, "NotSignedUp", AccessDeniedError),
    (400, "KMS.AccessDeniedException", AccessDeniedError),
    (400, "KMS.DisabledException", InvalidRequestError),
    (400, "KMS.InvalidKeyUsageException", InvalidRequestError),
    (400, "KMS.KMSInvalidStateException", InvalidRequestError),
    (400, "KMS.NotFoundException", InvalidRequestError),
    (400, "KMS.ThrottlingException", ThrottledError),
    (500, "KMS.KMSInternalException", ServerError),
    (500, "KMS.KeyUnavailableException", ServerError),
    (503, "KMS.DependencyTimeoutException", ServerError),
    (409, "ConditionalRequestConflict", ServerError),
    (409, "OperationAborted", ServerError),
    (416, "InvalidRange", RangeNotSatisfiableError),
    (416, "", RangeNotSatisfiableError),
    (400, "EntityTooLarge", InvalidRequestError),
    (400, "InvalidPart", InvalidRequestError),
    (400, "SomethingNew", InvalidRequestError),
    (405, "MethodNotAllowed", InvalidRequestError),
    (400, "BadDigest", ServerError),
    (400, "RequestTimeout", ServerError),
    (400, "IncompleteBody", ServerError),
    (500, "InternalError", ServerError),
    (502, "", ServerError),
    (504, "", ServerError),
    (503, "SlowDown", ThrottledError),
    (503, "ServiceUnavailable", ThrottledError),
    (503, "", ThrottledError),
    (429, "TooManyRequests", ThrottledError),
    (429, "QuotaExceeded", ThrottledError),  # whatever quota it names
    (429, "AccessDenied", ThrottledError),
    (400, "ThrottlingException", ThrottledError),
    (507, "XMinioStorageFull", StorageFullError),
    (403, "QuotaExceeded", StorageFullError),
    (501, "NotImplemented", InvalidRequestError),  # it will never be
    (403, "InvalidObjectState", InvalidRequestError),  # archived, in Glacier
]


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS)
def test_an_answer_of_failure_has_a_name(store, status, code, expected):
    body = error_xml(code, "the vendor's words") if code else b""
    headers = {"x-amz-bucket-region": "eu-west-3"}
    error = store.failure(status, headers, body, "PUT", "s3://bucket/run/object")
    assert type(error) is expected
    assert error.uri == "s3://bucket/run/object"
    if code:
        assert code in str(error)
        assert "the vendor's words" in str(error)
    assert f"HTTP {status}" in str(error)


@pytest.mark.parametrize("verb", VERBS)
def test_a_refusal_of_any_request_is_told(store, server, verb):
    server.respond(lambda request: server.Answer(403, body=error_xml("AccessDenied", "words")))
    with pytest.raises(AccessDeniedError, match="words") as caught:
        VERBS[verb][0](store)
    assert caught.value.uri.startswith("s3://bucket/run/")


@pytest.mark.parametrize("before", [b" ", b"\r\n \n"])
def test_white_space_before_the_xml_of_an_answer_does_no_harm(store, server, before):
    """It keeps a connection alive while an upload is completed."""
    declared = before + b'<?xml version="1.0" encoding="UTF-8"?>\n'
    server.answer(body=declared + xml_of("CompleteMultipartUploadResult", ETag='"tag"'))
    assert VERBS["complete_upload"][0](store).version == '"tag"'
    for status in (200, 400):
        server.answer(status=status, body=declared + error_xml("NoSuchUpload"))
        with pytest.raises(ObjectNotFoundError):
            VERBS["complete_upload"][0](store)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("KMS.NotFoundException", "no such KMS key"),
        ("KMS.DisabledException", "KMS refuses"),
    ],
)
def test_what_is_wrong_with_the_key_of_the_encryption_is_said(store, code, text):
    error = store.failure(400, {}, error_xml(code), "PUT", "s3://bucket/run/object")
    assert type(error) is InvalidRequestError
    assert text in str(error)
    assert error.certain


@pytest.mark.parametrize("status", [409, 200])
def test_a_conflict_of_conditional_requests_means_that_nothing_was_written(store, server, status):
    """A completion may tell it behind the status 200."""
    server.answer(status=status, body=error_xml("ConditionalRequestConflict"))
    with pytest.raises(ServerError, match="not written") as caught:
        VERBS["complete_upload"][0](store)
    assert caught.value.certain


@pytest.mark.parametrize("verb", ["put", "get_range", "head"])
def test_the_right_region_is_named(store, server, verb):
    server.respond(
        lambda request: server.Answer(
            301, {"x-amz-bucket-region": "ap-south-2"}, error_xml("PermanentRedirect")
        )
    )
    with pytest.raises(WrongRegionError, match="AWS_REGION=ap-south-2"):
        VERBS[verb][0](store)


# buckets in another region

MALFORMED = (
    b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is "
    b"malformed; the region 'us-east-1' is wrong; expecting 'eu-west-3'</Message>"
    b"<Region>eu-west-3</Region></Error>"
)
ELSEWHERE = {  # as AWS documents them, and as botocore's redirector knows them
    "in the body": (400, {}, MALFORMED),
    "in a header of 400": (400, {"x-amz-bucket-region": "eu-west-3"}, MALFORMED),
    "in a header of 301": (
        301, {"x-amz-bucket-region": "eu-west-3"}, error_xml("PermanentRedirect")
    ),
    "in a header of 307": (
        307, {"x-amz-bucket-region": "eu-west-3"}, error_xml("TemporaryRedirect")
    ),
    "for a region to opt in": (
        400,
        {"x-amz-bucket-region": "eu-west-3"},
        error_xml("IllegalLocationConstraintException"),
    ),
}  # fmt: skip


def regions(server):
    return [re.search(r"/([^/]+)/s3/", r.headers["Authorization"])[1] for r in server.requests]


@pytest.mark.parametrize(
    ("verb", "way"),
    [("put", way) for way in ELSEWHERE]
    + [(verb, "in the body") for verb in VERBS if verb not in ("put", "head")],
)
def test_a_request_follows_the_bucket_to_its_region(open_s3, server, verb, way):
    store, (status, headers, body) = open_s3(), ELSEWHERE[way]
    server.answer(status=status, headers=headers, body=body)
    request = call(store, server, verb)
    assert regions(server) == ["us-east-1", "eu-west-3"]
    assert request.body == server.requests[0].body
    assert request.headers["Authorization"] == signature_of(request, "testing", "eu-west-3")
    call(store, server, "put")
    assert regions(server)[2:] == ["eu-west-3"]


@pytest.mark.parametrize("status", [301, 307, 400])
def test_head_follows_the_bucket_though_its_answer_has_no_body(open_s3, server, status):
    store = open_s3()
    server.answer(status=status, headers={"x-amz-bucket-region": "eu-west-3"})
    assert call(store, server, "head").method == "HEAD"
    assert regions(server) == ["us-east-1", "eu-west-3"]


def test_head_finds_the_region_that_only_another_answer_names(open_s3, server):
    store = open_s3()
    server.answer(server.Answer(400), server.Answer(400, body=MALFORMED))  # to HEAD, to GET
    whole = {"ETag": '"tag"', "Content-Range": "bytes 0-0/9"}
    server.answer(status=206, headers=whole, body=b"d")
    assert store.head("run/object").size == 9
    assert regions(server) == ["us-east-1", "us-east-1", "eu-west-3"]


def test_the_regions_of_machine_and_bucket_are_known_once_the_store_was_followed(open_s3, server):
    store = open_s3()
    assert store.regions() is None  # of another endpoint than Amazon's
    server.answer(status=400, headers={"x-amz-bucket-region": "eu-west-3"}, body=MALFORMED)
    call(store, server, "put")
    assert store.regions() == ("us-east-1", "eu-west-3")
    assert len(server.requests) == 2


@pytest.mark.parametrize("region", [None, "eu-west-3", "us-east-1"])
def test_a_region_that_was_given_is_that_of_the_bucket(monkeypatch, region):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    store = S3Store("bucket", Config(s3=S3Options(region=region)))
    assert store.regions() == ("us-east-1", region or "us-east-1")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert store.regions() is None


@pytest.mark.parametrize("region", ["us-east-1", "", "evil.example/", "-", "a" * 64])
def test_a_region_that_leads_nowhere_is_not_followed(open_s3, server, region):
    server.respond(
        lambda request: server.Answer(
            301, {"x-amz-bucket-region": region}, error_xml("PermanentRedirect")
        )
    )
    with pytest.raises(WrongRegionError):
        put(open_s3())
    assert len(server.requests) == 1


def test_a_bucket_that_is_always_elsewhere_is_followed_once_a_request(open_s3, server):
    answers = itertools.cycle(["eu-west-3", "us-east-1"])
    server.respond(
        lambda request: server.Answer(
            301, {"x-amz-bucket-region": next(answers)}, error_xml("PermanentRedirect")
        )
    )
    with pytest.raises(WrongRegionError, match="AWS_REGION=us-east-1") as caught:
        put(open_s3())
    assert caught.value.region == "us-east-1"
    assert pickle.loads(pickle.dumps(caught.value)).region == "us-east-1"
    assert len(server.requests) == 2


def test_many_threads_follow_a_bucket_together(open_s3, server):
    store = open_s3()

    def answer(request):
        if "/us-east-1/" in request.headers["Authorization"]:
            return server.Answer(400, body=MALFORMED)
        return server.Answer(headers={"ETag": '"tag"'})

    server.respond(answer)
    with ThreadPoolExecutor(8) as pool:
        tags = [info.version for info in pool.map(lambda i: put(store, f"run/{i}"), range(24))]
    assert tags == ['"tag"'] * 24
    assert len(server.requests) <= 24 + 8


def test_a_write_that_fails_in_the_right_region_is_as_certain_as_both_answers(open_s3, server):
    server.answer(status=301, headers={"x-amz-bucket-region": "eu-west-3"})  # anybody's answer
    server.answer(status=412, body=error_xml("PreconditionFailed"))
    with pytest.raises(PreconditionFailedError) as caught:
        put(open_s3())
    assert not caught.value.certain


@pytest.mark.parametrize("anonymous", [False, True])
def test_on_aws_the_bucket_is_followed_to_another_host(anonymous):
    options = S3Options(region="us-east-1", anonymous=anonymous)
    access = BucketAccess("bucket", Config(s3=options), "s3://bucket")
    urls = [f"{access.base}run/object?partNumber=1", f"{access.bucket_url}?delete"]
    assert [access.address(url) for url in urls] == urls
    assert access.follow("eu-west-3", access.region)
    host = "https://bucket.s3.eu-west-3.amazonaws.com/"
    assert [access.address(url) for url in urls] == [
        f"{host}run/object?partNumber=1",
        f"{host}?delete",
    ]
    assert access.region == "eu-west-3"
    assert not access.follow("eu-west-3", access.region)


@pytest.mark.parametrize(
    "page", [b"<html><body>Not Found</body></html>", b"<!DOCTYPE html><p>sign in", b"404 no page"]
)
def test_the_page_of_a_gateway_does_not_say_that_there_is_no_object(store, server, page):
    """A training job would begin anew over its checkpoints."""
    server.respond(lambda request: server.Answer(404, body=page))
    for look in (store.get, store.head):
        with pytest.raises(ServerError, match="answered in its place"):
            look("run/.metadata")


def test_a_head_that_names_no_length_is_asked_again(store, server):
    """The object would be taken for an empty one."""
    silent = server.Answer(headers={"ETag": '"tag"'}, framing="chunked")
    server.answer(silent, server.Answer(headers={"ETag": '"tag"'}, size=0))
    with pytest.raises(ConnectionLostError, match="no length"):
        store.head("run/object")
    assert store.head("run/object").size == 0


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_404_whose_page_is_cut_off_does_not_say_that_there_is_no_object(store, server, framing):
    cut = {"size": 300, "framing": framing, "unfinished": True, "hang_up": True}
    server.respond(lambda request: server.Answer(404, **cut))
    for look in (store.get, store.head, store.delete):
        with pytest.raises(ConnectionLostError):
            look("run/.metadata")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "NoSuchKey", ObjectNotFoundError),
        (404, "NoSuchBucket", BucketNotFoundError),
        (403, "AccessDenied", AccessDeniedError),
        (403, "ExpiredToken", CredentialsError),
        (503, "SlowDown", ThrottledError),
    ],
)
def test_head_finds_out_the_reason_that_its_answer_does_not_tell(
    store, server, status, code, expected
):
    server.respond(lambda request: server.Answer(status, body=error_xml(code)))
    with pytest.raises(StoreError) as caught:
        store.head("run/object")
    assert type(caught.value) is expected


def test_an_upload_that_is_not_there_is_aborted_in_peace(store, server):
    server.answer(status=404, body=error_xml("NoSuchUpload"))
    store.abort_upload(UPLOAD)
    assert server.requests[0].method == "DELETE"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [(403, "AccessDenied", AccessDeniedError), (404, "NoSuchBucket", BucketNotFoundError)],
)
def test_an_abort_that_failed_is_told(store, server, status, code, expected):
    server.answer(status=status, body=error_xml(code))
    with pytest.raises(expected):
        store.abort_upload(UPLOAD)


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_a_completion_that_fails_behind_status_200_is_transient(store, server, code):
    server.answer(status=200, body=b'<?xml version="1.0" encoding="UTF-8"?>\n' + error_xml(code))
    with pytest.raises(TransientStoreError):
        store.complete_upload(UPLOAD, [Part(1, 4, '"tag"', CRC)])


def test_a_key_that_could_not_be_deleted_is_named(store, server):
    server.answer(status=403, body=error_xml("AccessDenied"))
    with pytest.raises(AccessDeniedError) as caught:
        store.delete("run/b")
    assert caught.value.uri == "s3://bucket/run/b"


def test_an_object_that_ends_before_the_range_is_too_short(store, server):
    headers = {"ETag": '"tag"', "Content-Range": "bytes 0-1/2"}
    server.answer(status=206, headers=headers, body=b"da")
    with pytest.raises(RangeNotSatisfiableError):
        get_range(store)


@pytest.mark.parametrize(("span", "body"), [("5-8/9", b"data"), ("0-1/9", b"da"), ("0-8/9", b"")])
def test_other_bytes_than_were_asked_for_say_nothing_of_the_object(store, server, span, body):
    headers = {"ETag": '"tag"', "Content-Range": f"bytes {span}"}
    server.answer(status=206, headers=headers, body=body)
    with pytest.raises(ServerError, match="other bytes were offered"):
        get_range(store)


@pytest.mark.parametrize(
    "body", [b"", b" \n", b"Hello", b"<ok/>", b"<html>", b"<html><p>sign in</p></html>"]
)
@pytest.mark.parametrize("verb", ["list", "list_level", "list_uploads"])
def test_a_listing_that_is_none_is_no_empty_one(store, server, verb, body):
    """botocore would take it for one, and a training job begin anew over its checkpoints."""
    server.answer(body=body)
    with pytest.raises(ServerError, match="should be"):
        list(getattr(store, verb)("run/"))


@pytest.mark.parametrize(
    "head", [b"", b"<?xml version='1.0'?>\n", b"<!-- " + b"x" * 5000 + b" -->"]
)
def test_a_listing_is_known_by_its_root_wherever_that_is(store, server, head):
    server.answer(body=head + xml_of("ListBucketResult", IsTruncated="false"))
    assert list(store.list("run/")) == []


@pytest.mark.parametrize(
    ("verb", "root", "entry"),
    [
        ("list", "ListBucketResult", "<Contents><Key>run/a</Key></Contents>"),
        ("list", "ListBucketResult", "<Contents><Size>1</Size></Contents>"),
        ("list", "ListBucketResult", "<Contents><Key>run/a</Key><Size>many</Size></Contents>"),
        ("list_level", "ListBucketResult", "<CommonPrefixes></CommonPrefixes>"),
        ("list_uploads", "ListMultipartUploadsResult", "<Upload><Key>run/a</Key></Upload>"),
        ("list_uploads", "ListMultipartUploadsResult", "<Upload><UploadId>1</UploadId></Upload>"),
    ],
)
def test_an_entry_of_a_listing_that_lacks_a_field_is_an_unreadable_answer(
    store, server, verb, root, entry
):
    server.answer(body=f"<{root}><IsTruncated>false</IsTruncated>{entry}</{root}>".encode())
    with pytest.raises(ServerError, match="not what it should be") as caught:
        list(getattr(store, verb)("run/"))
    assert caught.value.uri == "s3://bucket/run/"


@pytest.mark.parametrize("token", ["", "<NextContinuationToken/>"])
def test_a_listing_that_goes_on_nowhere_is_ended(store, server, token):
    page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
    server.respond(lambda request: server.Answer(body=page.encode()))
    with pytest.raises(ServerError, match="leads nowhere"):
        list(store.list("run/"))
    assert len(server.requests) == 1


@pytest.mark.parametrize("tokens", ["a", "abc"])
def test_a_listing_that_leads_back_is_ended(store, server, tokens):
    again = itertools.cycle(tokens)

    def respond(request):
        more = {"IsTruncated": "true", "NextContinuationToken": next(again)}
        return server.Answer(body=xml_of("ListBucketResult", **more))

    server.respond(respond)
    with pytest.raises(ServerError, match="does not end"):
        list(store.list("run/"))
    assert len(server.requests) == len(tokens) + 1


@pytest.mark.parametrize("marks", [{}, {"NextKeyMarker": "a", "NextUploadIdMarker": "b"}])
def test_open_uploads_that_do_not_end_are_ended(store, server, marks):
    body = xml_of("ListMultipartUploadsResult", IsTruncated="true", **marks)
    server.respond(lambda request: server.Answer(body=body))
    with pytest.raises(ServerError, match="does not end"):
        list(store.list_uploads("run/"))
    assert len(server.requests) == (2 if marks else 1)


# answers that leave something out

PARTS = [Part(number, 4, f'"{number}"', CRC) for number in (1, 2)]
NAMED = dataclasses.replace(UPLOAD, attempt="0123456789abcdef")
SILENT = [
    xml_of("CompleteMultipartUploadResult", Key="run/object", ETag=""),
    xml_of("CompleteMultipartUploadResult", Key="run/object"),
    b"",
    b"  \n",
]


@pytest.mark.parametrize("answer", SILENT)
def test_a_completion_that_names_no_etag_is_looked_up(store, server, caplog, answer):
    server.answer(body=answer)
    found = {"ETag": '"tag"', "X-Amz-Meta-Cloudckptattempt": NAMED.attempt}
    server.answer(headers=found, size=8)
    info = store.complete_upload(NAMED, PARTS)
    assert (info.size, info.version) == (8, '"tag"')
    assert [request.method for request in server.requests] == ["POST", "HEAD"]
    assert caplog.records == []


@pytest.mark.parametrize(
    "found",
    [
        {"headers": {"ETag": '"tag"'}, "size": 8},  # of who knows whom
        {"headers": {"ETag": '"tag"', "x-amz-meta-cloudckptattempt": "f" * 16}, "size": 8},
        {"status": 404},
        {"status": 403},
        {"status": 503},
    ],
)
def test_a_completion_without_its_object_is_tried_again(store, server, found):
    server.answer(body=SILENT[0])
    server.respond(lambda request: server.Answer(**found))
    with pytest.raises(ServerError) as caught:
        store.complete_upload(NAMED, PARTS)
    assert caught.value.uri == "s3://bucket/run/object"


def test_a_written_object_that_is_not_named_is_looked_up(store, server):
    server.answer(status=200)
    server.answer(headers={"ETag": '"tag"'}, size=4)
    assert put(store, if_absent=True).version == '"tag"'
    assert [request.method for request in server.requests] == ["PUT", "HEAD"]


def test_a_store_that_ignores_a_range_is_asked_again(store, server):
    whole = {"status": 200, "headers": {"ETag": '"tag"'}, "body": b"another length"}
    server.answer(**whole)
    server.answer(**whole)
    server.answer(**VERBS["get_range"][1])
    retrier = Retrier(RetryPolicy(attempts=3, base=0.0, cap=0.0))
    assert retrier.call(lambda: get_range(store)) == b"data"


def test_a_store_that_always_ignores_ranges_is_named(store, server):
    server.answer(status=200, headers={"ETag": '"tag"'}, body=b"another length")
    with pytest.raises(ServerError, match="ignored the Range header"):
        get_range(store)


def test_a_range_that_is_the_whole_object_may_come_as_such(store, server):
    server.answer(status=200, headers={"ETag": '"tag"'}, body=b"data")
    assert get_range(store) == b"data"


@pytest.mark.parametrize("content_range", [None, "bytes 0-3/*", "nonsense"])
def test_an_unusable_content_range_is_a_broken_answer(store, server, content_range):
    headers = {"ETag": '"tag"'} | ({"Content-Range": content_range} if content_range else {})
    server.answer(status=206, headers=headers, body=b"data")
    with pytest.raises(TransientStoreError):
        get_range(store)


def test_a_stalled_object_is_given_up(open_s3, server):
    server.answer(
        status=206,
        headers={"ETag": '"tag"', "Content-Range": "bytes 0-99999/100000"},
        body=b"x" * 100_000,
        drip=True,
    )
    with pytest.raises(ConnectionLostError, match="stalled"):
        get_range(open_s3(stall_timeout=0.5), size=100_000)


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b""},
        {"body": b"", "size": 300, "hang_up": True},
        {"body": xml_of("CompleteMultipartUploadResult")},
    ],
)
def test_a_completion_without_a_result_is_transient(store, server, answer):
    server.answer(**answer)
    with pytest.raises(TransientStoreError):
        store.complete_upload(UPLOAD, [Part(1, 4, '"tag"', CRC)])


@pytest.mark.parametrize("body", [b"   \n", b'<?xml version="1.0"?>\n  ', b"<CompleteMultip"])
def test_a_completion_whose_result_breaks_off_is_transient(store, server, body):
    server.answer(body=body, size=500, hang_up=True)
    with pytest.raises(TransientStoreError):
        store.complete_upload(UPLOAD, [Part(1, 4, '"tag"', CRC)])


def test_an_upload_without_an_id_is_a_broken_answer(store, server):
    server.answer(body=b"", size=300, hang_up=True)
    with pytest.raises(TransientStoreError):
        store.create_upload("run/object", 5 * 1024**2)


# conditions


def test_a_version_that_is_gone_is_a_failed_condition_on_aws(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    options = S3Options(endpoint_url="http://s3.us-east-1.amazonaws.com")
    store = S3Store("bucket", Config(s3=options))
    server.respond(lambda request: server.Answer(412, body=error_xml("PreconditionFailed")))
    with pytest.raises(PreconditionFailedError):
        put(store, if_version='"old"')
    store.close()
    assert [request.headers["If-Match"] for request in server.requests] == ['"old"']


# secrets


def test_no_message_has_a_secret(open_s3, server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRETTOKEN")
    store = open_s3()
    body = (
        b"<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message><StringToSign>SECRETKEY"
        b"</StringToSign><SignatureProvided>SECRETTOKEN</SignatureProvided></Error>"
    )
    texts = []
    for answer in (
        server.Answer(403, body=body),
        server.Answer(500, body=b"SECRETKEY" * 10),
        server.Answer(mute=True),
    ):
        for function, _ in VERBS.values():
            server.reset_script()
            server.respond(lambda request, answer=answer: answer)
            with pytest.raises(StoreError) as caught:
                function(store)
            error = caught.value
            texts.append(f"{error} {error.__cause__} {json.dumps(vars(error), default=str)}")
    assert len(texts) == 3 * len(VERBS)
    for text in texts:
        assert "SECRET" not in text
        assert "AWS4-HMAC" not in text
