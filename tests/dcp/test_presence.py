"""Asking whether there is a checkpoint, and being told which there are when there is none here."""

import logging

import pytest
import torch

import cloudckpt
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ServerError,
)
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore

STATE = {"t": torch.ones(3)}


def test_asking_says_nothing_and_takes_one_request(s3, caplog):
    store = open_store(CheckpointURI.parse(s3.uri), s3.config)
    requests, inner = [], store.exchange
    store.exchange = lambda method, url, *args, **kw: (
        requests.append((method, url)) or inner(method, url, *args, **kw)
    )
    try:
        with caplog.at_level(logging.DEBUG, "cloudckpt"):
            assert not cloudckpt.exists(s3.uri, config=s3.config)
            assert len(requests) == 1
            assert [r for r in caplog.records if r.levelno >= logging.INFO] == []
        s3.save(STATE)
        requests.clear()
        assert cloudckpt.exists(s3.uri, config=s3.config)
        assert len(requests) == 1
    finally:
        del store.exchange


@pytest.mark.parametrize("error", [AccessDeniedError, ServerError])
def test_a_store_that_does_not_answer_says_nothing_of_a_checkpoint(error, local, monkeypatch):
    uri = CheckpointURI.parse(local.uri)
    store = FaultyStore(open_store(uri, local.config))
    store.fail("get_range", error, calls=range(1, 20))
    monkeypatch.setattr("cloudckpt.api.open_store", lambda *_: store)
    with pytest.raises(error):
        cloudckpt.exists(local.uri, config=local.config)


def test_the_last_checkpoints_beneath_a_run_are_named(place):
    for step in (5, 200, 1000, 30, 7, 9):
        place.at(f"step-{step}").save(STATE)
    with pytest.raises(CheckpointNotFoundError) as caught:
        place.load(STATE)
    told = str(caught.value)
    assert caught.value.uri == place.uri
    assert f"did you mean {place.uri}/step-1000?" in told
    assert f"{place.uri}/step-200, {place.uri}/step-30, {place.uri}/step-9" in told
    assert "step-7" not in told


def test_a_listing_that_is_refused_is_no_matter(local, monkeypatch):
    local.at("step-1").save(STATE)

    def refuse(*_):
        raise AccessDeniedError("no listing for you")
        yield

    store = open_store(CheckpointURI.parse(local.uri), local.config)
    monkeypatch.setattr(type(store), "list", refuse)
    with pytest.raises(CheckpointNotFoundError, match="interrupted"):
        local.load(STATE)
