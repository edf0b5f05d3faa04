from __future__ import annotations

import uuid

import pytest

from support import memory_store  # noqa: F401 - makes memory:// known


@pytest.fixture
def run() -> str:
    """The location of a new run."""
    return f"memory://{uuid.uuid4().hex}/run"
