"""What the tests run against: which server for which cloud, as the environment says.

By default emulators, each started for the session. ``CLOUDCKPT_TEST_S3_URI`` and its companions
name a real bucket instead, ``CLOUDCKPT_TEST_MINIO_URL`` and its companions an emulator that runs
already, as ``make integration-docker`` has it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["BY_CLOUD", "REAL", "Server", "chosen"]


@dataclass(frozen=True)
class Server:
    """A kind of server.

    Attributes:
        name: For tests and options.
        variable: What is set to use it; empty for the default.
    """

    name: str
    variable: str = ""


BY_CLOUD = {
    "s3": (
        Server("aws", "CLOUDCKPT_TEST_S3_URI"),
        Server("minio", "CLOUDCKPT_TEST_MINIO_URL"),
        Server("moto"),
    ),
    "gcs": (
        Server("google", "CLOUDCKPT_TEST_GCS_URI"),
        Server("fake-gcs-server", "CLOUDCKPT_TEST_FAKE_GCS_URL"),
        Server("gcp-storage-emulator"),
    ),
    "azure": (
        Server("microsoft", "CLOUDCKPT_TEST_AZ_URI"),
        Server("azurite", "CLOUDCKPT_TEST_AZURITE_URL"),
        Server("azurite"),
    ),
}
"""By cloud: the servers, the first of which that is asked for is taken."""

REAL = frozenset({"aws", "google", "microsoft"})
"""Those that need the user's own credentials."""


def chosen(cloud: str) -> tuple[str, str]:
    """The name of the server for a cloud, and the value of its variable; empty by default."""
    for server in BY_CLOUD[cloud]:
        value = os.environ.get(server.variable, "") if server.variable else ""
        if value or not server.variable:
            return server.name, value.rstrip("/")
    raise AssertionError(cloud)
