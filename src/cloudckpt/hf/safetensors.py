"""The format of models in safetensors files: which tensors are in which file, headers, the index.

A file has eight bytes with the length of its header, the header (JSON: type, shape and byte range
of each tensor), and the tensors one after the other. Files come from untrusted sources, so a header
is checked, as the format's own library does, before any number in it is used. There is no I/O here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.objects import checked
from cloudckpt.config import whole_number
from cloudckpt.errors import CheckpointCorruptError, ConfigError, UnsupportedTensorError
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned
from cloudckpt.transfer.landing import StoredBytes

__all__ = [
    "INDEX",
    "LENGTH_BYTES",
    "MOST_INDEX_BYTES",
    "SINGLE_FILE",
    "SUFFIX",
    "Chunk",
    "FilePlan",
    "TensorPlan",
    "bytes_of_size",
    "claim_bytes",
    "header_bytes",
    "header_length",
    "index_bytes",
    "is_claim",
    "parse_header",
    "parse_index",
    "plan_files",
    "type_name",
]

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""Maximum bytes of a header: the format's own limit."""
MOST_INDEX_BYTES = 100_000_000
"""Maximum bytes of a model's index: enough for about a million tensors."""

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_METADATA = "__metadata__"
_FORMAT = "format"
_CLAIM = b"cloudckpt is writing a model here, which is not complete: "
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor that one rank has.

    Attributes:
        rank: The rank.
        item: The index of the chunk's item in the rank's plan.
        box: The region of the tensor: start and length for each dimension.
        dtype: The element type in the file.
    """

    rank: int
    item: int
    box: Box
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that the chunk takes in the file."""
        return math.prod(length for _, length in self.box) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of the model as it will be stored.

    Attributes:
        name: The name of the tensor.
        dtype: The element type in the file.
        shape: The shape of the whole tensor.
        chunks: The parts of which the tensor consists.
        aliases: Other names of the same tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    aliases: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file of the model.

    Attributes:
        name: The name of the file.
        header: The bytes of the file before the tensors.
        tensors: The tensors in the order of the file.
        size: The size of the file in bytes, with the header.
    """

    name: str
    header: bytes
    tensors: Sequence[TensorPlan]
    size: int


def bytes_of_size(size: int | str) -> int:
    """Converts a size such as ``"5GB"`` or a number to bytes.

    A GB is 10**9 bytes, as in transformers, and a GiB 2**30 bytes.

    Raises:
        ConfigError: If ``size`` is not a valid size.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ConfigError(
                f"max_shard_size={size!r}: give a number of bytes, or a text such as 5GB or 4GiB"
            )
        number, unit, binary = match.groups()
        power = " KMGT".index(unit.upper() or " ")
        size = int(float(number) * (1024 if binary else 1000) ** power)
    found = whole_number(size)
    if found is None or found < 1:
        raise ConfigError(f"max_shard_size={size!r}: give a whole number of bytes, at least 1")
    return found


def plan_files(
    tensors: Sequence[TensorPlan], max_shard_size: int, fqn_to_file: Mapping[str, int] | None
) -> list[FilePlan]:
    """Divides tensors among files, and plans each file.

    Args:
        tensors: All tensors, in the order in which they fill the files.
        max_shard_size: Maximum bytes of tensors in a file; a larger tensor gets a file to itself.
        fqn_to_file: The number of each tensor's file, from 1; None divides by ``max_shard_size``.

    Returns:
        The files in the order of their numbers; one file without tensors if there are no tensors.

    Raises:
        ConfigError: If ``fqn_to_file`` leaves out a tensor, or has an invalid number.
        UnsupportedTensorError: If safetensors files can't hold a tensor, or one file would have too
            many.
    """
    by_number: dict[int, list[TensorPlan]] = {}
    number = filled = 0
    for tensor in tensors:
        if fqn_to_file is not None:
            number = _number(fqn_to_file.get(tensor.name), tensor.name)
        elif not number or filled + tensor.nbytes > max_shard_size:
            number, filled = number + 1, 0
        filled += tensor.nbytes
        by_number.setdefault(number, []).append(tensor)
    numbers = [_number(given, name) for name, given in (fqn_to_file or {}).items()]
    count = max([*numbers, *by_number], default=1)
    named = {_numbered(number, count): group for number, group in sorted(by_number.items())}
    return [_file(name, group) for name, group in (named or {SINGLE_FILE: []}).items()]


