"""The stub of Cloud Storage itself: what its modules say that it does."""

import threading
import time
from urllib.parse import unquote

import pytest
import urllib3

from cloudckpt.checksum import CRC32C, to_base64

from .gcs import GcsStub
from .gcs_client import Client, code, hash_of, reason, texts

KEY = "a b/ü+%?#"


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def client(stub):
    client = Client(stub)
    yield client
    client.close()


def test_an_object_comes_back_from_both_apis(client):
    created = client.insert(KEY, b"hello", {"Content-Type": "x/y"}).json()
    assert (created["name"], created["size"], created["crc32c"]) == (
        KEY,
        "5",
        hash_of(b"hello")[7:],
    )
    for answer in (client.object("GET", KEY, alt="media"), client.xml("GET", KEY)):
        assert answer.data == b"hello"
        assert answer.headers["x-goog-generation"] == created["generation"]
        assert hash_of(b"hello") in answer.headers["x-goog-hash"]
        assert answer.headers["Content-Type"] == "x/y"
    assert client.object("GET", KEY).json() == created
    head = client.xml("HEAD", KEY)
    assert (head.data, head.headers["Content-Length"]) == (b"", "5")


@pytest.mark.parametrize("data", [b"", b"\r\n", b"\r\n--cu", b" --cut--", bytes(range(256))])
def test_a_multipart_insert_keeps_bytes_and_metadata(client, data):
    described = {"name": "k", "storageClass": "NEARLINE", "customTime": "2030-01-01T00:00:00Z"}
    described |= {"metadata": {"a": "b"}, "crc32c": to_base64(CRC32C.of(data))}
    created = client.related(described, data).json()
    assert client.state.objects["bucket", "k"].data == data
    assert created["contentType"] == "x/y"
    assert {name: created[name] for name in described} == described


@pytest.mark.parametrize("way", ["multipart", "media", "xml", "part"])
def test_a_wrong_checksum_is_refused(client, way):
    wrong = to_base64(1)
    headers = {"x-goog-hash": f"crc32c={wrong}"}
    if way == "multipart":
        answer = client.related({"name": "k", "crc32c": wrong}, b"data")
    elif way == "media":
        answer = client.insert("k", b"data", headers)
    elif way == "xml":
        answer = client.xml("PUT", "k", None, headers, b"data")
    else:
        query = {"partNumber": "1", "uploadId": client.begin("k")}
        answer = client.xml("PUT", "k", query, headers, b"data")
    assert answer.status == 400
    assert code(answer) == "BadDigest" if way in ("xml", "part") else reason(answer) == "invalid"
    assert not client.state.objects


def test_preconditions(client):
    first = client.insert("k", b"1", ifGenerationMatch=0)
    assert first.status == 200
    generation = first.json()["generation"]
    other = int(generation) + 1
    for again in (
        client.insert("k", b"2", ifGenerationMatch=0),
        client.related({"name": "k"}, b"2", ifGenerationMatch=other),
    ):
        assert (again.status, reason(again)) == (412, "conditionNotMet")
    answer = client.xml("PUT", "k", None, {"x-goog-if-generation-match": "0"}, b"2")
    assert (answer.status, code(answer)) == (412, "PreconditionFailed")
    assert client.insert("other", ifGenerationMatch=generation).status == 412
    assert client.object("GET", "k", alt="media", ifGenerationMatch=1).status == 412
    assert client.object("GET", "k", alt="media", generation=1).status == 404
    assert client.object("DELETE", "k", ifGenerationMatch=1).status == 412
    assert client.insert("k", b"2", ifGenerationMatch=generation).status == 200
    assert client.state.objects["bucket", "k"].generation > int(generation)


def test_of_many_writers_one_wins(client):
    statuses = []

    def write():
        statuses.append(client.insert("k", b"x", ifGenerationMatch=0).status)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [412] * 7


