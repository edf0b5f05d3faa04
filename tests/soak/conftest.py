"""How long a soak goes on, and with which luck. ``make soak`` runs it, ``make test`` does not."""

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from dcp.conftest import places
from faults.conftest import (
    _no_thread_stays_behind,
    _place,
    _places,
    dialect,
    direct,
    endpoint,
    proxy,
    shaky,
    store,
)

__all__ = ["_no_thread_stays_behind", "_place", "_places", "dialect", "direct"]
__all__ += ["endpoint", "places", "proxy", "shaky", "store"]

_LAST_ROUND = 600.0  # seconds that a test may take beyond its share: hypothesis shrinks for 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=60.0, help="how long all of it takes")
    parser.addoption("--seed", default="0", help="what chance draws follows from it")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Chance; the same for a test and a seed."""
    return random.Random(f"{request.config.getoption('--seed')}/{request.node.nodeid}")


def _share(session: pytest.Session, items: int) -> float:
    """How long each test goes on, in seconds."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return session.config.getoption("--seconds") * workers / items


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[], Iterator[int]]:
    """Counts from 1 on for this test's share of the time, and to 1 at least."""
    share = _share(request.session, len(request.session.items))

    def rounds() -> Iterator[int]:
        end, number = time.monotonic() + share, 0
        while number == 0 or time.monotonic() < end:
            number += 1
            yield number
        print(f"{number} rounds")

    return rounds


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """The long ones come first, and each with a short one: so each worker gets one of them.

    Whatever hangs has an end, and a name.
    """
    for item in items:
        item.add_marker(pytest.mark.timeout(_LAST_ROUND + _share(session, len(items))))
    long = [item for item in items if "interleaving" in item.name]
    others = [item for item in items if item not in long]
    pairs = [item for pair in zip(long, others) for item in pair]  # noqa: B905 - as far as both go
    items[:] = [*pairs, *long[len(others) :], *others[len(long) :]]
