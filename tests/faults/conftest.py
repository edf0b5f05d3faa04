"""A breakable way to the server, and eyes on the bucket that do not go that way."""

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloudckpt
from cloudckpt import Config
from cloudckpt.stores.http import options as http
from support.wire.proxy import FaultyProxy

from .dialects import CREDENTIALS, Endpoint
from .places import Folder, Place, azure_place, google_place, s3_place
from .selection import is_wanted
from .states import SMALL, filled, impatient

_counter = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items[:] = [item for item in items if here not in item.path.parents or is_wanted(item)]


@pytest.fixture(autouse=True)
def _completions_are_soon_given_up(monkeypatch) -> None:
    """A test of silence need not wait 15 times as long for the answer to a completion."""
    monkeypatch.setattr(http, "LONGER", 1)


# A store costs boto3 a fifth of a second: one bucket, one proxy and two configurations of each
# dialect serve most tests, each in a folder of its own.


@pytest.fixture(scope="session")
def _places(s3_url, authority) -> Iterator[Callable[[str], Place]]:
    """Servers that are started when the first test asks for them."""
    with contextlib.ExitStack() as stack:
        openers = {
            "s3": lambda: s3_place(s3_url, authority.server()),
            "plain s3": lambda: s3_place(s3_url),
            "google": google_place,
            "azure": azure_place,
        }
        opened: dict[str, Place] = {}

        def place(name: str) -> Place:
            if name not in opened:
                opened[name] = stack.enter_context(openers[name]())
            return opened[name]

        yield place


@pytest.fixture
def dialect(request, monkeypatch, authority) -> str:
    """The dialect of this test, see ``selection``."""
    name = getattr(request, "param", "s3")
    if name == "s3":
        monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
    for variable, value in CREDENTIALS.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture
def _place(dialect, _places) -> Place:
    return _places(dialect)


@pytest.fixture
def store(_place) -> Iterator[Folder]:
    """The folder of this test."""
    folder = Folder(_place.bucket, f"{uuid.uuid4().hex[:12]}/")
    yield folder
    folder.forget()


@pytest.fixture
def proxy(_place) -> Iterator[FaultyProxy]:
    """A proxy before the server, without faults as yet."""
    yield _place.proxy
    _place.proxy.clear()


@pytest.fixture
def endpoint(dialect, proxy) -> Endpoint:
    """The way through the proxy."""
    return Endpoint(dialect, proxy.url)


@pytest.fixture
def direct(dialect, _place) -> Config:
    """Options that lead to the server itself."""
    return impatient(Endpoint(dialect, _place.url))


@pytest.fixture
def shaky(endpoint) -> Config:
    """Options that lead through the proxy."""
    return impatient(endpoint)


@pytest.fixture
def unshared(endpoint):
    """Makes options through the proxy that no other test has had: their store is a new one."""
    return lambda **options: impatient(endpoint, read_timeout=30 + next(_counter) / 1e6, **options)


LASTING = ("cloudckpt-watch",)  # over connections


@pytest.fixture(autouse=True)
def _no_thread_stays_behind() -> Iterator[None]:
    yield
    cloudckpt.checkpointer.close_async_savers()
    names = [thread.name for thread in threading.enumerate()]
    assert [n for n in names if n.startswith("cloudckpt") and n not in LASTING] == []


@pytest.fixture
def saved(store, direct):
    """The URI of a checkpoint of step 1, which the test will try to replace."""

    def saved(nbytes: int = SMALL) -> str:
        uri = store.uri("run/latest")
        cloudckpt.save(filled(1, nbytes), checkpoint_id=uri, config=direct)
        return uri

    return saved
