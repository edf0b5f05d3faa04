"""What servers, proxies and SDKs say becomes a part of errors: cut short, and in little time."""

import json
import pickle
import time

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.errors import StoreError
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.redaction import conceal, masked, told
from cloudckpt.stores.s3.store import S3Store

LONG = 3_600_000  # characters
SHORT = 4_000  # characters, which an error with several words of others may have

STORES = {
    "s3": lambda url: S3Store(
        "bucket", Config(s3=S3Options(endpoint_url=url, addressing_style="path"))
    ),
    "gs": lambda url: GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=url))),
    "az": lambda url: AzureStore("container", Config(azure=AzureOptions(endpoint_url=url))),
}
VERBS = {
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", [memoryview(b"x")], checksum=0),
    "list": lambda store: list(store.list("key")),
    "delete": lambda store: store.delete("key"),
    "range": lambda store: store.get_range("key", 0, [memoryview(bytearray(4))]),
}


def xml_error(text):
    return f"<Error><Code>Odd</Code><Message>{text}</Message></Error>".encode()


def json_error(text):
    first = [{"reason": text, "message": text}]
    return json.dumps({"error": {"message": text, "errors": first}}).encode()


LONG_ANSWERS = {
    "message": lambda: {"body": xml_error("a" * LONG)},
    "code": lambda: {"body": f"<Error><Code>{'C' * 60_000}</Code></Error>".encode()},
    "json": lambda: {"body": json_error("b" * 60_000)},
    "page": lambda: {"body": b"<html><body>" + b"<p>c</p>" * 60_000 + b"</body></html>"},
    "text": lambda: {"body": b"No such object: " + b"d" * LONG},
    "headers": lambda: {
        "headers": dict.fromkeys(
            ("x-ms-error-code", "x-amz-request-id", "x-amz-bucket-region"), "e" * 60000
        )
    },
    "range": lambda: {"headers": {"Content-Range": "bytes " + "9" * 60_000, "ETag": "e"}},
    "root": lambda: {"body": b"<%s/>" % (b"f" * 60_000)},
}


@pytest.fixture
def failing(server, opened, azure_key):
    """The error of a call that the server answers so."""

    def fail(root, verb, answer):
        server.respond(lambda request: answer)
        store = opened(STORES[root](server.url))
        with pytest.raises(StoreError) as caught:
            VERBS[verb](store)
        return caught.value

    return fail


@pytest.mark.parametrize("root", STORES)
@pytest.mark.parametrize("what", LONG_ANSWERS)
def test_what_a_server_says_is_cut_short(server, failing, root, what):
    for status in (200, 206, 403, 404, 503):
        answer = server.Answer(status, **LONG_ANSWERS[what]())
        verb = {200: "list", 206: "range"}.get(status, "get")
        if status == 200 and what not in ("message", "page", "root"):
            continue
        error = failing(root, verb, answer)
        assert len(str(error)) < SHORT
        assert len(pickle.dumps(error)) < 2 * SHORT


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a",
            "secret",
            "http://",
            "AWS4-",
            "eyJ-",
            "header value '",
            "-----BEGIN ",
            "session_token",
        ),
        *("Bearer ", "password ", "\\", " ", "ya29.", "-----BEGIN PRIVATE KEY-----"),
    ],
)
def test_the_time_to_mask_a_text_grows_with_its_length_only(text):
    def seconds(length):
        began = time.process_time()
        masked((text * length)[:length])
        return time.process_time() - began

    few = max(min(seconds(12_000) for _ in range(3)), 0.001)
    assert seconds(96_000) < 24 * few  # 8 times as long; 64 times as much if it were quadratic


def test_what_is_beneath_an_error_and_too_long_to_be_looked_through_is_cut_off():
    try:
        try:
            raise ValueError("v" * LONG)
        except ValueError as exc:
            raise StoreError("no", cause="c" * LONG) from exc
    except StoreError as error:
        caught = error
    began = time.process_time()
    conceal(caught)
    assert time.process_time() - began < 5
    assert (caught.__cause__, caught.__context__) == (None, None)
    assert len(str(caught)) < 3 * SHORT


@pytest.mark.parametrize("at", range(440, 520, 10))
def test_a_secret_that_the_end_of_a_text_cuts_in_two_is_not_shown(at):
    secret = "S3cr3tKey/" * 4
    shown = told("x" * at + secret, [secret])
    assert "S3cr3t" not in shown


@pytest.mark.parametrize("word", ["testing", "minioadmin"])
def test_an_emulators_words_stay_in_names(open_s3, server, monkeypatch, word):
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, word)
    server.answer(status=403, body=xml_error(f"the key {word}/step is not yours"))
    with pytest.raises(StoreError) as caught:
        open_s3(f"{word}-bucket").get(f"{word}s/step")
    assert f"s3://{word}-bucket/{word}s/step" in str(caught.value)
    assert "***" not in str(caught.value)


def test_a_keys_id_is_shown_and_its_secret_is_not(open_s3, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFNOSECRET01")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-key/01234567890123456789")
    said = "AKIDOFNOSECRET01 of-the-key/01234567890123456789"
    server.answer(status=403, body=xml_error(said))
    with pytest.raises(StoreError) as caught:
        open_s3().get("key")
    assert "AKIDOFNOSECRET01" in str(caught.value)
    assert "0123456789" not in str(caught.value)
