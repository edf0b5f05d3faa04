"""Answers of a store that are no XML, or hostile: a named error, in bounded time and memory."""

import tracemalloc

import pytest

from cloudckpt.errors import ServerError
from cloudckpt.stores.rest import reading
from cloudckpt.stores.xml_api import error_fields, text, unqualified

URI = "s3://bucket/run"


def encoded(name: str) -> bytes:
    return f'<?xml version="1.0" encoding="{name}"?><Error><Code>Denied</Code></Error>'.encode()


def declaring(*declarations: str, content: str = "") -> bytes:
    return f"<!DOCTYPE a [{''.join(declarations)}]><a>{content}</a>".encode()


LAUGHS = ['<!ENTITY e0 "ha">', *(f'<!ENTITY e{n} "{f"&e{n - 1};" * 20}">' for n in range(1, 9))]
HOSTILE = {
    "empty": b"",
    "text": b"upstream connect error",
    "page": b"<html><body><p>Sign in</body></html>",
    "cut off": b"<Error><Code>Den",
    "unknown encoding": encoded("x-nonsense"),
    "encoding of several bytes": encoded("utf-7"),
    "no encoding of text": encoded("hex"),
    "undefined encoding": encoded("undefined"),
    "not in its encoding": b'<?xml version="1.0" encoding="utf-8"?><a>\xff</a>',
    "document type": declaring(),
    "entity": declaring('<!ENTITY a "text">', content="&a;"),
    "billion laughs": declaring(*LAUGHS, content="&e8;"),
    "quadratic growth": declaring(f'<!ENTITY a "{"x" * 60_000}">', content="&a;" * 60_000),
    "file of this machine": declaring('<!ENTITY a SYSTEM "file:///etc/passwd">', content="&a;"),
    "deep": b"<a>" * 600_000 + b"</a>" * 600_000,
    "deep without an end": b"<a>" * 2_000_000,
    "many": b"<a>" + b"<b/>" * 2_000_000 + b"</a>",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_is_no_answer_is_a_named_error(body):
    with pytest.raises(ServerError, match="can't be understood") as caught, reading(URI):
        unqualified(body)
    assert caught.value.uri == URI


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_an_error_that_is_no_xml_has_no_fields(body):
    assert error_fields(body) == {}


@pytest.mark.parametrize("name", ["billion laughs", "quadratic growth", "deep without an end"])
def test_a_hostile_answer_takes_little_memory(name):
    tracemalloc.start()
    try:
        error_fields(HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("name", ["utf-8", "UTF-8", "us-ascii", "iso-8859-1"])
def test_an_answer_may_be_in_any_encoding_that_is_known(name):
    body = f'<?xml version="1.0" encoding="{name}"?><Error><Code>Denied</Code></Error>'
    assert error_fields(body.encode(name)) == {"Error": "", "Code": "Denied"}


def test_a_page_of_many_objects_is_read():
    entry = "<Blob><Name>key</Name><P>" + "<Q>x</Q>" * 30 + "</P></Blob>"
    page = f"\n <?xml version='1.0'?><E xmlns='urn:x'>{entry * 5000}</E>"
    names = [text(blob, "Name") for blob in unqualified(page.encode()).iter("Blob")]
    assert names == ["key"] * 5000
