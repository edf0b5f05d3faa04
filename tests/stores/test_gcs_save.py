"""Checkpoints in Google's store, from the front door to the bucket."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import Config, GCSOptions, RetryPolicy
from cloudckpt.errors import CheckpointConflictError
from cloudckpt.stores.gcs.store import GCSStore
from dcp.layouts import LAYOUTS, check_local_parts, full_state, spread
from dcp.values import assert_same, blank_like, numbered
from support.stubs.gcs import GcsStub
from support.stubs.gcs_answers import RefusalError
from support.stubs.gcs_state import Attributes

URI = "gs://bucket/run/step-1"
PART = 5 * 1024**2


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def config(stub):
    options = GCSOptions(endpoint_url=stub.url, checksum="on")
    retry = RetryPolicy(attempts=4, base=0.001, cap=0.01, deadline=20.0)
    return Config(connections=4, part_size=PART, retry=retry, gcs=options)


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


def test_what_was_saved_is_loaded(stub, config):
    save(state_of(3), config)
    assert_same(loaded(config), state_of(3))
    keys = stub.state.keys("bucket")
    assert len(keys) == 3  # what is sent as it lies, what is packed, the metadata
    assert not stub.state.uploads


def test_a_checkpoint_is_replaced_and_leaves_nothing_behind(stub, config):
    save(state_of(3), config)
    old = set(stub.state.keys("bucket"))
    save(state_of(4), config)
    assert_same(loaded(config), state_of(4))
    new = set(stub.state.keys("bucket"))
    assert old & new == {"run/step-1/.metadata"}
    assert len(new) == 3


def test_of_two_writers_one_is_told(stub, config, monkeypatch):
    put, others = GCSStore.put, []

    def put_late(self, key, *arguments, **named):
        if key.endswith("/.metadata") and not others:
            others.append(key)
            save(state_of(7), config)
        return put(self, key, *arguments, **named)

    monkeypatch.setattr(GCSStore, "put", put_late)
    with pytest.raises(CheckpointConflictError):
        save(state_of(3), config)
    assert_same(loaded(config), state_of(7))
    assert len(stub.state.keys("bucket")) == 3
    assert not stub.state.uploads


def is_commit(request):
    return request.query.get("name", "").endswith("/.metadata")


BREAKS = {
    "look": lambda request: request.method == "GET" and request.path.endswith(".metadata"),
    "beginning": lambda request: "uploads" in request.query,
    "part": lambda request: request.query.get("partNumber") == "2",
    "completion": lambda request: request.method == "POST" and "uploadId" in request.query,
    "object": lambda request: request.query.get("name", "").endswith(".distcp"),
    "commit": is_commit,
    "read": lambda request: request.query.get("alt") == "media",
}


@pytest.mark.parametrize("carry_out", [True, False])
@pytest.mark.parametrize("at", BREAKS)
def test_a_connection_that_breaks_anywhere_is_survived(stub, config, at, carry_out):
    broken = []

    def matches(request):
        is_first = not broken and BREAKS[at](request)
        broken.extend([request] if is_first else [])
        return is_first

    stub.state.inject(matches, None, carry_out=carry_out)
    save(state_of(3), config)
    assert_same(loaded(config), state_of(3))
    assert broken
    assert len(stub.state.keys("bucket")) == 3
    assert not stub.state.uploads


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


def written_by_torch(state, folder, values):
    """Puts a checkpoint of torch's own writer there, whose names are the same each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    for file in folder.iterdir():
        state.put("bucket", f"run/step-1/{file.name}", file.read_bytes(), Attributes())


def test_a_cached_checkpoint_of_torch_does_not_come_back(public, config, tmp_path):
    for first in (3, 4):
        written_by_torch(public, tmp_path / str(first), state_of(first))
        for _ in range(2):
            assert_same(loaded(config), state_of(first))


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


def test_a_commit_whose_answer_was_lost_and_that_others_have_replaced_is_a_conflict(
    public, config, monkeypatch
):
    save(state_of(3), config)
    written_without_cache_control(public)
    loaded(config)
    public.inject(is_commit, None)
    put, others = GCSStore.put, []

    def put_late(self, key, *arguments, **named):
        try:
            return put(self, key, *arguments, **named)
        finally:
            if key.endswith("/.metadata") and not others:
                others.append(key)
                save(state_of(7), config)

    monkeypatch.setattr(GCSStore, "put", put_late)
    with pytest.raises(CheckpointConflictError):
        save(state_of(4), config)
    assert_same(loaded(config), state_of(7))
    assert len(public.keys("bucket")) == 3


@pytest.mark.parametrize(("of_bucket", "wanted"), [("NEARLINE", None), ("STANDARD", "COLDLINE")])
def test_a_checkpoint_has_the_storage_class_that_is_wanted(stub, config, of_bucket, wanted):
    stub.state.storage_class = of_bucket
    options = dataclasses.replace(config.gcs, storage_class=wanted)
    config = dataclasses.replace(config, gcs=options)
    save(state_of(3), config)
    assert_same(loaded(config), state_of(3))
    found = {stored.attributes.storage_class for stored in stub.state.objects.values()}
    assert found == {wanted or of_bucket}


def _save_and_load_in_other_layouts(config):
    cloudckpt.save(spread(full_state(), LAYOUTS["2 rows"]), checkpoint_id=URI, config=config)
    state = spread(full_state(), LAYOUTS["2 columns"], blank=True)
    cloudckpt.load(state, checkpoint_id=URI, config=config)
    check_local_parts(state, LAYOUTS["2 columns"])


def test_two_ranks_load_in_another_layout(config, ranks):
    assert ranks(2, _save_and_load_in_other_layouts, config) == [None, None]


NOT_THERE = RefusalError(501, "notImplemented", "Not implemented", "NotImplemented")


class Sparse(GcsStub):
    """The stub as an emulator: without XML multipart uploads.

    Attributes:
        ignores: How many ranges are yet to be ignored.
    """

    ignores = 0

    def answer(self, call):
        if "uploads" in call.request.query:
            self.state.injected(call.request)
            return NOT_THERE.as_json()
        if "range" in call.request.headers and self.ignores > 0:
            self.ignores -= 1
            call.request.headers.pop("range")
        return super().answer(call)


@pytest.fixture
def sparse():
    with Sparse("bucket") as running:
        yield running


def sparse_config(sparse, attempts=1, part_size=5 * 1024**3):
    options = GCSOptions(endpoint_url=sparse.url)
    retry = RetryPolicy(attempts=attempts, base=0.0, cap=0.0)
    return Config(connections=4, part_size=part_size, retry=retry, gcs=options)


def test_a_store_without_multipart_uploads_has_none_open(sparse):
    store = GCSStore("bucket", sparse_config(sparse))
    assert list(store.list_uploads("run/")) == []
    store.close()


def test_ranges_that_are_ignored_now_and_then_are_asked_for_again(sparse):
    config = sparse_config(sparse, attempts=3)
    save(state_of(3), config)
    sparse.ignores = 2
    assert_same(loaded(config), state_of(3))
    assert sparse.ignores == 0
