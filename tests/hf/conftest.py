"""Places for models."""

from dcp.conftest import installed, local, place, places, s3  # noqa: F401 - fixtures
