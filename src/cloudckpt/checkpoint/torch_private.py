"""The private names of torch that the stored format consists of, in this one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["CURRENT_DCP_VERSION", "StorageInfo", "sparse_tensors_unchecked"]


class _Unlisted(list[Any]):
    def append(self, _: Any, /) -> None:
        """Nothing is kept."""


@contextlib.contextmanager
def sparse_tensors_unchecked() -> Iterator[None]:
    """Keeps ``torch.load`` from looking at the indices of sparse tensors, for the ``meta`` device.

    From torch 2.14 on it does so at its end if ``weights_only``; on that device they have none.
    """
    local: Any = getattr(torch.serialization, "_serialization_tls", None)
    name = "sparse_tensors_to_validate"
    if not hasattr(local, name):
        yield
        return
    usual = getattr(local, name)
    setattr(local, name, _Unlisted())
    try:
        yield
    finally:
        setattr(local, name, usual)
