"""Checkpoints in Google's store, from the front door to the bucket."""

import dataclasses

import pytest
import torch

import cloudckpt
from cloudckpt import Config, GCSOptions, RetryPolicy
from dcp.values import assert_same, blank_like, numbered
from support.stubs.gcs import GcsStub

URI = "gs://bucket/run/step-1"
PART = 5 * 1024**2


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def config(stub):
    options = GCSOptions(endpoint_url=stub.url)
    retry = RetryPolicy(attempts=4, base=0.001, cap=0.01, deadline=20.0)
    return Config(connections=4, part_size=PART, retry=retry, gcs=options, checksum="on")


def state_of(first=0):
    """An object of three parts, and one of what is packed."""
    return {
        "large": numbered(11 * 2**17 - 5, dtype=torch.int64, first=first),
        "small": numbered(7, 5, first=first),
        "step": first,
    }


def save(state, config):
    cloudckpt.save(state, checkpoint_id=URI, config=config, no_dist=True)


def loaded(config):
    state = blank_like(state_of())
    cloudckpt.load(state, checkpoint_id=URI, config=config, no_dist=True)
    return state


def is_commit(request):
    return request.query.get("name", "").endswith("/.metadata")


# a bucket that everybody may read, whose data is cached for an hour


@pytest.fixture
def public(stub):
    stub.state.public = True
    return stub.state


def written_without_cache_control(state):
    """Makes the objects those of a writer that leaves the cache alone."""
    for name, stored in state.objects.items():
        attributes = dataclasses.replace(stored.attributes, cache_control=None)
        state.objects[name] = dataclasses.replace(stored, attributes=attributes)


@pytest.mark.parametrize("written_by", ["us", "others"])
def test_a_cached_checkpoint_does_not_come_back(public, config, written_by):
    for first in (3, 4, 5):
        save(state_of(first), config)
        if written_by == "others":
            written_without_cache_control(public)
        for _ in range(2):
            assert_same(loaded(config), state_of(first))
    assert len(public.keys("bucket")) == 3


def test_nothing_that_is_written_may_be_cached(public, config):
    save(state_of(3), config)
    loaded(config)
    found = {stored.attributes.cache_control for stored in public.objects.values()}
    assert found == {"no-store"}


@pytest.mark.parametrize("written_by", ["us", "others"])
@pytest.mark.parametrize("second", ["carried out", "not carried out"])
def test_a_commit_whose_answer_was_lost_is_not_looked_for_in_a_cache(
    public, config, written_by, second
):
    save(state_of(3), config)
    if written_by == "others":
        written_without_cache_control(public)
    loaded(config)
    public.inject(is_commit, None, carry_out=True)
    if second == "not carried out":
        public.inject(is_commit, 503)
    save(state_of(4), config)
    assert_same(loaded(config), state_of(4))
    assert len(public.keys("bucket")) == 3
