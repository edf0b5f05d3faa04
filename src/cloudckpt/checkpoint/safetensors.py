"""Encodes and parses the header of a safetensors file, and the index of a model of several files.

A file has eight bytes with the length of its header, the header (JSON: type, shape and byte range
of each tensor), and the tensors one after the other. Files come from untrusted sources, so
everything is checked as the format's own library does before any number is used. There is no I/O
here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cloudckpt.checkpoint.objects import checked
from cloudckpt.errors import CheckpointCorruptError, UnsupportedTensorError
from cloudckpt.transfer.boxes import ALIGNMENT, aligned

__all__ = [
    "INDEX",
    "LENGTH_BYTES",
    "MOST_HEADER_BYTES",
    "MOST_INDEX_BYTES",
    "SINGLE_FILE",
    "SUFFIX",
    "FileHeader",
    "TensorEntry",
    "claim_bytes",
    "header_bytes",
    "header_length",
    "index_bytes",
    "is_claim",
    "parse_header",
    "parse_index",
    "type_name",
]

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""Maximum bytes of a header: the format's own limit."""
MOST_INDEX_BYTES = 100_000_000
"""Maximum bytes of a model's index: enough for some million tensors."""

_METADATA = "__metadata__"
_FORMAT = "format"
_CLAIM = b"cloudckpt is writing a model here, which is not complete: "
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of) for name, of in _NAMES.items() if hasattr(torch, of)
}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file: its name, element type, shape and byte range.

    Attributes:
        name: The tensor's name.
        dtype: Element type.
        shape: The tensor's shape.
        start: The offset in the file of its first byte.
        stop: The offset in the file just after its last byte.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FileHeader:
    """The contents of a file: its tensors in the order of their bytes, and its metadata."""

    tensors: Sequence[TensorEntry]
    metadata: Mapping[str, str]

    def aliases(self) -> dict[str, list[str]]:
        """Returns the aliases of each tensor, by its name, as :func:`header_bytes` writes them."""
        names = {entry.name for entry in self.tensors}
        found: dict[str, list[str]] = {}
        for alias, name in self.metadata.items():
            if name in names and alias not in names and alias != _FORMAT:
                found.setdefault(name, []).append(alias)
        return found


def type_name(dtype: torch.dtype, fqn: str) -> str:
    """Returns the format's name of an element type.

    Raises:
        UnsupportedTensorError: If the format has no name for it.
    """
    try:
        return _TYPE_NAMES[dtype]
    except KeyError:
        raise UnsupportedTensorError(
            f"{fqn} has the element type {dtype}, which safetensors files can't store: convert "
            "it, or leave it out",
            item=fqn,
        ) from None


