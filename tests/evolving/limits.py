"""The limits of the code at which something else begins, by their names there; and smaller ones."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator

import pytest
import torch

from cloudckpt.checksum import block_size_for
from cloudckpt.dcp import saving
from cloudckpt.stores.local import LocalStore
from cloudckpt.transfer.boxes import ALIGNMENT
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.packing import PACKED_BELOW
from cloudckpt.transfer.pool import MemoryPool

__all__ = ["ALIGNED", "BLOCK", "LARGEST", "LEAST_BUDGET", "LEAST_PART", "PACKED", "RUN", "SLAB"]
__all__ += ["pickled_around", "tight"]

MIB = 1024 * 1024
LEAST_BUDGET, LEAST_PART = 32 * MIB, 5 * MIB  # that a Config allows

PACKED = PACKED_BELOW
"""Bytes from which on an item has an object of another lane."""

ALIGNED = ALIGNMENT
"""Bytes that items are aligned to."""

BLOCK = block_size_for(0)
"""Bytes of the smallest block with a checksum of its own."""

RUN = saving._RUN
"""Small tensors that are written by one call."""

SLAB = MemoryPool(LEAST_BUDGET, Cancellation()).slab_bytes
"""Bytes of a strided tensor that are copied at a time."""

LARGEST = LEAST_PART + 4096
"""Bytes of the largest tensor: it has a second part."""


def pickled_around(limit: int) -> int:
    """Bytes of a `bytes` whose pickle is as long as a limit."""
    buffer = io.BytesIO()
    torch.save(bytes(limit), buffer)
    return limit - (len(buffer.getvalue()) - limit)


_TIGHT = {"min_part_size": 1, "max_part_size": 4 * PACKED, "max_parts": 4}


@contextlib.contextmanager
def tight() -> Iterator[None]:
    """Stores of this process take objects of a mebibyte at most, so that ranks have several."""
    with pytest.MonkeyPatch.context() as patch:
        small = dataclasses.replace(LocalStore.capabilities, **_TIGHT)
        patch.setattr(LocalStore, "capabilities", small)
        yield
