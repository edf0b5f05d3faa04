"""Requests without payload are sent as any other: once, and what comes of them is told as it is."""

import threading

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    ThrottledError,
)
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.s3.store import S3Store

FOUND = ObjectInfo("run/source", 100, "17")
CALLS = {
    "s3 list": ("s3", lambda store: list(store.list("run/"))),
    "s3 list_level": ("s3", lambda store: list(store.list_level("run/"))),
    "s3 list_uploads": ("s3", lambda store: list(store.list_uploads("run/"))),
    "s3 delete": ("s3", lambda store: store.delete("run/object")),
    "s3 copy": ("s3", lambda store: store.copy(store, FOUND, "run/copy")),
    "gs list": ("gs", lambda store: list(store.list("run/"))),
    "gs list_level": ("gs", lambda store: list(store.list_level("run/"))),
    "gs delete": ("gs", lambda store: store.delete("run/object")),
    "gs copy": ("gs", lambda store: store.copy(store, FOUND, "run/copy")),
    "az delete": ("az", lambda store: store.delete("run/object")),
    "az copy": ("az", lambda store: store.copy(store, FOUND, "run/copy")),
}


@pytest.fixture
def open_at(server, opened, azure_key):
    """Opens the store of a cloud on the stub."""

    def open_one(cloud, **limits):
        config = Config(
            s3=S3Options(endpoint_url=server.url, addressing_style="path"),
            gcs=GCSOptions(endpoint_url=server.url),
            azure=AzureOptions(endpoint_url=f"{server.url}/account"),
            **limits,
        )
        return opened({"s3": S3Store, "gs": GCSStore, "az": AzureStore}[cloud]("bucket", config))

    return open_one


@pytest.fixture(params=CALLS)
def called(request, open_at):
    """A store on the stub, and a call."""
    cloud, call = CALLS[request.param]
    return open_at(cloud, read_timeout=30.0), call


def test_a_refusal_for_the_moment_is_told_at_once(called, server):
    store, call = called
    server.respond(lambda request: server.Answer(429, {"Retry-After": "7"}))
    with pytest.raises(ThrottledError) as caught:
        call(store)
    assert caught.value.retry_after == 7
    assert len(server.requests) == 1
    assert server.requests[0].headers["User-Agent"].startswith("cloudckpt/")


def test_a_lost_answer_is_told_and_does_not_mean_that_nothing_was_done(called, server):
    store, call = called
    server.answer(mute=True)
    with pytest.raises(ConnectionLostError) as caught:
        call(store)
    assert not caught.value.certain
    assert len(server.requests) == 1


@pytest.mark.parametrize("cloud", ["s3", "gs", "az"])
def test_an_answer_that_drips_is_given_up(server, cloud, open_at):
    server.respond(lambda request: server.Answer(body=b" " * 1000, size=100_000, drip=True))
    with pytest.raises(ConnectionLostError, match="stalled"):
        list(open_at(cloud, stall_timeout=1.0).list("run/"))


def test_a_call_that_waits_is_broken_off(called, server):
    store, call = called
    outcome, begun = [], threading.Event()

    def answer(request):
        begun.set()
        return server.Answer(silent=True)

    def work():
        try:
            call(store)
        except ConnectionLostError as error:
            outcome.append(error)

    server.respond(answer)
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    while thread.is_alive():
        store.interrupt([thread.ident])
        thread.join(0.05)
    assert len(outcome) == 1


def test_what_stops_a_request_before_it_is_sent_comes_out_as_it_is(called, server, monkeypatch):
    store, call = called

    def refuse(*arguments):
        raise CredentialsError("there are none")

    monkeypatch.setattr(store, "_authorize", refuse)
    with pytest.raises(CredentialsError, match="there are none") as caught:
        call(store)
    assert caught.value.certain
    assert caught.value.uri.startswith(store.root)
    assert server.requests == []
