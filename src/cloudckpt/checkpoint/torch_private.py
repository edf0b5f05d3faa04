"""The private names of torch that the stored format consists of, in this one place."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as OldTensorProperties,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = [
    "CURRENT_DCP_VERSION",
    "OldTensorProperties",
    "StorageInfo",
    "load_restricted",
    "sparse_tensors_unchecked",
]


def load_restricted(file: IO[bytes], map_location: Any, allowed: Mapping[str, Any]) -> Any:
    """``torch.load`` with ``weights_only``, which allows these names too, for this one call.

    ``torch.serialization.safe_globals`` would allow them to all threads of the process, which then
    get what stands behind the names here, and a thread that ends would take them from the others.
    So torch's own restricted unpickler is run with another look at its list: what it refuses, it
    goes on refusing.

    Args:
        file: A file of ``torch.save`` in the format of a zip archive.
        map_location: As in ``torch.load``.
        allowed: What to call or to make, by the full names in the pickle.

    Raises:
        UnpicklingError: If the pickle names or does anything else.
        NotImplementedError: If this torch unpickles in another way.
    """
    try:
        home: Any = importlib.import_module("torch._weights_only_unpickler")
        serialization: Any = torch.serialization
        open_zip, load = serialization._open_zipfile_reader, serialization._load
        everywhere = home._get_user_allowed_globals()
        code = home.Unpickler.load.__code__
    except (ImportError, AttributeError) as exc:
        raise NotImplementedError(str(exc)) from exc
    names = {**everywhere, **allowed}
    look = {**vars(home), "_get_user_allowed_globals": lambda: names}
    restricted = type("Unpickler", (home.Unpickler,), {"load": FunctionType(code, look)})
    with open_zip(file) as archive:
        return load(archive, map_location, SimpleNamespace(Unpickler=restricted), encoding="utf-8")


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
