"""Places and faults, as in the tests of dcp and faults."""

import dataclasses
from collections.abc import Iterator

import pytest

from cloudckpt.checkpointer import Stager
from dcp.conftest import local, places, s3  # noqa: F401 - fixtures
from dcp.places import Place
from support.wire.proxy import FaultyProxy

from .saves import Gate


@pytest.fixture(scope="session")
def _proxy(s3_url: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    """A proxy before the server, without faults as yet."""
    yield _proxy
    _proxy.clear()


@pytest.fixture
def shaky(s3: Place, proxy: FaultyProxy) -> Place:  # noqa: F811
    """A new prefix, behind the proxy."""
    options = dataclasses.replace(s3.config.s3, endpoint_url=proxy.url)
    return s3.having(s3=options)


@pytest.fixture
def gate(tmp_path) -> Gate:
    """Where saves stop until it is opened."""
    return Gate(tmp_path)


@pytest.fixture
def stager() -> Iterator[Stager]:
    """A stager that is impatient."""
    with Stager(patience=0.05) as stager:
        yield stager
