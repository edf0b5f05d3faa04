"""What the stores of all clouds make of the wire, whatever dialect they speak on it."""

import email.utils
import itertools
import time

import pytest

from cloudckpt import errors
from cloudckpt.config import RetryPolicy
from cloudckpt.stores.base import Part
from cloudckpt.transfer.retry import Retrier
from support.dialects import (
    AZURE,
    DIALECTS,
    GOOGLE,
    error_json,
    error_xml,
    inserted,
    one_stub,  # noqa: F401 - a fixture
    page,
    resource,
    xml_of,
)
from support.emulators import free_port


@pytest.fixture(scope="module", params=DIALECTS)
def dialect(request):
    return DIALECTS[request.param]


@pytest.fixture(scope="module")
def store(dialect, stub):
    store = dialect.open(stub.url)
    yield store
    store.close()


in_all = pytest.mark.parametrize(
    ("dialect", "verb"),
    [(name, verb) for name, one in DIALECTS.items() for verb in one.answers],
    indirect=["dialect"],
)


def failure(store, status, headers=(), body=b""):
    return store.failure(status, dict(headers), body, "PUT", store.uri("run/object"))


@in_all
@pytest.mark.parametrize(
    ("answer", "error"),
    [({"status": 503}, errors.ThrottledError), ({"mute": True}, errors.ConnectionLostError)],
)
def test_a_store_makes_one_attempt(dialect, store, server, verb, answer, error):
    server.respond(lambda request: server.Answer(**answer))
    with pytest.raises(error) as caught:
        dialect.verbs[verb](store)
    assert not caught.value.certain
    assert len(server.requests) == 1


def test_an_endpoint_that_is_not_there_is_a_lost_connection(dialect, opened):
    store = opened(dialect.open(f"http://127.0.0.1:{free_port()}"))
    for function in dialect.verbs.values():
        with pytest.raises(errors.ConnectionLostError, match="refused") as caught:
            function(store)
        assert caught.value.uri.startswith(store.uri("run/"))
        assert caught.value.certain


@in_all
def test_a_request_that_is_refused_is_told_by_its_error(dialect, store, server, verb):
    body = error_xml("AccessDenied", "words")
    if dialect is GOOGLE and "upload" not in verb and verb != "put_part":
        body = error_json(403, "forbidden", "words")
    code = {"x-ms-error-code": "AuthorizationPermissionMismatch"}
    server.respond(lambda request: server.Answer(403, code, body))
    told = "HTTP 403" if dialect is AZURE and verb == "head" else r"HTTP 403.*words"
    with pytest.raises(errors.AccessDeniedError, match=told) as caught:
        dialect.verbs[verb](store)
    assert caught.value.uri == store.uri("run/" if "list" in verb else "run/object")


@pytest.mark.parametrize("body", [b"", b"<html>nginx</html>", b"\xff\xfe<", b"<Error>", b"{", b"5"])
def test_an_answer_that_is_no_error_of_the_vendor_is_judged_by_its_status(store, body):
    assert type(failure(store, 503, body=body)) is errors.ThrottledError


@pytest.mark.parametrize("had_one", [True, False])
def test_an_answer_without_a_version_is_asked_for_again_if_others_had_one(
    dialect, server, opened, had_one
):
    """What it confirms may be something else's; a store that never sends one can't be used."""
    in_body = "ETag" not in dialect.versions
    for verb in dialect.versioned:
        store, answer = opened(dialect.open(server.url)), dialect.answers[verb]
        if had_one:
            dialect.call(store, server, verb)
        others = {name: v for name, v in answer.get("headers", {}).items() if name != "ETag"}
        body = b"{}" if in_body else answer.get("body", b"")
        nothing = {**answer, "headers": others, "body": body}
        server.respond(lambda request, nothing=nothing: server.Answer(**nothing))
        with pytest.raises(errors.StoreError) as caught:
            dialect.verbs[verb](store)
        assert isinstance(caught.value, errors.TransientStoreError) is (had_one or in_body)
        assert not caught.value.certain
        assert caught.value.uri == store.uri("run/object")


def test_a_range_is_asked_for_inclusively(dialect, store, server):
    headers = {**dialect.versions, "Content-Range": "bytes 100-103/999"}
    server.answer(status=206, headers=headers, body=b"data")
    memory = memoryview(bytearray(4))
    info = store.get_range("run/object", 100, [memory[:1], memory[1:]])
    assert server.requests[0].headers["Range"] == "bytes=100-103"
    assert (bytes(memory), info.size, info.version) == (b"data", 999, *dialect.versions.values())