def _number(given: object, name: str) -> int:
    if (number := whole_number(given)) is None or number < 1:
        raise ConfigError(
            f"fqn_to_file has {given!r} for {name}: give the number of its file, at least 1"
        )
    return number


def _numbered(number: int, count: int) -> str:
    """Returns the name of file ``number`` (from 1) of ``count``, as transformers expects it."""
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"


def _file(name: str, tensors: Sequence[TensorPlan]) -> FilePlan:
    """Plans one file; chooses the order of its tensors."""
    # larger elements first, so that each tensor is aligned to its elements, for readers that map
    # the file; then small tensors first, so that few parts consist of several
    ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.nbytes))
    header = header_bytes(ordered)
    size = len(header) + sum(tensor.nbytes for tensor in ordered)
    return FilePlan(name, header, ordered, size)


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


def header_bytes(tensors: Sequence[TensorPlan]) -> bytes:
    """Returns the bytes of a file before ``tensors``, which follow in this order without gaps.

    The format has only one name for a byte range, so other names of a tensor are written to the
    header's metadata, as ``save_model`` of the safetensors library does for tied weights.

    Raises:
        UnsupportedTensorError: If a name or a type can't be written, or the header would be too
            large.
    """
    # transformers reads no file without a format
    metadata = {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
    entries: dict[str, Any] = {_METADATA: {**metadata, _FORMAT: "pt"}}
    position = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise UnsupportedTensorError(
                f"a safetensors file can't have a tensor named {tensor.name!r}: the format "
                "reserves this name, or another tensor in the file has it; rename the tensor",
                item=tensor.name,
            )
        stop = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": type_name(tensor.dtype, tensor.name),
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as exc:
        bad = exc.object[exc.start]
        name = ascii(next(name for name in (*metadata, *entries) if bad in name))
        why = f"the tensor name {name} can't be encoded as UTF-8: rename the tensor"
        raise UnsupportedTensorError(why, cause=exc) from exc
    length = aligned(LENGTH_BYTES + len(text), ALIGNMENT) - LENGTH_BYTES
    if length > MOST_HEADER_BYTES:
        raise UnsupportedTensorError(
            f"a safetensors file with {len(tensors)} tensors needs a header of {length} bytes, "
            f"and the limit is {MOST_HEADER_BYTES}: divide the tensors among more files, by a "
            "smaller max_shard_size or by fqn_to_file"
        )
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def header_length(first: bytes | bytearray | memoryview, size: int, uri: str) -> int:
    """Returns the length of a header in bytes, from the first eight bytes of a file.

    Args:
        first: The first bytes of the file.
        size: Bytes of the file.
        uri: The URI of the file, for messages.

    Raises:
        CheckpointCorruptError: If the file is too short, or its header would not fit into it.
    """
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        claim = f", of which {length} should be its header" if len(first) >= LENGTH_BYTES else ""
        raise CheckpointCorruptError(
            f"this is not a safetensors file, or it is truncated: it has {size} bytes{claim}; "
            "download or save it again",
            uri=uri,
        )
    return length


def parse_header(
    text: bytes | bytearray | memoryview, file: ObjectInfo, uri: str
) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name; a tensor may have several names.

    Args:
        text: The header, without the eight bytes of its length.
        file: The file.
        uri: The URI of the file, for messages.

    Raises:
        CheckpointCorruptError: If the header violates the format: a tensor is outside of the file,
            overlaps another, follows a gap, or has a size that does not fit its shape; or a name
            occurs twice.
        UnsupportedTensorError: If a tensor has an element type that cloudckpt does not know.
    """
    try:
        document = _document(bytes(text))
        metadata = document.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata  # null, too, means no metadata
        _expect(_is_texts(metadata), "__metadata__ does not map strings to strings")
        end = LENGTH_BYTES + len(text)
        tensors = {name: _tensor(name, entry, end, file, uri) for name, entry in document.items()}
        ranges = [tensor.elements for tensor in tensors.values()]
        for one in sorted(ranges, key=lambda one: (one.offset, one.nbytes)):
            _expect(one.offset == end, f"{one.item} does not begin where the previous tensor ends")
            end += one.nbytes
        _expect(
            end == file.size, f"the tensors end at byte {end}, and the file at byte {file.size}"
        )
    except ValueError as exc:
        raise CheckpointCorruptError(
            f"the header of the safetensors file is invalid: {exc}; download or save the file "
            "again",
            uri=uri,
        ) from exc
    aliases = metadata.keys() - {_FORMAT}
    names = {alias: metadata[alias] for alias in aliases if metadata[alias] in tensors}
    return {alias: tensors[name] for alias, name in names.items()} | tensors


def index_bytes(files: Sequence[FilePlan], save_id: str) -> bytes:
    """Returns the bytes of a model's index.

    Args:
        files: The files of the model.
        save_id: Distinguishes this index from that of another save of the same tensors: some stores
            derive the version of an object from its bytes alone.
    """
    total = sum(file.size - len(file.header) for file in files)
    metadata = {"total_size": total, "cloudckpt_save": save_id}
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    document = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def claim_bytes(save_id: str) -> bytes:
    """Returns the bytes that are stored in place of the index while a model is being written.

    No reader accepts these bytes as an index. ``save_id`` is as in :func:`index_bytes`.
    """
    return _CLAIM + save_id.encode() + b"\n"


def is_claim(data: bytes | bytearray) -> bool:
    """Returns whether the bytes at the index's key are a claim, see :func:`claim_bytes`."""
    return data.startswith(_CLAIM)


def parse_index(data: bytes | bytearray, uri: str) -> dict[str, str]:
    """Parses the index of a model; returns the name of each tensor's file, by the tensor's name.

    Raises:
        CheckpointCorruptError: If ``data`` is no index, or names a file outside of its folder.
    """
    try:
        files = _document(bytes(data)).get("weight_map")
        _expect(_is_texts(files), "weight_map does not map names of tensors to names of files")
    except ValueError as exc:
        raise CheckpointCorruptError(
            f"the index of the model is invalid: {exc}; download or save the model again", uri=uri
        ) from exc
    assert isinstance(files, dict)
    for name in set(files.values()):
        checked(name, uri)
    return files


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    _expect(isinstance(document, dict), "not a JSON object")
    return dict(document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _expect(len(found) == len(pairs), "a JSON object has a name twice")
    return found


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _tensor(name: str, entry: Any, first: int, file: ObjectInfo, uri: str) -> StoredTensor:
    """Parses the header's entry of a tensor; ``first`` is the number of bytes before the tensors.

    Raises:
        ValueError: If the entry is invalid.
        UnsupportedTensorError: If cloudckpt does not know the element type.
    """
    try:
        dtype_name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        is_valid = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) and (
            len(entry) == 3 and isinstance(shape, list) and len(shape) <= 64
        )
    except (KeyError, TypeError, ValueError):
        is_valid = False
    _expect(is_valid, f"{name} is not described by dtype, shape and data_offsets")
    _expect(start <= stop <= file.size - first, f"{name} lies outside of the file")
    if not isinstance(dtype_name, str) or dtype_name not in _TYPES:
        raise UnsupportedTensorError(
            f"{name} has the element type {dtype_name!r}, which cloudckpt does not know: read the "
            "file with another library, and save this tensor with another type",
            uri=uri,
            item=name,
        )
    dtype = _TYPES[dtype_name]
    strides = math.prod(n for n in shape if n)  # also if the tensor has no elements
    _expect(
        strides * dtype.itemsize < 1 << 63 and math.prod(shape) * dtype.itemsize == stop - start,
        f"the data_offsets of {name} do not fit its shape and dtype",
    )
    stored = StoredBytes(file.key, first + start, stop - start, None, file.size, name, file.version)
    return StoredTensor(stored, dtype, tuple(shape))
