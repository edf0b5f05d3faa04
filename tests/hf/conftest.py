"""Places for models."""

from dcp.conftest import local, place, places, s3  # noqa: F401 - fixtures