@pytest.mark.parametrize("dialect", ["s3", "azure"], indirect=True)
def test_a_head_that_names_no_length_is_asked_again(store, server):
    """The object would be taken for an empty one."""
    silent = server.Answer(headers={"ETag": '"tag"'}, framing="chunked")
    server.answer(silent, server.Answer(headers={"ETag": '"tag"'}, size=0))
    with pytest.raises(errors.TransientStoreError, match="size"):
        store.head("run/object")
    assert store.head("run/object").size == 0


def test_a_truncated_object_tells_how_much_came(dialect, store, server):
    headers = {**dialect.versions, "Content-Range": "bytes 0-999/1000"}
    server.answer(status=206, headers=headers, body=b"x" * 300, size=1000, hang_up=True)
    with pytest.raises(errors.ConnectionLostError) as caught:
        store.get_range("run/object", 0, [memoryview(bytearray(1000))])
    assert (caught.value.received, caught.value.version) == (300, *dialect.versions.values())
    assert caught.value.uri == store.uri("run/object")


@pytest.mark.parametrize("key", ["a/../b", "a/./b"])
def test_a_key_with_dot_segments_is_never_sent(store, server, key):
    with pytest.raises(errors.InvalidRequestError):
        store.put(key, [memoryview(b"data")], checksum=0)
    assert server.requests == []


ONLY_TLS = [  # of Go's servers, nginx, Apache, and one that sends on
    (400, {}, b"Client sent an HTTP request to an HTTPS server.\n"),
    (400, {}, b"<h1>400</h1>The plain HTTP request was sent to HTTPS port"),
    (400, {}, b"You're speaking plain HTTP to an SSL-enabled server port."),
    (301, {"Location": "https://x/"}, b""),
]


@pytest.mark.parametrize("answer", ONLY_TLS)
def test_a_server_that_takes_tls_only_is_named_at_once(store, server, answer):
    server.respond(lambda request: server.Answer(*answer))
    with pytest.raises(errors.TLSError, match="URL of the endpoint with https://") as caught:
        store.delete("run/object")
    assert caught.value.certain


def test_a_proxy_that_limits_bodies_is_named(store, server):
    server.respond(lambda request: server.Answer(413, body=b"<h1>Entity Too Large</h1>"))
    with pytest.raises(errors.InvalidRequestError, match=r"client_max_body_size.*part_size"):
        store.put("run/object", [memoryview(b"data")], checksum=0)


# listings, and what says that nothing is there

NO_LISTINGS = [
    *(b"", b" \n", b"Hello", b"<ok/>", b"<html>", b"<html><p>sign in</p></html>"),
    *(b"<EnumerationResults><Blobs>", b"[]", b"5", b'{"error": {"code": 403}}'),
]


@pytest.mark.parametrize("body", NO_LISTINGS)
@pytest.mark.parametrize("verb", ["list", "list_level", "list_uploads"])
def test_a_listing_that_is_none_is_no_empty_one(store, server, verb, body):
    """A vendor's client would take it for one, and a training job begin anew."""
    server.answer(body=body)
    with pytest.raises(errors.ServerError):
        list(getattr(store, verb)("run/"))


PAGES = {
    ("s3", "list"): lambda marker: xml_of(  # whatever it says of its being truncated
        "ListBucketResult", IsTruncated="True", NextContinuationToken=marker
    ),
    ("s3", "list_uploads"): lambda marker: xml_of(
        "ListMultipartUploadsResult",
        IsTruncated="true",
        NextKeyMarker=marker,
        NextUploadIdMarker=marker,
    ),
    ("google", "list"): lambda marker: b'{"nextPageToken": "%s"}' % marker.encode(),
    ("google", "list_uploads"): lambda marker: xml_of(
        "ListMultipartUploadsResult", IsTruncated="true", NextKeyMarker=marker
    ),
    ("azure", "list"): lambda marker: page(marker=marker),
    ("azure", "list_uploads"): lambda marker: page(marker=marker),
}


@pytest.mark.parametrize(("dialect", "verb"), PAGES, indirect=["dialect"])
@pytest.mark.parametrize("markers", ["a", "abc"])
def test_a_listing_that_leads_back_is_ended(request, store, server, verb, markers):
    name, again = request.node.callspec.params["dialect"], itertools.cycle(markers)
    server.respond(lambda request: server.Answer(body=PAGES[name, verb](next(again))))
    with pytest.raises(errors.ServerError, match="earlier page"):
        list(getattr(store, verb)("run/"))
    assert len(server.requests) == len(markers) + 1


@pytest.mark.parametrize(
    ("dialect", "verb"),
    [*PAGES, *((dialect, "list_level") for dialect in DIALECTS)],
    indirect=["dialect"],
)
def test_a_refused_page_is_asked_for_again_and_the_listing_goes_on(request, store, server, verb):
    name, pages, received = request.node.callspec.params["dialect"], 40, itertools.count()
    kind = "list" if verb == "list_level" else verb

    def answer(_):
        number, is_asked_again = divmod(next(received), 2)
        if not is_asked_again:
            return server.Answer(503)
        if number + 1 < pages:
            return server.Answer(body=PAGES[name, kind](f"page-{number}"))
        return server.Answer(**DIALECTS[name].answers[kind])

    server.respond(answer)
    policy = RetryPolicy(base=0.001, cap=0.001, attempts=2)
    assert list(getattr(store, verb)("run/", Retrier(policy).call)) == []
    assert len(server.requests) == 2 * pages