def test_ranges(client):
    client.insert("k", b"0123456789")
    for answer in (
        client.object("GET", "k", {"Range": "bytes=2-4"}, alt="media"),
        client.xml("GET", "k", None, {"Range": "bytes=2-4"}),
    ):
        assert (answer.status, answer.data) == (206, b"234")
        assert answer.headers["Content-Range"] == "bytes 2-4/10"
    assert client.xml("GET", "k", None, {"Range": "bytes=8-99"}).data == b"89"
    assert client.xml("GET", "k", None, {"Range": "bytes=-3"}).data == b"789"
    beyond = client.object("GET", "k", {"Range": "bytes=10-10"}, alt="media")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, "bytes */10")
    client.insert("empty")
    assert code(client.xml("GET", "empty", None, {"Range": "bytes=0-0"})) == "InvalidRange"


def test_what_is_missing_is_told_apart(client):
    answer = client.object("GET", "k")
    assert (answer.status, reason(answer)) == (404, "notFound")
    assert answer.json()["error"]["message"] == "No such object: bucket/k"
    assert client.object("GET", "k", alt="media").data == b"No such object: bucket/k"
    assert client.object("DELETE", "k").status == 404
    assert code(client.xml("GET", "k")) == "NoSuchKey"
    assert client.xml("HEAD", "k").status == 404
    client.state.buckets.clear()
    for answer in (client.object("GET", "k"), client.insert("k"), client.object("DELETE", "k")):
        assert answer.json()["error"]["message"] == "The specified bucket does not exist."
    for answer in (client.xml("PUT", "k"), client.xml("GET", ""), client.xml("DELETE", "k")):
        assert (answer.status, code(answer)) == (404, "NoSuchBucket")


def test_lists_come_in_pages(client):
    keys = ["p/A", "p/a", "p/a/b", "p/é", "p/日"]
    for key in (*reversed(keys), "q"):
        client.insert(key)
    client.state.page = 3
    found, query = [], {"prefix": "p/", "maxResults": 2}
    while True:
        page = client.send("GET", "/storage/v1/b/bucket/o", query).json()
        found.append([item["name"] for item in page["items"]])
        if "nextPageToken" not in page:
            break
        query["pageToken"] = page["nextPageToken"]
    assert found == [keys[:2], keys[2:4], keys[4:]]
    assert "items" not in client.send("GET", "/storage/v1/b/bucket/o", {"prefix": "r"}).json()
    query = {"list-type": "2", "prefix": "p/"}
    first = client.xml("GET", "", query)
    token = texts(first, "NextContinuationToken")[0]
    second = client.xml("GET", "", {**query, "continuation-token": token})
    assert texts(first, "Contents/Key") + texts(second, "Contents/Key") == keys
    assert texts(second, "IsTruncated") == ["false"]


def test_data_that_everybody_may_read_is_cached_unless_its_writer_forbids_it(client):
    client.state.public = True
    for key, described, expected in (
        ("default", {}, b"old"),
        ("no-store", {"cacheControl": "no-store"}, b"new"),
    ):
        client.related({"name": key, **described}, b"old")
        first = client.object("GET", key, alt="media")
        first_by_xml = client.xml("GET", key)
        created = client.related({"name": key, **described}, b"new").json()
        again = client.object("GET", key, alt="media")
        assert again.headers["Cache-Control"] == described.get(
            "cacheControl", "public, max-age=3600"
        )
        assert first.data == first_by_xml.data == b"old"
        assert again.data == client.xml("GET", key).data == expected
        found = client.object("GET", key).json()
        assert found["generation"] == created["generation"]
        for pin in ("generation", "ifGenerationMatch"):
            pinned = client.object("GET", key, alt="media", **{pin: found["generation"]})
            assert pinned.data == b"new"


def test_what_few_may_read_is_not_cached(client):
    client.insert("k", b"old")
    assert client.object("GET", "k", alt="media").headers["Cache-Control"] == "private, max-age=0"
    client.insert("k", b"new")
    assert client.object("GET", "k", alt="media").data == b"new"


