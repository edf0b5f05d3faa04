"""What servers, proxies and SDKs say becomes a part of errors: cut short, and in little time."""

import pickle
import time

import pytest

from cloudckpt.errors import StoreError
from cloudckpt.stores.redaction import conceal, excerpt, masked
from support.dialects import DIALECTS, error_json, error_xml

LONG = 3_600_000  # characters
SHORT = 4_000  # characters, which an error with several words of others may have


LONG_ANSWERS = {
    "message": lambda: {"body": error_xml("Odd", "a" * LONG)},
    "code": lambda: {"body": f"<Error><Code>{'C' * 60_000}</Code></Error>".encode()},
    "json": lambda: {"body": error_json(400, "b" * 60_000, "b" * 60_000)},
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


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("what", LONG_ANSWERS)
def test_what_a_server_says_is_cut_short(server, opened, name, what):
    dialect = DIALECTS[name]
    store = opened(dialect.open(server.url))
    for status in (200, 206, 403, 404, 503):
        answer = server.Answer(status, **LONG_ANSWERS[what]())
        verb = {200: "list", 206: "get_range"}.get(status, "get")
        if status == 200 and what not in ("message", "page", "root"):
            continue
        server.respond(lambda request, answer=answer: answer)
        with pytest.raises(StoreError) as caught:
            dialect.verbs[verb](store)
        assert len(str(caught.value)) < SHORT
        assert len(pickle.dumps(caught.value)) < 2 * SHORT


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


SECRET = "S3cr3tKey/" * 4


@pytest.mark.parametrize("quoted", [f"sig={SECRET}", "v" * LONG])
def test_what_is_beneath_an_error_and_quotes_a_secret_or_is_too_long_is_cut_off(quoted):
    try:
        try:
            raise ValueError(quoted)
        except ValueError as exc:
            raise StoreError(f"no {quoted[:50]}", cause=quoted) from exc
    except StoreError as error:
        caught = error
    began = time.process_time()
    conceal(caught, [SECRET])
    assert time.process_time() - began < 5
    assert (caught.__cause__, caught.__context__) == (None, None)
    assert "S3cr3t" not in f"{caught} {caught!r} {caught.cause}"
    assert len(str(caught)) < 3 * SHORT


@pytest.mark.parametrize("at", range(440, 520, 10))
def test_a_secret_that_the_end_of_a_text_cuts_in_two_is_not_shown(at):
    shown = excerpt("x" * at + SECRET, [SECRET])
    assert "S3cr3t" not in shown


@pytest.mark.parametrize("word", ["testing", "minioadmin"])
def test_an_emulators_words_stay_in_names(open_s3, server, monkeypatch, word):
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, word)
    server.answer(status=403, body=error_xml("Odd", f"the key {word}/step is not yours"))
    with pytest.raises(StoreError) as caught:
        open_s3(f"{word}-bucket").get(f"{word}s/step")
    assert f"s3://{word}-bucket/{word}s/step" in str(caught.value)
    assert "***" not in str(caught.value)


def test_a_keys_id_is_shown_and_its_secret_is_not(open_s3, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFNOSECRET01")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-key/01234567890123456789")
    said = "AKIDOFNOSECRET01 of-the-key/01234567890123456789"
    server.answer(status=403, body=error_xml("Odd", said))
    with pytest.raises(StoreError) as caught:
        open_s3().get("key")
    assert "AKIDOFNOSECRET01" in str(caught.value)
    assert "0123456789" not in str(caught.value)
