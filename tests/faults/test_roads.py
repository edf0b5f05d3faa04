"""The roads to a store: proxies, versions of TLS, certificates. Each carries a save and a load.

Where a road ends at a server that can't be trusted, the error says so at once.
"""

import ssl
from contextlib import ExitStack

import pytest
from botocore.config import Config as BotoConfig

import cloudckpt
from cloudckpt.errors import ConnectionLostError, TLSError
from cloudckpt.stores.s3 import endpoint as s3_endpoint
from support.authority import Authority
from support.forwarding import forward_proxy
from support.wire.faults import Stall
from support.wire.proxy import FaultyProxy

from .dialects import Endpoint
from .states import BIG, filled, impatient, load_step, silence

ROADS = ["http proxy", "https proxy", "TLS 1.2", "TLS 1.3", "client certificate", "own authority"]
STALLING = ["http proxy", "TLS 1.2"]  # they differ in what is before the socket
CONTENT = BIG // 2  # bytes that pass before a stall


@pytest.fixture
def open_road(s3_url, authority, monkeypatch):
    """Makes a road; returns the server at its end, which can be broken, and the forward proxy."""
    with ExitStack() as stack:

        def open_road(road: str = "own authority", certificate: str | None = None):
            tls, forward = authority.server(certificate), None
            if road == "TLS 1.2":
                tls.maximum_version = ssl.TLSVersion.TLSv1_2
            elif road == "TLS 1.3":
                tls.minimum_version = ssl.TLSVersion.TLSv1_3
            elif road == "client certificate":
                tls.verify_mode = ssl.CERT_REQUIRED
                tls.load_verify_locations(authority.bundle)
                show(authority.issue(host="client"), monkeypatch)
            elif road.endswith("proxy"):
                context = authority.server() if road == "https proxy" else None
                forward = stack.enter_context(forward_proxy(context))
                monkeypatch.setenv("HTTPS_PROXY", forward.url)
            monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
            return stack.enter_context(FaultyProxy(s3_url, tls=tls)), forward

        yield open_road


def show(certificate: str, monkeypatch) -> None:
    """boto3 takes a client's certificate in its Config alone, which is made by us."""
    usual, shown = s3_endpoint._boto_config, BotoConfig(client_cert=certificate)
    monkeypatch.setattr(s3_endpoint, "_boto_config", lambda given: usual(given).merge(shown))


@pytest.fixture
def uri(store) -> str:
    return store.uri("run/latest")


def save(step: int, uri: str, end: FaultyProxy, **options) -> None:
    config = impatient(Endpoint("s3", end.url), **options)
    cloudckpt.save(filled(step), checkpoint_id=uri, config=config)


def load(uri: str, end: FaultyProxy, **options) -> int:
    return load_step(uri, impatient(Endpoint("s3", end.url), **options))


class TestRoads:
    @pytest.mark.parametrize("road", ROADS)
    def test_a_checkpoint_is_saved_and_loaded(self, open_road, uri, road):
        end, forward = open_road(road)
        save(1, uri, end)
        assert load(uri, end) == 1
        assert {*(forward.tunnels if forward else ())} <= {end.url.removeprefix("https://")}
        assert (forward is None) or forward.tunnels

    @pytest.mark.timeout(150)
    @pytest.mark.parametrize("road", STALLING)
    def test_a_save_that_stalls_in_the_middle_ends_and_the_next_one_works(
        self, open_road, uri, road
    ):
        end, _ = open_road(road)
        save(1, uri, end)
        once = cloudckpt.RetryPolicy(attempts=1)
        rule = end.inject(Stall("request", CONTENT), operation="UploadPart")
        with pytest.raises(ConnectionLostError, match="_timeout"):
            save(2, uri, end, **silence(), retry=once)
        assert rule.injected > 0
        end.clear()
        assert load(uri, end) == 1
        save(3, uri, end)
        assert load(uri, end) == 3


@pytest.mark.parametrize("road", ["http proxy", "https proxy", "own authority"])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"host": "elsewhere.example"}, "not valid for '127.0.0.1'|doesn't match"),
        ({"expired": True}, "expired"),
    ],
    ids=["another host's", "expired"],
)
def test_a_certificate_that_does_not_hold_is_refused_before_anything_is_sent(
    open_road, authority, uri, road, wrong, why
):
    end, _ = open_road(road, authority.issue(**wrong))
    named = f"certificate of {end.url.removeprefix('https://')} is not trusted.*({why})"
    with pytest.raises(TLSError, match=named):
        save(1, uri, end)
    with pytest.raises(TLSError, match=named):
        load(uri, end)
    assert end.requests() == []


def test_a_proxy_with_a_certificate_of_an_unknown_authority_is_refused(
    open_road, uri, tmp_path, monkeypatch
):
    stranger = Authority(tmp_path)
    end, _ = open_road()
    with forward_proxy(stranger.server()) as forward:
        monkeypatch.setenv("HTTPS_PROXY", forward.url)
        with pytest.raises(TLSError, match=r"certificate of the proxy for .* is not trusted"):
            save(1, uri, end)
    assert end.requests() == []


@pytest.mark.parametrize("shown", ["none", "a stranger's"])
@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_a_server_that_wants_another_client_certificate_ends_a_save_at_once(
    s3_url, authority, uri, tmp_path, monkeypatch, shown, version
):
    tls = authority.server()
    tls.minimum_version = tls.maximum_version = ssl.TLSVersion[version]
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(authority.bundle)
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
    if shown != "none":
        show(Authority(tmp_path).issue(), monkeypatch)
    with FaultyProxy(s3_url, tls=tls) as end, pytest.raises(TLSError, match="client certificate"):
        save(1, uri, end)


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
def test_an_authority_of_ones_own_is_trusted_if_it_is_named(
    s3_url, authority, uri, monkeypatch, variable
):
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with FaultyProxy(s3_url, tls=authority.server()) as end:
        with pytest.raises(TLSError, match=variable):
            save(1, uri, end)
        monkeypatch.setenv(variable, authority.bundle)
        again = {"read_timeout": 29.0}  # another store, which looks at the variables anew
        save(1, uri, end, **again)
        assert load(uri, end, **again) == 1