ELSEWHERE = {
    "s3": [b"<html><body>Not Found</body></html>", b"<!DOCTYPE html><p>sign in", b"404 no page"],
    "azure": [b"", b"default backend - 404", error_xml("404")],
    "google": [
        b"default backend - 404",
        b"404 page not found",
        b'{"message": "no Route matched with those values"}',
        b'{"code": 404, "message": "Path does not match any requirement URI template."}',
        b"<html><body>Not Found</body></html>",
        b"<Error><Message>Not Found</Message></Error>",
    ],
}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [(name, body) for name, bodies in ELSEWHERE.items() for body in bodies],
    indirect=["dialect"],
)
def test_the_page_of_a_gateway_does_not_say_that_there_is_no_object(dialect, store, server, body):
    """A training job would begin anew over its checkpoints."""
    server.respond(lambda request: server.Answer(404, body=body))
    for verb in ("get", "get_range", "head", "delete", "abort_upload"):
        if verb in dialect.answers:
            with pytest.raises(errors.ServerError, match="answered in place of the store"):
                dialect.verbs[verb](store)


# whose object it is

NAME = "0123456789abcdef"


def name_in(dialect, request):
    """The name that a request gives to a write."""
    if b'"metadata"' in request.body:
        return inserted(request)[0]["metadata"].get("cloudckptattempt")
    return request.headers[dialect.metadata + "cloudckptattempt"]


def test_a_write_gives_its_object_a_name(dialect, store, server):
    assert name_in(dialect, dialect.call(store, server, "put", attempt=NAME)) == NAME


def test_an_upload_gives_its_object_a_name(dialect, store, server):
    names = []
    for _ in range(2):
        for verb in ("create_upload", "complete_upload"):
            if verb in dialect.answers:
                server.answer(**dialect.answers[verb])
        upload = store.create_upload("run/object", 5 * 1024**2)
        checksum = store.capabilities.checksum.of(b"data")
        store.complete_upload(upload, [Part(1, 4, '"tag"', checksum)])
        names.append([name_in(dialect, request) for request in server.requests])
        assert upload.attempt in names[-1]
        server.reset_script()
    assert names[0] != names[1]


@pytest.mark.parametrize("there", [NAME, "f" * 16, ""])
def test_one_request_tells_whose_an_object_is(dialect, store, server, there):
    answer = dialect.answers["head"]
    if dialect is GOOGLE:
        told = {"metadata": {"team": "nlp", "cloudckptattempt": there}} if there else {}
        answer = {**answer, "body": resource(**told)}
    elif there:
        named = {dialect.metadata.title() + "Cloudckptattempt": there}
        answer = {**answer, "headers": {**answer["headers"], **named}}
    server.answer(**answer)
    found = store.written("run/object", NAME)
    assert (found is not None) == (there == NAME)
    assert len(server.requests) == 1


# proxies


@pytest.fixture
def asked(dialect, server, opened):
    """The target of the request to put an object with a store at a URL."""
    return lambda url: dialect.call(opened(dialect.open(url)), server, "put").target


@pytest.mark.parametrize("hosts", ["127.0.0.1", ".internal,127.0.0.1"])
def test_no_proxy_is_respected(asked, server, monkeypatch, hosts):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", hosts)
    assert asked(server.url).startswith("/")


@pytest.mark.parametrize("dialect", ["google", "azure"], indirect=True)  # boto3 knows none
@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy"])
def test_a_proxy_for_all_is_asked_unless_there_is_one_for_the_scheme(
    asked, server, monkeypatch, variable
):
    monkeypatch.setenv(variable, server.url.removeprefix("http://"))
    assert asked("http://store.example").startswith("http://store.example/")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv(variable, "socks5://127.0.0.1:9")
    assert asked("http://store.example").startswith("http://store.example/")


# when to come back


NO_TIMES = [
    *("soon", "-1", "", "1.5", email.utils.formatdate(0, usegmt=True), "²"),
    "Fri, 31 Dec 2100 00:00:00 +9999999999999",
]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_retry_after_is_passed_on_if_it_is_a_time(store, status):
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert failure(store, status, {"Retry-After": "7"}).retry_after == 7.0
    assert 3000 < failure(store, status, {"Retry-After": later}).retry_after <= 3600
    for value in NO_TIMES:
        assert failure(store, status, {"Retry-After": value}).retry_after is None
