"""A request whose answer was lost is refused when it is repeated: what counts is what is there.

Retention periods and holds forbid to replace an object, also by itself; an upload that is completed
is gone; a condition that there be no object does not hold any more.
"""

import dataclasses
import threading

import pytest
import torch

import cloudckpt
from cloudckpt import Config, GCSOptions, RetryPolicy
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
)
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from dcp.values import assert_same, blank_like, numbered
from support.stubs import gcs_answers as answers
from support.stubs.gcs import GcsStub
from support.stubs.gcs_answers import RefusalError
from support.stubs.gcs_multipart import related
from support.stubs.gcs_state import Attributes

URI = "gs://bucket/run/step-1"
STATE = {"large": numbered(11 * 2**17 - 5, dtype=torch.int64), "small": numbered(7, 5)}

REFUSALS = {
    "retention": (answers.retained("bucket", "object", "2027-01-01T00:00:00Z"), AccessDeniedError),
    "hold": (
        RefusalError(403, "objectUnderActiveHold", "on hold", "ObjectUnderActiveHold"),
        AccessDeniedError,
    ),
    "no permission": (answers.denied("storage.objects.delete"), AccessDeniedError),
    "conflict": (RefusalError(409, "conflict", "conflict", "OperationAborted"), ServerError),
    "condition": (answers.condition_not_met(), PreconditionFailedError),
    "gone": (answers.no_upload(), ObjectNotFoundError),
}


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def config(stub):
    options = GCSOptions(endpoint_url=stub.url, checksum="on")
    retry = RetryPolicy(attempts=3, base=0.01, cap=0.05, deadline=0.5)
    return Config(
        connections=4,
        part_size=5 * 1024**2,
        conditional_writes="on",
        retry=retry,
        gcs=options,
    )


def save(config):
    cloudckpt.save(STATE, checkpoint_id=URI, config=config, no_dist=True)


def check_loads(config):
    state = blank_like(STATE)
    cloudckpt.load(state, checkpoint_id=URI, config=config, no_dist=True)
    assert_same(state, STATE)


def is_data(request):
    return request.method == "POST" and request.query.get("name", "").endswith(".distcp")


def is_commit(request):
    return request.query.get("name", "").endswith("/.metadata")


def is_completion(request):
    """The one that makes the object of its parts."""
    return request.method == "POST" and "uploadId" in request.query


WRITES = {"data": is_data, "completion": is_completion}

# which error a repetition meets makes no difference to what is done: each of them once
repeated = pytest.mark.parametrize(
    ("write", "refusal"),
    [
        ("data", "retention"),
        ("data", "condition"),
        ("data", "hold"),
        ("data", "no permission"),
        ("completion", "conflict"),
        ("completion", "gone"),
    ],
)


def data_of(call):
    """The bytes of an insert."""
    return related(call.body, call.request.headers["content-type"])[2]


def lose_and_refuse(stub, matches, refusal, *, carry_out):
    """Loses the answer to the first request that matches, and refuses all repetitions of it."""
    lock, first = threading.Lock(), []

    def is_first(request):
        with lock:
            if not first and matches(request):
                first.append(request)
                return True
        return False

    def is_repeated(request):
        name = (request.method, request.path, request.query.get("name"))
        return any(name == (one.method, one.path, one.query.get("name")) for one in first)

    answer = refusal.as_xml() if matches is is_completion else refusal.as_json()
    stub.state.inject(is_first, None, carry_out=carry_out)
    stub.state.inject(is_repeated, answer.status, answer.headers, answer.body, times=1000)


@repeated
def test_what_was_written_by_a_try_whose_answer_was_lost_counts(stub, config, write, refusal):
    lose_and_refuse(stub, WRITES[write], REFUSALS[refusal][0], carry_out=True)
    save(config)
    check_loads(config)
    assert len(stub.state.keys("bucket")) == 3
    assert not stub.state.uploads


@repeated
def test_a_refusal_of_what_is_not_there_is_told_by_its_name(stub, config, write, refusal):
    answer, expected = REFUSALS[refusal]
    lose_and_refuse(stub, WRITES[write], answer, carry_out=False)
    with pytest.raises(expected):
        save(config)
    assert stub.state.keys("bucket") == []


