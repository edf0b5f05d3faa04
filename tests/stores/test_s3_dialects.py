"""What the stores with S3's API do differently, row by row.

No vendor's store is asked here. Each row has a stub, made of its documentation: moto, or the
scripted server of ``conftest.py``, with what the vendor says that it does otherwise.
"""

import dataclasses
from typing import get_args, get_type_hints

import pytest

from cloudckpt import Config, S3Options
from cloudckpt.errors import ConfigError, PreconditionFailedError
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3_dialects import AWS, DIALECTS, EXPRESS, dialect_of

# which row


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "aws"),
        ("https://s3.cn-north-1.amazonaws.com.cn", "aws"),
        ("https://account.r2.cloudflarestorage.com", "r2"),
        ("https://account.eu.r2.cloudflarestorage.com", "r2"),
        ("https://cwobject.com", "coreweave"),
        ("http://cwlota.com", "coreweave"),
        ("https://ns.compat.objectstorage.eu-frankfurt-1.oraclecloud.com", "oracle"),
        ("https://ns.compat.objectstorage.us-phoenix-1.oci.customer-oci.com", "oracle"),
        ("https://storage.googleapis.com", "google"),
        ("https://s3.hf.co/namespace", "huggingface"),
        ("http://minio:9000", "other"),
        ("https://r2.cloudflarestorage.com.example", "other"),
        ("https://nots3.hf.co.example", "other"),
        ("https://notcwobject.com", "other"),
    ],
)
def test_a_store_is_known_by_its_endpoint(endpoint, name):
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=endpoint)))
    store.close()
    assert store._access.dialect is DIALECTS[name]
    assert store.capabilities.conditional_writes is DIALECTS[name].conditional_writes
    assert store.capabilities.verifies is DIALECTS[name].verifies_checksums


@pytest.mark.parametrize("name", DIALECTS)
def test_the_user_may_say_whose_store_it_is(name):
    assert name in get_args(get_type_hints(S3Options)["dialect"])
    options = S3Options(endpoint_url="http://store.example", dialect=name, region="us-east-1")
    store = S3Store("bucket", Config(s3=options))
    store.close()
    assert store._access.dialect is DIALECTS[name]


def test_every_value_of_the_option_is_a_row():
    assert {*get_args(get_type_hints(S3Options)["dialect"])} == {"auto", *DIALECTS}


def test_a_directory_bucket_is_known_by_its_name():
    assert dialect_of("fast--usw2-az1--x-s3", "s3.amazonaws.com", is_amazon=True) is EXPRESS
    assert dialect_of("x-s3", "s3.amazonaws.com", is_amazon=True) is AWS


@pytest.mark.parametrize("name", ["r2", "minio"])
def test_options_win_over_the_row(name):
    wanted = S3Options(endpoint_url="http://store.example", dialect=name, checksum="on")
    for checksum in ("on", "off"):
        store = S3Store("bucket", Config(s3=dataclasses.replace(wanted, checksum=checksum)))
        store.close()
        assert store.capabilities.verifies is (checksum == "on")


@pytest.mark.parametrize(
    ("endpoint", "given", "url"),
    [
        ("http://cwlota.com", None, "http://bucket.cwlota.com/"),
        ("http://cwlota.com", "path", "http://cwlota.com/bucket"),
        ("https://s3.hf.co/me", None, "https://s3.hf.co/me/bucket"),
    ],
)
def test_a_bucket_is_addressed_as_its_vendor_demands(endpoint, given, url):
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=endpoint, addressing_style=given)))
    store.close()
    assert store.route().url == url


def test_the_style_of_the_profile_wins_over_that_of_the_row(tmp_path, monkeypatch):
    file = tmp_path / "config"
    file.write_text("[default]\ns3 =\n  addressing_style = path\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url="http://cwlota.com")))
    store.close()
    assert store.route().url == "http://cwlota.com/bucket"


@pytest.mark.parametrize(
    ("bucket", "options", "named"),
    [
        ("b", {"endpoint_url": "https://s3.hf.co/me", "sse": "AES256"}, "sse: Hugging Face"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(bucket, options, named):
    with pytest.raises(ConfigError, match=named):
        S3Store(bucket, Config(s3=S3Options(**options)))


# deletions


@pytest.mark.parametrize("name", [n for n, row in DIALECTS.items() if not row.conditional_deletes])
def test_a_condition_that_would_be_ignored_is_looked_at_before(server, name):
    """The stub is a store that deletes whatever the condition is."""
    server.respond(lambda request: server.Answer(headers={"ETag": '"new"'}, size=0))
    options = S3Options(endpoint_url=server.url, addressing_style="path", dialect=name)
    store = S3Store("bucket", Config(s3=options))
    store.delete("key", if_version='"new"')
    looks = DIALECTS[name].conditional_deletes is False
    sent = [(request.method, request.headers["If-Match"]) for request in server.requests]
    assert sent == ([("HEAD", None), ("DELETE", None)] if looks else [("DELETE", '"new"')])
    if looks:
        with pytest.raises(PreconditionFailedError) as caught:
            store.delete("key", if_version='"old"')
        assert caught.value.certain
        assert server.requests[-1].method == "HEAD"
        server.respond(lambda request: server.Answer(404))
        store.delete("key", if_version='"old"')  # it is gone, which is what was wanted
    store.close()