def test_a_multipart_upload(client):
    client.state.min_part = 4
    headers = {"x-goog-storage-class": "NEARLINE", "x-goog-custom-time": "2030-01-01T00:00:00Z"}
    upload_id = client.begin(KEY, **headers)
    first = client.part(KEY, upload_id, 1, b"wrong")
    tags = []
    for number, data in ((2, b"5"), (1, b"1234")):
        answer = client.part(KEY, upload_id, number, data)
        assert answer.headers["x-goog-hash"] == hash_of(data)
        tags.append((number, answer.headers["ETag"]))
    assert code(client.complete(KEY, upload_id, tags)) == "InvalidPartOrder"
    assert code(client.complete(KEY, upload_id, [(1, first.headers["ETag"])])) == "InvalidPart"
    assert code(client.complete(KEY, upload_id, [(3, '"x"')])) == "InvalidPart"
    answer = client.complete(KEY, upload_id, tags[::-1])
    stored = client.state.objects["bucket", KEY]
    assert (answer.status, stored.data) == (200, b"12345")
    assert answer.headers["x-goog-hash"] == hash_of(b"12345")
    assert answer.headers["x-goog-generation"] == str(stored.generation)
    assert texts(answer, "Key") == [KEY]
    assert stored.attributes.storage_class == "NEARLINE"
    assert not client.state.uploads
    assert code(client.complete(KEY, upload_id, tags[::-1])) == "NoSuchUpload"


def test_parts_have_a_least_size(client):
    upload_id = client.begin("k")
    tags = [(n, client.part("k", upload_id, n, b"x").headers["ETag"]) for n in (1, 2)]
    answer = client.complete("k", upload_id, tags)
    assert (answer.status, code(answer)) == (400, "EntityTooSmall")
    assert list(client.state.uploads) == [upload_id]
    assert client.complete("k", upload_id, tags[1:]).status == 200


def test_a_multipart_upload_is_aborted_once(client):
    query = {"uploadId": client.begin("k")}
    assert client.xml("DELETE", "other", query).status == 404
    assert client.xml("DELETE", "k", query).status == 204
    again = client.xml("DELETE", "k", query)
    assert (again.status, code(again)) == (404, "NoSuchUpload")
    assert client.part("k", query["uploadId"], 1, b"x").status == 404


def test_a_multipart_upload_knows_no_conditions(client):
    headers = {"x-goog-if-generation-match": "0"}
    assert client.xml("POST", "k", {"uploads": ""}, headers).status == 501


def test_open_uploads_are_listed_in_pages(client):
    ids = {client.begin(key): key for key in (KEY, KEY, "a b/z", "other")}
    query = {"uploads": "", "prefix": "a b/", "max-uploads": "1", "encoding-type": "url"}
    found = []
    while True:
        page = client.xml("GET", "", query)
        found += zip(texts(page, "Upload/UploadId"), texts(page, "Upload/Key"), strict=True)
        if texts(page, "IsTruncated") == ["false"]:
            break
        query["key-marker"] = unquote(texts(page, "NextKeyMarker")[0])
        query["upload-id-marker"] = texts(page, "NextUploadIdMarker")[0]
    assert [unquote(key) for _, key in found] == ["a b/z", KEY, KEY]
    assert [ids[upload_id] for upload_id, _ in found] == ["a b/z", KEY, KEY]


def test_a_key_of_cloud_kms(client):
    name = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    assert client.insert("a", kmsKeyName=name).json()["kmsKeyName"].startswith(name)
    upload_id = client.begin("b", **{"x-goog-encryption-kms-key-name": name})
    tag = client.part("b", upload_id, 1, b"x").headers["ETag"]
    assert "x-goog-hash" not in client.complete("b", upload_id, [(1, tag)]).headers
    assert client.state.objects["bucket", "b"].attributes.kms_key == name


