"""Large objects composed out of temporary ones, on a stub that behaves as a bucket does."""

import json
import logging

import pytest

from cloudckpt import Config, GCSOptions
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import (
    AccessDeniedError,
    ConnectionLostError,
    ObjectNotFoundError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.base import Part, Upload
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs_compose import is_temporary
from stubs import gcs_answers as answers
from stubs.gcs import GcsStub

KEY = "run/step-1/__0_0.0123456789abcdef.distcp"


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def state(stub):
    return stub.state


@pytest.fixture
def open_gcs(stub):
    opened = []

    def open_one(**options):
        values = {"endpoint_url": stub.url, "upload_strategy": "compose", "checksum": "on"}
        opened.append(GCSStore("bucket", Config(gcs=GCSOptions(**{**values, **options}))))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_gcs):
    return open_gcs()


def put_part(store, upload, number, data):
    return store.put_part(upload, number, [memoryview(data)], checksum=CRC32C.of(data))


def sent(store, count, key=KEY):
    """An upload all of whose parts are there, its parts, and the bytes of the object."""
    pieces = [bytes([number]) * (100 + number) for number in range(count)]
    upload = store.create_upload(key, 200)
    parts = [put_part(store, upload, number, data) for number, data in enumerate(pieces, 1)]
    return upload, parts, b"".join(pieces)


def is_compose(request):
    return request.path.endswith("/compose")


def is_deletion(request):
    return request.method == "DELETE"


def content(state, key=KEY):
    return state.find("bucket", key).data


@pytest.mark.parametrize(("count", "calls"), [(1, 1), (32, 1), (33, 3), (70, 4)])
def test_parts_are_composed_in_rounds_of_32(store, state, count, calls):
    upload, parts, data = sent(store, count)
    info = store.complete_upload(upload, parts)
    assert content(state) == data
    assert sum(map(is_compose, state.requests)) == calls
    assert state.keys("bucket") == [KEY]  # nothing temporary is left
    assert info == store.head(KEY)


def test_sources_are_named_by_generation_and_deleted_by_the_request(open_gcs, server):
    store = open_gcs(endpoint_url=server.url)
    bodies = []

    def respond(request):
        if request.target.partition("?")[0].endswith("/compose"):
            bodies.append(json.loads(request.body))
        crc, size = to_base64(CRC32C.of(b"onetwo")), "6"
        found = {"name": KEY, "size": size, "generation": "7", "crc32c": crc, "items": []}
        return server.Answer(body=json.dumps(found).encode())

    server.respond(respond)
    upload = Upload(KEY, "0123456789abcdef", 100)
    parts = [Part(1, 3, "11", CRC32C.of(b"one")), Part(2, 3, "12", CRC32C.of(b"two"))]
    store.complete_upload(upload, parts)
    (body,) = bodies
    assert body["deleteSourceObjects"] is True
    assert body["sourceObjects"] == [
        {"name": f"{KEY}.0123456789abcdef.0-0001.cloudckpt-part", "generation": "11"},
        {"name": f"{KEY}.0123456789abcdef.0-0002.cloudckpt-part", "generation": "12"},
    ]


def test_the_object_has_the_options_and_the_parts_only_those_that_it_takes_over(open_gcs, state):
    key_name = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    store = open_gcs(
        storage_class="NEARLINE",
        custom_time="2027-01-31T00:00:00Z",
        metadata={"run": "7"},
        kms_key_name=key_name,
    )
    upload, parts, _ = sent(store, 33)
    for stored in state.objects.values():
        assert (stored.attributes.storage_class, stored.attributes.kms_key) == (
            "NEARLINE",
            key_name,
        )
        assert not stored.attributes.metadata
        assert stored.attributes.custom_time is None
    store.complete_upload(upload, parts)
    attributes = state.find("bucket", KEY).attributes
    assert attributes.storage_class == "NEARLINE"
    assert attributes.custom_time == "2027-01-31T00:00:00Z"
    assert attributes.metadata == {"run": "7", "cloudckptattempt": upload.attempt}
    assert attributes.kms_key == key_name


@pytest.mark.parametrize("of_bucket", ["STANDARD", "NEARLINE"])
@pytest.mark.parametrize("wanted", [None, "STANDARD", "ARCHIVE"])
def test_sources_have_the_class_of_the_result(open_gcs, state, of_bucket, wanted):
    state.storage_class = of_bucket
    store = open_gcs(storage_class=wanted)
    upload, parts, data = sent(store, 33)
    store.complete_upload(upload, parts)
    stored = state.find("bucket", KEY)
    assert (stored.data, stored.attributes.storage_class) == (data, wanted or of_bucket)


