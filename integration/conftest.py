"""What the tests against emulators share."""

from collections.abc import Iterator

import pytest

from cloudckpt.testing.servers import Azurite, azurite_server, gcs_emulator

pytest.register_assert_rewrite("cloudckpt.testing.contract")


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """A running Azurite."""
    with azurite_server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_url() -> Iterator[str]:
    """The endpoint of a running gcp-storage-emulator."""
    with gcs_emulator() as url:
        yield url