def test_credentials(client):
    client.state.tokens = {"good"}
    nobody = client.object("GET", "k")
    assert (nobody.status, reason(nobody)) == (401, "required")
    wrong = client.insert("k", b"", {"Authorization": "Bearer bad"})
    assert (wrong.status, reason(wrong)) == (401, "authError")
    assert code(client.xml("GET", "k")) == "AuthenticationRequired"
    assert client.insert("k", b"", {"Authorization": "Bearer good"}).status == 200
    fresh = client.send("POST", "/token").json()["access_token"]
    assert client.object("GET", "k", {"Authorization": f"Bearer {fresh}"}).status == 200
    log = client.state.requests[-1]
    assert log.token
    assert fresh not in str(log)


def test_permissions(client):
    client.insert("k")
    client.state.denied = {"storage.objects.get", "storage.multipartUploads.create"}
    answer = client.object("GET", "k")
    assert (answer.status, reason(answer)) == (403, "forbidden")
    assert code(client.xml("POST", "k", {"uploads": ""})) == "AccessDenied"
    assert client.object("DELETE", "k").status == 204


def test_the_requester_pays(client):
    client.state.billable = "mine"
    answer = client.insert("k")
    assert (answer.status, reason(answer)) == (400, "required")
    assert code(client.xml("PUT", "k")) == "UserProjectMissing"
    assert client.insert("k", userProject="yours").status == 403
    assert client.insert("k", userProject="mine").status == 200
    assert client.xml("GET", "k", None, {"x-goog-user-project": "mine"}).status == 200
    assert client.state.requests[-1].headers["x-goog-user-project"] == "mine"


def test_an_object_changes_once_in_an_interval(client):
    client.state.mutation_interval = 0.2
    assert client.insert("k").status == client.insert("other").status == 200
    answer = client.insert("k")
    assert (answer.status, reason(answer)) == (429, "rateLimitExceeded")
    assert client.xml("DELETE", "k").status == 429
    time.sleep(0.2)
    assert client.object("DELETE", "k").status == 204


def test_a_retention_period(client):
    generation = client.insert("k", b"kept").json()["generation"]
    client.state.retention = 60.0
    for answer in (client.insert("k", ifGenerationMatch=generation), client.object("DELETE", "k")):
        assert (answer.status, reason(answer)) == (403, "retentionPolicyNotMet")
    assert client.insert("k", ifGenerationMatch=0).status == 412
    upload_id = client.begin("k")
    tag = client.part("k", upload_id, 1, b"x").headers["ETag"]
    assert code(client.complete("k", upload_id, [(1, tag)])) == "RetentionPolicyNotMet"
    assert list(client.state.uploads) == [upload_id]


def test_answers_are_injected(client):
    client.state.inject(lambda request: request.method == "POST", 503, [("Retry-After", "7")])
    assert client.insert("k").headers["Retry-After"] == "7"
    assert client.state.keys("bucket") == []
    client.state.inject(lambda request: True, 500, body=b"lost", carry_out=True)
    assert client.insert("k").data == b"lost"
    assert client.state.keys("bucket") == ["k"]
    client.state.inject(lambda request: True, None, times=2)
    for _ in range(2):
        with pytest.raises(urllib3.exceptions.ProtocolError):
            client.object("GET", "k")
    assert client.object("GET", "k").status == 200
    assert [request.method for request in client.state.requests] == ["POST"] * 2 + ["GET"] * 3


def test_connections_are_kept_and_end_with_the_stub():
    with GcsStub("bucket") as stub:
        pool = urllib3.HTTPConnectionPool("127.0.0.1", stub.server_port, retries=False)
        assert pool.request("GET", "/bucket/k").status == 404
        assert pool.request("PUT", "/bucket/k", body=b"x" * 1_000_000).status == 200
        assert len(pool.request("GET", "/bucket/k").data) == 1_000_000
        assert pool.num_connections == 1
    with pytest.raises(urllib3.exceptions.HTTPError):
        pool.request("GET", "/bucket/k")
    pool.close()
