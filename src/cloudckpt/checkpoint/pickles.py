"""Pickles in a checkpoint's items: what they may do, and what they say of a tensor."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.plain_values import load_plain
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UntrustedPickleError

__all__ = [
    "TensorDescription",
    "check_trusted",
    "describe_tensor",
    "load_item",
    "load_tensor",
    "refused",
    "whatever_it_warns",
]

_Loaded = TypeVar("_Loaded")


def whatever_it_warns(load: Callable[[], _Loaded]) -> _Loaded:
    """What ``load`` returns, also where warnings are errors: one of torch's is no damage."""
    try:
        return load()
    except Warning:
        with unwarned():
            return load()


def check_trusted(data: bytes | bytearray, item: str, uri: str) -> None:
    """Whether ``torch.load`` of a non-tensor item would run only what is allowed.

    Raises:
        UntrustedPickleError: If its pickle names anything else.
        CheckpointCorruptError: If it can't be read.
    """
    load_item(data, item, uri, map_location="cpu")


def load_item(data: bytes | bytearray, item: str, uri: str, *, map_location: Any) -> Any:
    """A value that was written by ``torch.save``.

    Raises:
        UntrustedPickleError: If it needs code that is not allowed.
        CheckpointCorruptError: If it can't be read.
        CheckpointError: If there is no such device as ``map_location``, or the item, names.
    """
    try:
        return whatever_it_warns(lambda: load_plain(io.BytesIO(data), map_location))
    except pickle.UnpicklingError as exc:
        raise UntrustedPickleError(
            f"{item} can't be loaded without running code that is not on torch's allow-list: if "
            "you trust whoever can write to this location, pass trust_pickle=True, or allow the "
            "class by torch.serialization.add_safe_globals([...])",
            uri=uri,
            item=item,
            cause=refused(exc),
        ) from None
    except Exception as exc:
        if map_location != "cpu":
            check_trusted(data, item, uri)  # which fails, too, if it is the item that can't be read
            raise CheckpointError(
                f"{item} holds tensors of a device that is not here: load it without a state dict, "
                'with default_map_location="cpu"',
                uri=uri,
                item=item,
                cause=exc,
            ) from exc
        raise CheckpointCorruptError(
            f"{item} can't be read", uri=uri, item=item, cause=exc
        ) from exc


def load_tensor(data: io.BytesIO, item: str, uri: str, *, trust: bool) -> torch.Tensor:
    """A tensor that was written by ``torch.save`` and is no plain one.

    Raises:
        UntrustedPickleError: If it needs code that torch does not allow.
        CheckpointCorruptError: If it can't be read, or is no tensor.
    """
    start = data.tell()

    def load() -> Any:
        data.seek(start)
        if not trust:
            return load_plain(data)
        return torch.load(data, map_location="cpu", weights_only=False, mmap=False)

    try:
        loaded = whatever_it_warns(load)
    except pickle.UnpicklingError as exc:
        raise UntrustedPickleError(
            f"{item} needs a class that is not on torch's allow-list: allow it by "
            "torch.serialization.add_safe_globals([...]), or pass trust_pickle=True",
            uri=uri,
            item=item,
            cause=refused(exc),
        ) from None
    except Exception as exc:
        raise CheckpointCorruptError(
            f"{item} can't be read", uri=uri, item=item, cause=exc
        ) from exc
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorruptError(
            f"{item} is a {type(loaded).__name__}, not a tensor", uri=uri, item=item
        )
    return loaded


def refused(exc: pickle.UnpicklingError) -> str:
    """What torch did not allow: the name of the class, if its long message has one."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(exc))
    named = re.search(r"GLOBAL (\S+)", text)
    return f"{named[1]} is not allowed" if named else text.partition("\n")[0]


@dataclass(frozen=True)
class TensorDescription:
    """What ``data.pkl`` says of a plain tensor.

    Attributes:
        dtype: Element type.
        record: The name of its storage's record, beneath ``data/``.
        storage_offset: The first element in the storage.
        shape: Its shape.
        stride: Its strides, in elements.
    """

    dtype: torch.dtype
    record: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_sane(self) -> bool:
        """Whether its numbers could be those of a tensor."""
        numbers = (self.storage_offset, *self.shape, *self.stride)
        return len(self.shape) == len(self.stride) and all(
            type(number) is int and number >= 0 for number in numbers
        )

    @property
    def is_row_major(self) -> bool:
        """Whether its elements stand in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True


class _UnknownContentError(Exception):
    pass


@dataclass(frozen=True)
class _StorageKind:
    """Stands for a storage class of torch."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    record: str


class _DescribingUnpickler(pickle.Unpickler):
    """Follows the pickle of a plain tensor without building one."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _described_v3
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, requires_grad, hooks: data
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage"):
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if isinstance(found, type) and name.endswith("Storage"):
                untyped = found is torch.UntypedStorage
                return _StorageKind(None if untyped else getattr(found, "dtype", None))
        raise _UnknownContentError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, record, _, _ = pid
        return _Storage(kind.dtype, record)


def _described_v2(
    storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any,
    metadata: Any = None,
) -> TensorDescription:  # fmt: skip
    return _described_v3(storage, offset, shape, stride, grad, hooks, storage.dtype, metadata)


def _described_v3(
    storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
    metadata: Any = None,
) -> TensorDescription:  # fmt: skip
    if metadata or not isinstance(dtype, torch.dtype):
        raise _UnknownContentError("a tensor with metadata, such as the conjugate bit")
    return TensorDescription(dtype, storage.record, offset, tuple(shape), tuple(stride))


def describe_tensor(data: bytes) -> TensorDescription | None:
    """Reads ``data.pkl``; None if it describes anything but a plain tensor."""
    try:
        described = _DescribingUnpickler(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - whatever it is, torch.load will tell
        return None
    return described if isinstance(described, TensorDescription) and described.is_sane else None