@pytest.mark.parametrize("refusal", ["retention", "condition"])
def test_a_commit_whose_answer_was_lost_counts(stub, config, refusal):
    lose_and_refuse(stub, is_commit, REFUSALS[refusal][0], carry_out=True)
    save(config)
    check_loads(config)


@pytest.mark.parametrize("wrong", ["size", "bytes"])
def test_an_object_of_other_bytes_is_not_taken_for_what_was_written(stub, config, wrong):
    """Nobody else writes under a random key: something between here and there has damaged it."""
    lost = []

    def answer(call, answered=stub.answer):
        if is_data(call.request) and not lost:
            lost.append(call.request)
            key = call.request.query["name"]
            size = 7 if wrong == "size" else len(data_of(call))
            stub.state.put("bucket", key, b"x" * size, Attributes())
            return None
        return answered(call)

    lose = REFUSALS["retention"][0].as_json()
    stub.state.inject(
        lambda request: bool(lost) and is_data(request),
        lose.status,
        lose.headers,
        lose.body,
        times=1000,
    )
    stub.answer = answer
    with pytest.raises(AccessDeniedError, match="retention"):
        save(config)


def test_a_completion_that_takes_its_time_is_waited_for(stub, config):
    """Its answer is lost, the upload is gone, and the object appears only later."""
    slow = dataclasses.replace(config, retry=dataclasses.replace(config.retry, deadline=30.0))
    asked = []

    def is_look(request):
        is_one = request.method == "GET" and request.path.endswith(".distcp") and bool(lost)
        asked.extend([request] if is_one else [])
        return is_one

    lost = []

    def is_lost(request):
        if is_completion(request) and not lost:
            lost.append(request)
            return True
        return False

    missing = answers.no_object("bucket", "object").as_json()
    stub.state.inject(is_lost, None, carry_out=True)
    stub.state.inject(is_look, missing.status, missing.headers, missing.body, times=5)
    save(slow)
    check_loads(slow)
    assert len(asked) == 5
    assert len(stub.state.keys("bucket")) == 3


def test_a_look_that_fails_behind_a_completion_does_not_make_it_undone(stub, config):
    """Google does not tell the hash of what Cloud KMS encrypts, so it is asked for."""
    options = dataclasses.replace(config.gcs, kms_key_name="projects/p/locations/l/keyRings/r/k")
    config = dataclasses.replace(config, gcs=options)
    slow_down = answers.too_fast("bucket", "object").as_json()
    completed = []

    def is_look(request):
        completed.extend([request] if is_completion(request) else [])
        return request.method == "GET" and request.path.endswith(".distcp") and bool(completed)

    stub.state.inject(is_look, slow_down.status, slow_down.headers, slow_down.body)
    save(config)
    check_loads(config)
    assert not stub.state.uploads


@pytest.mark.parametrize("status", [403, 429])
def test_what_was_written_is_not_said_to_be_certainly_not_written(stub, config, status):
    """A completion does not tell the checksum of what KMS encrypts: it is asked for."""
    store = open_store(CheckpointURI.parse(URI), config)
    upload = store.create_upload("run/object", 5 * 1024**2)
    part = store.put_part(upload, 1, [memoryview(b"data")], checksum=CRC32C.of(b"data"))
    made = answers.xml_answer("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")
    stub.state.inject(lambda request: request.method == "POST", 200, made.headers, made.body)
    refused = answers.denied("storage.objects.get") if status == 403 else answers.too_fast("b", "k")
    refusal = refused.as_json()
    stub.state.inject(lambda request: True, status, refusal.headers, refusal.body)
    with pytest.raises(StoreError) as caught:
        store.complete_upload(upload, [part])
    assert not caught.value.certain


def test_data_are_written_only_once_where_that_is_documented(stub, config):
    store = open_store(CheckpointURI.parse(URI), config)
    assert isinstance(store, GCSStore)
    store.capabilities = dataclasses.replace(store.capabilities, create_only=True)
    save(config)
    writes = [request for request in stub.state.requests if is_data(request)]
    assert writes
    assert {request.query.get("ifGenerationMatch") for request in writes} == {"0"}
    check_loads(config)
