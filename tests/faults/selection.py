"""Which tests run in which dialect.

All of them run on S3, over TLS. On the others, without TLS, run those in which the dialect matters,
and of their parameters those that a decorator chooses. What a dialect has nothing like is not
generated.
"""

from collections.abc import Mapping
from typing import Any

import pytest

AZURE = pytest.param("azure", marks=pytest.mark.azurite)
_BODILESS = ("look", "begin", "replaced")  # steps of a save whose requests have no body


def on(*dialects: str, **chosen: Any):
    """A test runs in these dialects; in others than S3 with the parameters chosen here only."""

    marked = [AZURE if dialect == "azure" else dialect for dialect in dialects]

    def decorate(function):
        function = pytest.mark.elsewhere(**chosen)(function)
        return pytest.mark.parametrize("dialect", marked, indirect=True)(function)

    return decorate


def everywhere(**chosen: Any):
    """``on`` the three vendors."""
    return on("s3", "google", "azure", **chosen)


def is_wanted(item: pytest.Item) -> bool:
    """Whether a test is to run with its parameters."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    dialect = parameters.get("dialect", "s3")
    mark = item.get_closest_marker("elsewhere")
    chosen = mark.kwargs if mark is not None and dialect != "s3" else {}
    return _exists(dialect, parameters) and all(
        parameters[name] in values for name, values in chosen.items()
    )


def _exists(dialect: str, parameters: Mapping[str, Any]) -> bool:
    """Whether the dialect has something like what a test is about."""
    step, fault = parameters.get("step"), parameters.get("fault")
    if dialect == "azure" and (
        step == "begin" or parameters.get("operation") == "CreateMultipartUpload"
    ):
        return False  # an upload begins with its first block
    if fault == "reset within the body" and step in _BODILESS:
        return False
    if dialect == "azure" and isinstance(fault, str) and "200" in fault:
        return False  # it has no such answers
    # the answer to HEAD tells no reason: the store is asked in another way
    return dialect != "s3" or (step, fault) != ("look", "denied")
