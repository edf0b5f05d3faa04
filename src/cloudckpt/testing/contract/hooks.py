"""What a subclass of the contract provides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloudckpt.stores.base import ObjectStore

__all__ = ["Hooks"]


class Hooks:
    """The store under test, and a way around it.

    Attributes:
        object_count: How many objects the test of listing makes. Choose more than the store lists
            in one request (1,000 for S3).
        atomic_conditions: Whether of several ``put`` with ``if_absent`` at the same moment only one
            may succeed. Only for an emulator that can't do what the real store does.
        honours_conditional_deletes: Whether ``delete`` with ``if_version`` takes no other version.
    """

    object_count = 1100
    atomic_conditions = True
    honours_conditional_deletes = True

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        """The store under test."""
        raise NotImplementedError("a subclass of StoreContract provides the fixture 'store'")

    @pytest.fixture
    def prefix(self) -> str:
        """What all keys of a test begin with; an absolute path for a file system."""
        return "contract/"

    def put_directly(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Creates an object without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'put_directly'")

    def get_directly(self, store: ObjectStore, key: str) -> bytes:
        """The bytes of an object that exists, without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'get_directly'")
