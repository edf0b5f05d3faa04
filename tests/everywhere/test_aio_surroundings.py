"""From an event loop stores are reached as from a thread: credentials, regions, TLS, proxies."""

import asyncio
import dataclasses
import subprocess
import sys

import pytest

from cloudckpt import S3Options, aio
from cloudckpt.errors import CredentialsError, TLSError
from cloudckpt.stores import registry
from faults.refusals import Refusal
from support.authority import Authority
from support.forwarding import ForwardProxy
from support.wire.faults import Stall
from support.wire.proxy import FaultyProxy

from .conftest import on
from .test_aio import _nothing_stays_open, commit  # noqa: F401 - a fixture


@pytest.fixture
def fresh(place, monkeypatch):
    """Options whose store nobody has opened before."""
    monkeypatch.setattr(registry, "_places", {})
    return place.shaky


def is_there(place, config) -> bool:
    return asyncio.run(aio.exists(f"{place.uri}/step-1", config=config))


@on["s3"]
def test_credentials_that_were_replaced_are_used_at_once(place, fresh, monkeypatch) -> None:
    commit(place, 1)
    assert is_there(place, fresh)
    place.proxy.inject(Refusal("expired token"), times=1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ANOTHERKEY")
    assert is_there(place, fresh)
    used = [request.header("Authorization") for request in place.proxy.requests()]
    assert ["ANOTHERKEY" in text for text in used] == [False, False, True]


@on["s3 google azure"]
def test_credentials_that_stay_refused_are_told(place, fresh) -> None:
    place.proxy.inject(Refusal("expired token"))
    with pytest.raises(CredentialsError):
        is_there(place, fresh)


@on["s3"]
def test_a_bucket_in_another_region_is_followed(place, fresh) -> None:
    commit(place, 1)
    place.proxy.inject(Refusal("wrong region"), times=1)
    assert is_there(place, fresh)
    used = [request.header("Authorization") for request in place.proxy.requests()]
    assert ["eu-north-1" in text for text in used] == [False, True]
    assert is_there(place, fresh)  # it is remembered
    assert "eu-north-1" in place.proxy.requests()[-1].header("Authorization")


@on["s3"]
def test_https_trusts_what_the_user_trusts(place, fresh, s3_url, tmp_path, monkeypatch) -> None:
    commit(place, 1)
    authority = Authority(tmp_path)
    with FaultyProxy(s3_url, tls=authority.server()) as proxy:
        options = S3Options(endpoint_url=proxy.url, addressing_style="path")
        config = dataclasses.replace(fresh, s3=options)
        with pytest.raises(TLSError, match="not trusted"):
            is_there(place, config)
        monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
        monkeypatch.setattr(registry, "_places", {})
        assert is_there(place, config)


@on["s3"]
def test_a_proxy_of_the_environment_is_used(place, fresh, s3_url, tmp_path, monkeypatch) -> None:
    commit(place, 1)
    authority, way = Authority(tmp_path), ForwardProxy()
    try:
        with FaultyProxy(s3_url, tls=authority.server()) as server:
            monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
            monkeypatch.setenv("HTTPS_PROXY", way.url)
            options = S3Options(endpoint_url=server.url, addressing_style="path")
            assert is_there(place, dataclasses.replace(fresh, s3=options))
    finally:
        way.close()
    assert way.tunnels == [server.url.removeprefix("https://")]


SCRIPT = """
import asyncio, sys
from cloudckpt import Config, S3Options, aio

async def main(url):
    config = Config(s3=S3Options(endpoint_url=url, addressing_style="path"))
    try:
        await asyncio.wait_for(aio.exists("s3://bucket/run", config=config), 3)
    except asyncio.TimeoutError:
        print("cancelled")

asyncio.run(main(sys.argv[1]))
"""


@on["s3"]
def test_a_process_that_ends_amid_a_question_says_nothing_of_it(place) -> None:
    place.proxy.inject(Stall("answer"))
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", SCRIPT, place.proxy.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "cancelled\n"
    assert "nclosed" not in ended.stderr
    assert "never" not in ended.stderr