def test_temporary_objects_are_invisible_and_found_as_uploads(store, state):
    upload, _, _ = sent(store, 3)
    assert len(state.keys("bucket")) == 4
    assert list(store.list("run/")) == []
    assert [(found.key, found.id) for found in store.list_uploads("run/step-1")] == [
        (KEY, upload.id)
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (f"{KEY}.0123456789abcdef.0-0001.cloudckpt-part", True),
        (f"{KEY}.0123456789abcdef.1-0312.cloudckpt-part", True),
        (KEY, False),
        ("run/.metadata", False),
        ("run/.conditions.0123456789abcdef", False),
        ("a.cloudckpt-part", False),
        ("a.0123456789abcdef.0-0001.cloudckpt-parts", False),
    ],
)
def test_only_parts_are_temporary(key, expected):
    assert is_temporary(key) is expected


def test_another_process_can_abort(open_gcs, state):
    upload, _, _ = sent(open_gcs(), 40)
    other = sent(open_gcs(), 2, KEY + "x")[0]
    open_gcs().abort_upload(upload)
    assert [found.key for found in open_gcs().list_uploads("run/")] == [other.key]
    assert len(state.keys("bucket")) == 3


def test_no_part_is_taken_when_another_process_has_aborted(open_gcs, state):
    upload, _, _ = sent(open_gcs(), 2)
    open_gcs().abort_upload(upload)
    with pytest.raises(ObjectNotFoundError):
        put_part(open_gcs(), upload, 3, b"too late")
    assert state.keys("bucket") == []


def test_an_abort_tries_every_part_and_tells_what_is_worth_another_try(store, state):
    upload, _, _ = sent(store, 3)
    for number, refusal in (
        (0, answers.retained("b", "k", "2027")),
        (2, answers.too_fast("b", "k")),
    ):
        said = refusal.as_json()
        state.inject(
            lambda request, end=f"0-000{number}.cloudckpt-part": (
                request.method == "DELETE" and request.path.endswith(end)
            ),
            said.status,
            said.headers,
            said.body,
        )
    with pytest.raises(ThrottledError):
        store.abort_upload(upload)
    assert len(state.keys("bucket")) == 2
    store.abort_upload(upload)
    assert state.keys("bucket") == []


def test_an_abort_in_the_middle_of_composing_leaves_nothing(store, state):
    upload, parts, _ = sent(store, 70)
    composed = []

    def is_third(request):
        composed.extend([request] if is_compose(request) else [])
        return is_compose(request) and len(composed) == 3

    state.inject(is_third, 503)
    with pytest.raises(ThrottledError):
        store.complete_upload(upload, parts)
    assert list(store.list_uploads(KEY))
    store.abort_upload(upload)
    assert state.keys("bucket") == []


# answers that are lost: the sources are gone, as Google deletes them with the request


def lose(state, number):
    """Loses the answer to a compose request, by its number."""
    composed = []

    def matches(request):
        composed.extend([request] if is_compose(request) else [])
        return is_compose(request) and len(composed) == number

    state.inject(matches, None, carry_out=True)


@pytest.mark.parametrize("count", [3, 70])
def test_a_composition_whose_answer_was_lost_can_be_found(store, state, count):
    upload, parts, data = sent(store, count)
    lose(state, 1 if count == 3 else 4)
    with pytest.raises(ConnectionLostError):
        store.complete_upload(upload, parts)
    with pytest.raises(ObjectNotFoundError):
        store.complete_upload(upload, parts)
    info = store.written(KEY, upload.attempt)
    assert (info, content(state)) == (store.head(KEY), data)
    store.abort_upload(upload)
    assert state.keys("bucket") == [KEY]


def test_an_intermediate_object_whose_answer_was_lost_is_used(store, state):
    upload, parts, data = sent(store, 70)
    lose(state, 2)
    with pytest.raises(ConnectionLostError):
        store.complete_upload(upload, parts)
    store.complete_upload(upload, parts)
    assert content(state) == data
    assert state.keys("bucket") == [KEY]


def test_an_object_that_another_upload_has_made_is_not_taken_for_it(store, state):
    upload, parts, _ = sent(store, 2)
    state.delete("bucket", f"{upload.key}.{upload.id}.0-0001.cloudckpt-part")
    store.put(
        KEY, [memoryview(b"x" * sum(part.size for part in parts))], checksum=CRC32C.of(b"x" * 201)
    )
    with pytest.raises(ObjectNotFoundError):
        store.complete_upload(upload, parts)


