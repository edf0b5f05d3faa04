"""Parses torch's pickle at the beginning of ``.metadata``, from any writer, with checks."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.pickles import (
    CALLS,
    Builder,
    Constructor,
    Stub,
    UnknownNameError,
    home,
    unpickle,
)
from cloudckpt.checkpoint.torch_private import StorageInfo, with_strides
from cloudckpt.checkpoint.trailer import pickle_in
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.gc_pause import paused_gc

__all__ = ["load_metadata"]


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(home(module), name)


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Parses the pickle in ``.metadata``, of cloudckpt or of another writer.

    Args:
        data: The bytes of the commit object.
        uri: The commit object, for messages.
        trust_pickle: Whether the pickle may run any code, instead of only naming torch's classes.

    Raises:
        UntrustedPickleError: If it needs a class or function that is not known as harmless.
        CheckpointCorruptError: If it is damaged, or not metadata.
    """
    body = pickle_in(data, uri)
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                stubs = unpickle(body)
                metadata = Builder(_CONSTRUCTORS, _FORMATS, _place_of_another_library).value(stubs)
    except Warning:
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the checkpoint's metadata needs {unknown}, which is not one of torch's classes for "
            "it: if you trust everyone who can write to this location, pass trust_pickle=True",
            uri=uri,
        ) from None
    except Exception as exc:  # classes of the user may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged, is not the metadata of a checkpoint, or "
            "was written by a newer torch",
            uri=uri,
            cause=exc,
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata: this is not a "
            "checkpoint, or it is damaged",
            uri=uri,
        )
    return metadata


_NONE = type(None)
_END = 1 << 63
_DCP = "torch.distributed.checkpoint.metadata"
_ENCODING = f"{_DCP}._MEM_FORMAT_ENCODING"
_BY_NUMBER = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_FORMATS = {  # by their names, as Python 3.11.0 writes them
    f"{_ENCODING}.{str(known).replace('.', '_').upper()}": known for known in _BY_NUMBER
}


def _fields(
    cls: type[Any], kinds: Mapping[str, tuple[type[Any], ...]], *, more: bool = False
) -> Constructor:
    """Returns a constructor of a class with these fields; ``more``: it may have others."""
    others = (object,) if more else ()
    required = {name for name in kinds if not hasattr(cls, name)}

    def make(arguments: tuple[Any, ...], state: Any) -> Any:
        made = object.__new__(cls)  # constructors of frozen classes take four times as long
        if state is not None:
            vars(made).update(state)
        for name, value in vars(made).items():
            if not isinstance(value, kinds.get(name, others)):
                known = name in kinds
                problem = f"has the type {type(value).__name__}" if known else "is an unknown field"
                raise ValueError(f"invalid metadata: {cls.__name__}.{name[:200]} {problem}")
            numbers = value if type(value) is torch.Size else (value,) if type(value) is int else ()
            if numbers and not 0 <= min(numbers) <= max(numbers) < _END:
                raise ValueError(f"invalid metadata: {cls.__name__}.{name} is out of range")
        if arguments or not required <= vars(made).keys():
            raise ValueError(
                f"invalid metadata: {cls.__name__} lacks a required field, or was pickled with "
                "arguments of a constructor"
            )
        return made

    return make


def _tensor(arguments: tuple[Any, ...], state: Any) -> TensorStorageMetadata:
    found: TensorStorageMetadata = _tensor_fields(arguments, state)
    if math.prod(found.size) * found.properties.dtype.itemsize >= _END:
        raise ValueError("invalid metadata: a tensor has more bytes than a 64-bit number can count")
    for chunk in found.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise ValueError("invalid metadata: a chunk is not a ChunkStorageMetadata")
        if not len(chunk.offsets) == len(chunk.sizes) == len(found.size):
            raise ValueError("invalid metadata: a chunk has other dimensions than its tensor")
    return found


_PROPERTIES: tuple[Any, ...] = (
    *(torch.dtype, torch.layout, bool, torch.memory_format, bool),
    (tuple, _NONE),  # the strides of torch 2.15
)


def _properties(arguments: tuple[Any, ...], state: Any) -> TensorProperties:
    if arguments or type(state) is not tuple or len(state) not in (5, 6):
        raise ValueError("invalid metadata: a tensor's properties are not a tuple of 5 or 6 values")
    if not all(isinstance(one, kind) for one, kind in zip(state, _PROPERTIES, strict=False)):
        raise ValueError("invalid metadata: a property of a tensor has the wrong type")
    return with_strides(TensorProperties(*state[:5]), state[5] if len(state) == 6 else None)


def _format(arguments: tuple[Any, ...], state: Any) -> torch.memory_format:
    if state is not None:
        raise ValueError("invalid metadata: unexpected state of a memory format")
    return dict(enumerate(_BY_NUMBER))[arguments[0]]


def _metadata(arguments: tuple[Any, ...], state: Any) -> Metadata:
    found: Metadata = _metadata_fields(arguments, state)
    entries = (TensorStorageMetadata, BytesStorageMetadata)
    for name, entry in found.state_dict_metadata.items():
        if type(name) is not str or not isinstance(entry, entries):
            raise ValueError(
                f"invalid metadata: the entry {str(name)[:200]!r} has a name that is no string, or "
                "describes neither a tensor nor a pickled value as torch does"
            )
    return found


_PLACE = _fields(
    StorageInfo,
    {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, tuple, _NONE),
    },
)
_metadata_fields = _fields(
    Metadata,
    {
        "state_dict_metadata": (dict,),
        "storage_meta": (StorageMeta, _NONE),
        "version": (str, _NONE),
    },
    more=True,  # libraries add fields that torch does not have
)
_tensor_fields = _fields(
    TensorStorageMetadata,
    {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
)
_SIZE = (torch.Size,)
_CONSTRUCTORS: Mapping[str, Constructor] = {
    **CALLS,
    _ENCODING: _format,
    f"{_DCP}.Metadata": _metadata,
    f"{_DCP}.StorageMeta": _fields(StorageMeta, {"save_id": (str, _NONE)}, more=True),
    f"{_DCP}.TensorStorageMetadata": _tensor,
    f"{_DCP}.BytesStorageMetadata": _fields(BytesStorageMetadata, {}),
    f"{_DCP}.ChunkStorageMetadata": _fields(
        ChunkStorageMetadata, {"offsets": _SIZE, "sizes": _SIZE}
    ),
    f"{_DCP}.MetadataIndex": _fields(
        MetadataIndex, {"fqn": (str,), "offset": (torch.Size, _NONE), "index": (int, _NONE)}
    ),
    f"{_DCP}.TensorProperties": _properties,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _PLACE,
}


def _place_of_another_library(builder: Builder, stub: Stub) -> Any:
    """Makes torch's ``_StorageInfo`` of an instance of any class that has the same fields.

    Libraries such as OLMo-core have classes of their own for it.
    """
    state = stub.state
    is_plain = not stub.is_call and stub.entries is None and type(state) is dict
    if not is_plain or "relative_path" not in state:
        raise UnknownNameError(stub.name)
    return _PLACE(stub.arguments, builder.value(state))
