"""Makes the bytes before and after a tensor's data with which ``torch.load`` can read it.

``torch.save`` writes a zip archive of stored records. Only one of them, ``data/0``, holds the
tensor's bytes; all others follow from dtype and shape. So they are built here, without touching the
tensor's bytes, in the order and with the alignment that torch uses.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cloudckpt.fork import module_lock
from cloudckpt.transfer.boxes import ALIGNMENT, padding, row_major_strides

__all__ = ["Envelope", "envelope", "has_stored_form", "unwarned"]

_ROOT = "archive/"
_FLAGS = 0x0808  # sizes in a descriptor after the record; names in UTF-8
_MAX32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a tensor's raw data.

    Attributes:
        head: Everything before the data; its length is a multiple of 64.
        tail: Everything after the data.
    """

    head: bytes
    tail: bytes


@lru_cache(maxsize=8192)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """Returns the bytes that, around a contiguous tensor's data, make it a file for ``torch.load``.

    As the CRC32 of the data, which torch never checks, they contain 0.

    Args:
        dtype: The tensor's element type.
        shape: The tensor's shape.
    """
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    before = (
        ("data.pkl", _pickle(dtype, shape, numel)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", sys.byteorder.encode()),
    )
    zip_file = _Zip()
    for name, data in before:
        zip_file.record(name, data)
    zip_file.open_record("data/0", nbytes)
    head = zip_file.take()
    zip_file.position += nbytes
    zip_file.close_record("data/0", nbytes, 0)
    zip_file.record("version", b"3\n")
    zip_file.directory()
    return Envelope(head, zip_file.take())


class _Zip:
    """Writes a zip archive, except for the payload of a record that the caller inserts."""

    def __init__(self) -> None:
        self.position = 0
        self._written = bytearray()
        self._entries: list[bytes] = []
        self._opened_at = 0

    def take(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken

    def record(self, name: str, data: bytes) -> None:
        self.open_record(name, len(data))
        self._write(data)
        self.close_record(name, len(data), zlib.crc32(data))

    def open_record(self, name: str, nbytes: int) -> None:
        """Writes the header of a record, padded so that the data after it is aligned."""
        self._opened_at = start = self.position
        path = (_ROOT + name).encode()
        extra = _zip64(nbytes, start)
        unpadded = start + _LOCAL.size + len(path) + len(extra) + 4
        gap = padding(unpadded)
        extra += b"FB" + struct.pack("<H", gap) + b"Z" * gap
        header = (b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), len(extra))
        self._write(_LOCAL.pack(*header) + path + extra)

    def close_record(self, name: str, nbytes: int, crc32: int) -> None:
        start, path = self._opened_at, (_ROOT + name).encode()
        extra = _zip64(nbytes, start)
        self._write(struct.pack("<4sI2Q" if extra else "<4s3I", b"PK\7\x08", crc32, nbytes, nbytes))
        short = _MAX32 if nbytes >= _MAX32 else nbytes
        at = _MAX32 if start >= _MAX32 else start
        entry = (b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, crc32, short, short, len(path), len(extra))
        self._entries.append(_CENTRAL.pack(*entry, 0, 0, 0, 0, at) + path + extra)

    def directory(self) -> None:
        start, count = self.position, len(self._entries)
        self._write(b"".join(self._entries))
        size, end = self.position - start, self.position
        self._write(
            _END64.pack(b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
        )
        self._write(_LOCATOR64.pack(b"PK\6\7", 0, end, 1))
        self._write(_END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, _MAX32), 0))

    def _write(self, data: bytes) -> None:
        self._written += data
        self.position += len(data)


def _zip64(nbytes: int, start: int) -> bytes:
    """Returns the zip64 extra field, with the numbers that exceed 32 bits; empty if none does."""
    numbers = [nbytes, nbytes] if nbytes >= _MAX32 else []
    if start >= _MAX32:
        numbers.append(start)
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj if type(obj) is tuple and obj[:1] == ("storage",) else None


class _Rebuilt:
    """An object that is pickled as a call of ``function`` with ``arguments``."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _pickle(dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> bytes:
    """Returns the record ``data.pkl``, in which ``torch.save`` describes a tensor."""
    function, arguments, kind = _description(dtype)
    size = numel * dtype.itemsize if kind is torch.UntypedStorage else numel
    storage = ("storage", kind, "0", "cpu", size)
    strides = row_major_strides(shape)
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer, protocol=2)
    pickler.dump(_Rebuilt(function, (storage, 0, shape, strides, *arguments)))
    return buffer.getvalue()


def has_stored_form(dtype: torch.dtype) -> bool:
    """Returns whether ``torch.save`` can write tensors of this element type."""
    try:
        _description(dtype)
    except (KeyError, RuntimeError, TypeError, AttributeError):
        return False
    return True


_one_at_a_time = module_lock()


@contextmanager
def unwarned() -> Iterator[None]:
    """Suppresses the Python warnings of all threads within a block; one thread at a time enters."""
    # two threads at once would restore each other's filters
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=128)
def _description(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], type[Any]]:
    """Returns how torch pickles a tensor of this element type.

    Returns:
        The function that rebuilds the tensor, its arguments after the strides, and the class of the
        tensor's storage.
    """
    with unwarned():  # TypedStorage is deprecated, but torch.save still uses it
        function, arguments = torch.empty(1, dtype=dtype, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
        storage, _, _, _, *rest = arguments
        if isinstance(storage, torch.UntypedStorage):
            return function, tuple(rest), torch.UntypedStorage
        return function, tuple(rest), getattr(torch, storage.pickle_storage_type())
