"""Commit objects as tests need them."""

import pickle
from typing import Any

from cloudckpt.checkpoint.trailer import with_trailer


def framed(metadata: Any, notes: bytes = b"") -> bytes:
    """A pickle of ``metadata`` in a commit object, as a copy of another writer's checkpoint has."""
    return b"".join(with_trailer(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL), b"", notes))