# what goes wrong


@pytest.mark.parametrize("wrong", [{"crc32c": to_base64(1)}, {"size": "5"}])
@pytest.mark.parametrize("count", [3, 40])
def test_an_object_that_was_put_together_wrongly_is_deleted(store, state, wrong, count):
    upload, parts, data = sent(store, count)
    found = {
        "size": str(len(data)),
        "generation": "7",
        "crc32c": to_base64(CRC32C.of(data)),
        **wrong,
    }
    state.inject(is_compose, 200, body=json.dumps(found).encode(), carry_out=True)
    with pytest.raises(StoreError, match="wrongly") as caught:
        store.complete_upload(upload, parts)
    assert not isinstance(caught.value, TransientStoreError)
    assert caught.value.uri.startswith(f"gs://bucket/{KEY}")
    assert KEY not in state.keys("bucket")


def test_leftovers_that_can_not_be_deleted_for_now_do_not_make_the_object_undone(store, state):
    upload, parts, data = sent(store, 3)
    said = {"error": {"code": 429, "errors": [{"reason": "rateLimitExceeded"}]}}
    state.inject(is_deletion, 429, body=json.dumps(said).encode())
    with pytest.raises(ThrottledError) as caught:
        store.complete_upload(upload, parts)
    assert not caught.value.certain
    assert content(state) == data


def test_leftovers_that_must_not_be_deleted_are_reported(store, state, caplog):
    upload, parts, data = sent(store, 3)
    state.denied.add("storage.objects.delete")
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        store.complete_upload(upload, parts)
    assert content(state) == data
    assert "storage.objects.delete" in caplog.text


def test_a_part_that_arrives_damaged_is_refused(store, state):
    upload = store.create_upload(KEY, 200)
    with pytest.raises(ServerError, match="damaged"):
        store.put_part(upload, 1, [memoryview(b"data")], checksum=1)


def test_a_missing_permission_is_named(store, state):
    state.denied.add("storage.objects.create")
    with pytest.raises(AccessDeniedError, match=r"storage\.objects\.create"):
        store.create_upload(KEY, 200)


@pytest.mark.parametrize("strategy", ["multipart", "compose"])
def test_an_object_that_is_written_too_often_is_throttled(open_gcs, state, strategy):
    store = open_gcs(upload_strategy=strategy)
    state.mutation_interval = 60.0
    store.put(KEY, [memoryview(b"1")], checksum=CRC32C.of(b"1"))
    with pytest.raises(ThrottledError):
        store.put(KEY, [memoryview(b"2")], checksum=CRC32C.of(b"2"))


@pytest.mark.parametrize("strategy", ["multipart", "compose"])
def test_what_a_retention_policy_protects_is_kept(open_gcs, state, strategy):
    store = open_gcs(upload_strategy=strategy)
    state.retention = 60.0
    store.put(KEY, [memoryview(b"1")], checksum=CRC32C.of(b"1"))
    for change in (
        lambda: store.put(KEY, [memoryview(b"2")], checksum=CRC32C.of(b"2")),
        lambda: store.delete(KEY),
    ):
        with pytest.raises(AccessDeniedError, match="retention policy"):
            change()
    assert content(state) == b"1"


@pytest.mark.parametrize("strategy", ["multipart", "compose"])
def test_a_bucket_whose_requesters_pay_is_told_who_pays(open_gcs, state, strategy):
    state.billable = "my-project"
    store = open_gcs(upload_strategy=strategy, user_project="my-project")
    data = b"x" * 100
    upload = store.create_upload(KEY, 5 * 1024**2)
    store.complete_upload(upload, [put_part(store, upload, 1, data)])
    assert [info.key for info in store.list("run/")] == [KEY]
    assert bytes(store.get(KEY)[0]) == data
    store.delete(KEY)
    assert state.keys("bucket") == []
    assert list(store.list_uploads("run/")) == []


@pytest.mark.parametrize("strategy", ["multipart", "compose"])
def test_a_bucket_that_is_not_there_is_named(open_gcs, state, strategy):
    store = open_gcs(upload_strategy=strategy)
    state.buckets.clear()
    verbs = (
        lambda: store.put(KEY, [], checksum=0),
        lambda: store.create_upload(KEY, 200),
        lambda: store.get(KEY),
        lambda: store.head(KEY),
        lambda: list(store.list("run/")),
        lambda: list(store.list_uploads("run/")),
        lambda: store.delete(KEY),
    )
    for verb in verbs:
        with pytest.raises(StoreError, match="the bucket does not exist"):
            verb()
