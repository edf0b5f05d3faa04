"""Whatever an endpoint answers, a store returns or raises an error of stores, soon."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.errors import ConnectionLostError
from support.dialects import DIALECTS, put
from support.odd_answers import ask, odd_server


@pytest.fixture(scope="module")
def odd():
    with odd_server() as server:
        yield server


@pytest.fixture(scope="module", params=DIALECTS)
def named_store(request, odd):
    store = DIALECTS[request.param].open(odd.url)
    yield request.param, store
    store.close()


def test_headers_that_are_cut_off_are_no_answer(odd):
    store, whole = DIALECTS["s3"].open(odd.url), b'HTTP/1.1 200 OK\r\nETag: "tag"\r\n\r\n'
    for end in range(len(whole)):
        odd.answer = whole[:end]
        with pytest.raises(ConnectionLostError):
            put(store)
    odd.answer = whole
    assert put(store).version == '"tag"'
    store.close()


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_an_odd_answer_is_an_error_of_the_store(odd, named_store, seed):
    name, store = named_store
    assert ask(odd, store, name, random.Random(seed)) is None
