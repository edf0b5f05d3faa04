"""One set of tests for three clouds: servers that nobody here wrote, or buckets of the user's."""

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from clouds import Cloud, Place, clean_environment, in_environment, opened
from deselected import DESELECTED
from servers import BY_CLOUD, REAL, chosen
from support.economy import one_thread_of_torch, pytest_runtestloop  # noqa: F401 - a fixture, a hook
from support.ranks import Ranks

pytest.register_assert_rewrite("support.contract", "dcp.layouts", "dcp.values")

collect_ignore = ["frameworks"]  # which have an environment of their own

_FLAGS = {"moto": "moto", "gcs": "gcp-storage-emulator", "azurite": "azurite"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-emulators",
        default="",
        metavar="NAMES",
        help=f"skip the tests that need these emulators, of {','.join(_FLAGS)}; one that is "
        "missing and not named here fails them",
    )
    parser.addoption(
        "--only-real",
        action="store_true",
        help="run the tests of clouds whose bucket is named by CLOUDCKPT_TEST_*_URI, and no "
        "emulator",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "only_on(server): about this server; deselected if its cloud has another one"
    )
    if config.getoption("--only-real") and not any(chosen(cloud)[0] in REAL for cloud in BY_CLOUD):
        names = ", ".join(servers[0].variable for servers in BY_CLOUD.values())
        raise pytest.UsageError(f"--only-real: no bucket is named; set one of {names}")
    unknown = _without(config) - set(_FLAGS)
    if unknown:
        known = ", ".join(_FLAGS)
        raise pytest.UsageError(f"--without-emulators={','.join(unknown)}: known are {known}")


def _without(config: pytest.Config) -> set[str]:
    return {name for name in config.getoption("--without-emulators").split(",") if name}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the servers that were chosen can't do."""
    running = {chosen(cloud)[0] for cloud in BY_CLOUD}
    kept, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("only_on")
        unfit = marker is not None and marker.args[0] not in running
        cloud = item.callspec.params.get("cloud") if hasattr(item, "callspec") else None
        if cloud in BY_CLOUD:
            unfit = unfit or item.originalname in DESELECTED.get(chosen(cloud)[0], {})
        (dropped if unfit else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings() -> Iterator[None]:
    """No test sees credentials and options of the user's but those of the buckets to be tested."""
    kept = clean_environment(os.environ)
    direct = ",".join(filter(None, (kept.get("NO_PROXY"), "127.0.0.1,localhost")))
    with mock.patch.dict(os.environ, clear=True):
        os.environ.update({**kept, "NO_PROXY": direct, "no_proxy": direct})
        yield


@pytest.fixture(scope="session")
def needs(_own_surroundings: None, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Skips a test whose emulator is not wanted."""
    without = {_FLAGS[name] for name in _without(request.config)}
    only_real = request.config.getoption("--only-real")

    def check(server: str) -> None:
        if only_real:
            pytest.skip(f"--only-real: {server}")
        if server in without:
            pytest.skip(f"--without-emulators: {server}")

    return check


@pytest.fixture(scope="session", params=list(BY_CLOUD))
def cloud(request: pytest.FixtureRequest, needs: Callable[[str], None]) -> Iterator[Cloud]:
    """Each cloud, one after the other."""
    server, value = chosen(request.param)
    if server not in REAL and (not value or request.config.getoption("--only-real")):
        needs(server)
    with opened(request.param) as running:
        yield running


@pytest.fixture
def place(cloud: Cloud) -> Iterator[Place]:
    """A place of this test's own, which is emptied afterwards."""
    place = cloud.root.at(f"test-{uuid.uuid4().hex}")
    yield place
    cloud.look.remove(f"{place.key}/")


@pytest.fixture
def store(cloud: Cloud) -> ObjectStore:
    """The store of the cloud's bucket: the one that saving and loading use."""
    return open_store(CheckpointURI.parse(cloud.root.uri), cloud.root.config)


@pytest.fixture(scope="session")
def _pool(_own_surroundings: None) -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.kill()


@pytest.fixture
def ranks(_pool: Ranks, cloud: Cloud) -> Callable[..., list[Any]]:
    """Runs a function on up to four gloo ranks that find the cloud."""

    def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        where = dict(cloud.environment)
        return _pool(world, in_environment, where, function, *arguments, deadline=280)

    return run
