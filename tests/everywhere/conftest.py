"""One place in each kind of store, on servers that nobody here wrote where there are such."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from cloudckpt import Config, RetryPolicy
from cloudckpt.stores import registry
from faults.conftest import _places
from faults.dialects import CREDENTIALS, Endpoint, vendor_options
from faults.places import Place as Server
from support.memory_store import MemoryStore
from support.wire.proxy import FaultyProxy

__all__ = ["_places"]  # a fixture

RETRY = RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0)
CLOUDS = ("s3", "google", pytest.param("azure", marks=pytest.mark.azurite))


@dataclass(frozen=True)
class Place:
    """A folder of a store.

    Attributes:
        uri: The folder.
        config: Options that lead there.
        server: What stands behind it, if it is one of a cloud's kind.
        shaky: Options that lead there through the server's proxy.
    """

    uri: str
    config: Config
    server: Server | None = None
    shaky: Config = field(default_factory=Config)

    @property
    def proxy(self) -> FaultyProxy:
        assert self.server is not None
        return self.server.proxy

    @property
    def is_cloud(self) -> bool:
        return self.server is not None


@pytest.fixture(params=["memory", "local", *CLOUDS])
def place(request, _places, tmp_path, monkeypatch) -> Iterator[Place]:
    """A new folder in each kind of store, one after the other."""
    kind, name = request.param, uuid.uuid4().hex[:12]
    if kind == "memory":
        yield Place(f"memory://{name}/run", Config(retry=RETRY))
    elif kind == "local":
        yield Place(f"{tmp_path.as_uri()}/run", Config(retry=RETRY))
    else:
        for variable, value in CREDENTIALS.get(kind, {}).items():
            monkeypatch.setenv(variable, value)
        server = _places(_dialect(kind))
        yield Place(
            f"{server.bucket.root}/{name}/run",
            _leading_to(kind, server.url),
            server,
            _leading_to(kind, server.proxy.url),
        )
        server.proxy.clear()


def _leading_to(kind: str, url: str) -> Config:
    return Config(connections=4, retry=RETRY, **vendor_options(Endpoint(_dialect(kind), url)))


def _dialect(kind: str) -> str:
    return "plain s3" if kind == "s3" else kind


@pytest.fixture
def serve(monkeypatch) -> Callable[[MemoryStore], MemoryStore]:
    """Has all locations of ``memory://`` lead to a store."""

    def serve(store):
        monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: store})
        monkeypatch.setattr(registry, "_places", {})
        return store

    return serve


on = {
    names: pytest.mark.parametrize("place", kinds, indirect=True)
    for names, kinds in {
        "s3": ["s3"],
        "memory": ["memory"],
        "local": ["local"],
        "s3 google azure": CLOUDS,
    }.items()
}
"""Marks of tests that need some kinds of store only."""
