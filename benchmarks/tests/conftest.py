"""One server for each module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.server.process import ServerHandle, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    """A running server, which tests may share."""
    with running_server() as handle:
        yield handle
