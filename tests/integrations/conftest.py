"""Places to save to."""

from dcp.conftest import local, place, places, s3  # noqa: F401 - fixtures