def header_bytes(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    aliases: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the bytes of a file before its tensors, which follow in this order without gaps.

    Args:
        tensors: Name, type and shape of each.
        aliases: Other names of tensors, by alias. The format has only one name for a byte range, so
            they are in the metadata, as the format's own ``save_model`` writes those of tied
            weights.

    Raises:
        UnsupportedTensorError: If a name or a type can't be written, or the header would be too
            large.
    """
    # transformers reads no file without a format
    entries: dict[str, Any] = {_METADATA: {**(aliases or {}), _FORMAT: "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        if name in entries:
            raise UnsupportedTensorError(
                f"two tensors are to be written under the name {name!r}: rename one of them",
                item=name,
            )
        stop = position + math.prod(shape) * dtype.itemsize
        offsets = [position, stop]
        kind = type_name(dtype, name)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        position = stop
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as exc:
        raise UnsupportedTensorError(
            "the name of a tensor can't be encoded as UTF-8: rename it", cause=exc
        ) from exc
    length = aligned(LENGTH_BYTES + len(text), ALIGNMENT) - LENGTH_BYTES
    if length > MOST_HEADER_BYTES:
        raise UnsupportedTensorError(
            f"a safetensors file with {len(tensors)} tensors needs a header of {length} bytes, "
            f"and the limit is {MOST_HEADER_BYTES}: use a smaller max_shard_size"
        )
    return struct.pack("<Q", length) + text.ljust(length)


def header_length(first: bytes | bytearray | memoryview, size: int, uri: str) -> int:
    """Returns the length of a header in bytes, from the first eight bytes of a file.

    Args:
        first: The first bytes of the file.
        size: Bytes of the file.
        uri: The file, for messages.

    Raises:
        CheckpointCorruptError: If no file of that size has such a header.
    """
    if len(first) < LENGTH_BYTES:
        raise CheckpointCorruptError(
            f"not a safetensors file, or truncated: it has {size} bytes. Download or save it again",
            uri=uri,
        )
    (length,) = struct.unpack_from("<Q", first)
    if not 2 <= length <= min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        raise CheckpointCorruptError(
            f"not a safetensors file, or truncated: it has {size} bytes, and its header should "
            f"have {length}. Download or save it again",
            uri=uri,
        )
    return int(length)


def parse_header(text: bytes | bytearray | memoryview, size: int, uri: str) -> FileHeader:
    """Parses the header of a file of ``size`` bytes.

    Raises:
        CheckpointCorruptError: If the header violates the format: a tensor is outside of the file,
            overlaps another, follows a gap, or has a size that does not fit its shape; or a name
            occurs twice.
        UnsupportedTensorError: If this torch has no such element type.
    """
    try:
        document = _document(bytes(text))
        metadata = document.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata  # null, too, means no metadata
        _expect(_is_texts(metadata), "__metadata__ does not map strings to strings")
        first = LENGTH_BYTES + len(text)
        found = [_entry(name, entry, first, size, uri) for name, entry in document.items()]
        found.sort(key=lambda entry: (entry.start, entry.stop))
        expected = first
        for entry in found:
            _expect(
                entry.start == expected,
                f"{entry.name} does not begin where the previous tensor ends",
            )
            expected = entry.stop
        _expect(
            expected == size, f"the tensors end at byte {expected}, and the file at byte {size}"
        )
    except ValueError as exc:
        raise CheckpointCorruptError(
            f"the header of the safetensors file is invalid: {exc}. Download or save the file "
            "again",
            uri=uri,
        ) from exc
    return FileHeader(found, metadata)


def index_bytes(files: Mapping[str, str], total: int, save_id: str) -> bytes:
    """Returns the bytes of a model's index.

    Args:
        files: The file of each tensor, by name.
        total: Bytes of all tensors.
        save_id: Distinguishes this index from that of another save of the same tensors: some stores
            derive the version of an object from its bytes alone.
    """
    metadata = {"total_size": total, "cloudckpt_save": save_id}
    document = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def claim_bytes(save_id: str) -> bytes:
    """Returns the claim that takes the index's key while a model is being written.

    No reader accepts it as an index. ``save_id`` is as in :func:`index_bytes`.
    """
    return _CLAIM + save_id.encode() + b"\n"


def is_claim(data: bytes | bytearray) -> bool:
    """Returns whether the object at the index's key is a claim."""
    return data.startswith(_CLAIM)


def parse_index(data: bytes | bytearray, uri: str) -> dict[str, str]:
    """Parses the index of a model; returns the file of each tensor, by name.

    Raises:
        CheckpointCorruptError: If it is not an index, or names a file outside of its folder.
    """
    try:
        files = _document(bytes(data)).get("weight_map")
        _expect(_is_texts(files), "weight_map does not map names of tensors to names of files")
    except ValueError as exc:
        raise CheckpointCorruptError(
            f"the index of the model is invalid: {exc}. Download or save it again", uri=uri
        ) from exc
    assert isinstance(files, dict)
    for name in set(files.values()):
        checked(name, uri)
    return files


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    _expect(isinstance(document, dict), "not a JSON object")
    return dict(document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object has a name twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a valid number in JSON")


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _entry(name: str, entry: Any, first: int, size: int, uri: str) -> TensorEntry:
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        is_valid = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) and (
            len(entry) == 3 and isinstance(shape, list) and len(shape) <= 64
        )
    except (KeyError, TypeError, ValueError):
        is_valid = False
    _expect(is_valid, f"{name} is not described by dtype, shape and data_offsets")
    _expect(start <= stop <= size - first, f"{name} lies outside of the file")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UnsupportedTensorError(
            f"{name} has the unknown element type {kind!r}: read the file with another library, "
            "and save this tensor with another type",
            uri=uri,
            item=name,
        )
    dtype = _TYPES[kind]
    strides = math.prod(n for n in shape if n)  # also if the tensor has no elements
    _expect(
        strides * dtype.itemsize < 1 << 63 and math.prod(shape) * dtype.itemsize == stop - start,
        f"the data_offsets of {name} do not fit its shape and dtype",
    )
    return TensorEntry(name, dtype, tuple(shape), first + start, first + stop)
