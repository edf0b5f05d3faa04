"""The contract of a store, as a class of tests that every store passes."""

from cloudckpt.testing.contract.contract import StoreContract
from cloudckpt.testing.contract.data import part_size, put_part

__all__ = ["StoreContract", "part_size", "put_part"]
