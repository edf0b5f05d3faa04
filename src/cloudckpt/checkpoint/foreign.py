"""Parses the pickle in ``.metadata``, of any writer; by default without running its code."""

from __future__ import annotations

import dataclasses
import io
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

from cloudckpt.checkpoint.from_torch import table_of_metadata
from cloudckpt.checkpoint.pickles import (
    CALLS,
    Builder,
    Constructor,
    Stub,
    UnknownNameError,
    Unpickler,
    call_of,
    home,
)
from cloudckpt.checkpoint.torch_private import MemoryFormat, StorageInfo
from cloudckpt.checkpoint.trailer import pickle_in
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.gc_pause import paused_gc

__all__ = ["load_metadata"]


def _check(metadata: Metadata) -> None:
    """Checks the fields ``state_dict_metadata`` and ``storage_meta`` of unpickled metadata.

    Raises:
        ValueError: If they have other types than torch writes, or invalid numbers.
    """
    table_of_metadata(Metadata(metadata.state_dict_metadata))
    if not isinstance(metadata.storage_meta, (StorageMeta, type(None))):
        raise ValueError("invalid metadata: storage_meta is not a StorageMeta")


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(home(module), name)


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Parses the pickle in ``.metadata``, of cloudckpt or of another writer.

    Args:
        data: All bytes of the commit object.
        uri: The URI of the commit object, for messages.
        trust_pickle: Whether the pickle may run any code, instead of only naming classes that are
            known as harmless.

    Raises:
        UntrustedPickleError: If the pickle needs a class or function that is not known as harmless.
        CheckpointCorruptError: If the pickle is damaged, is not metadata, or, with
            ``trust_pickle``, needs a class that can't be imported here.
    """
    body = pickle_in(data, uri)
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                builder = Builder(_CONSTRUCTORS, _BY_NAME, _place_of_another_library)
                stubs = Unpickler(io.BytesIO(body)).load()  # lives as long as the builder
                metadata = builder.value(stubs)
                if isinstance(metadata, Metadata):
                    _check(metadata)
    except Warning:
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the metadata needs {unknown}, which is not a class of torch's metadata: if you trust "
            "everyone who can write here, load it with trust_pickle=True, and save it again",
            uri=uri,
        ) from None
    except Exception as exc:  # classes of the user may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged, is not the metadata of a checkpoint, or "
            "needs a newer torch or a class that can't be imported here; see the cause, restore "
            "the object from a backup, or load an older checkpoint",
            uri=uri,
            cause=exc,
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is of class {type(metadata).__name__}, not of torch's Metadata: this is "
            "no checkpoint, or damaged; check the location, or load an older checkpoint",
            uri=uri,
        )
    return metadata


def _instance_of(cls: type[Any], *, more: bool = False) -> Constructor:
    """Returns a constructor that makes instances of a dataclass of torch from their pickled state.

    The constructor raises ValueError if a field is missing or unknown, or if the pickle passes
    arguments to the class.

    Args:
        cls: The class.
        more: Whether unknown fields are accepted.
    """
    fields = dataclasses.fields(cls)
    known = {one.name for one in fields}
    required = {one.name for one in fields if one.default is one.default_factory is _MISSING}

    def make(arguments: tuple[Any, ...], state: Any) -> Any:
        made = object.__new__(cls)  # constructors of frozen classes take four times as long
        vars(made).update(state or {})
        names = vars(made).keys()
        if arguments or not required <= names or not (more or names <= known):
            raise ValueError(
                f"invalid metadata: {cls.__name__} lacks a required field, has an unknown one, or "
                "was pickled with arguments of a constructor"
            )
        return made

    return make


_MISSING = dataclasses.MISSING
_END = 1 << 63
_any_place = _instance_of(StorageInfo)


def _place(arguments: tuple[Any, ...], state: Any) -> StorageInfo:
    made: StorageInfo = _any_place(arguments, state)
    numbers, transforms = (made.offset, made.length), made.transform_descriptors
    if not all(type(number) is int and 0 <= number < _END for number in numbers):
        raise ValueError("invalid metadata: the location of an item is out of range")
    if type(made.relative_path) is not str or not isinstance(transforms, (list, tuple, type(None))):
        raise ValueError("invalid metadata: an item has no name of an object, or no list of codecs")
    return made


def _properties(arguments: tuple[Any, ...], state: Any) -> TensorProperties:
    return TensorProperties(*state[:5])  # torch 2.15 has strides, too, which nothing reads


_DCP = "torch.distributed.checkpoint.metadata"
_ENCODING = f"{_DCP}.{MemoryFormat.__name__}"


def _format(encoding: MemoryFormat) -> Any:
    return getattr(torch, encoding.name.removeprefix("TORCH_").lower(), None)


_BY_NAME = {  # as Python 3.11.0 writes the members
    f"{_ENCODING}.{encoding.name}": _format(encoding) for encoding in MemoryFormat
}
_CONSTRUCTORS: Mapping[str, Constructor] = {
    **CALLS,
    _ENCODING: call_of(lambda number: _format(MemoryFormat(number)), int),
    # libraries add fields that torch does not have
    f"{_DCP}.Metadata": _instance_of(Metadata, more=True),
    f"{_DCP}.StorageMeta": _instance_of(StorageMeta, more=True),
    **{
        f"{_DCP}.{one.__name__}": _instance_of(one)
        for one in (TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
    },
    f"{_DCP}.MetadataIndex": _instance_of(MetadataIndex),
    f"{_DCP}.TensorProperties": _properties,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _place,
}


def _place_of_another_library(builder: Builder, stub: Stub) -> Any:
    """Makes torch's ``_StorageInfo`` from a pickled instance of any class with the same fields.

    Some libraries, such as OLMo-core, describe the location of an item by a class of their own.

    Raises:
        UnknownNameError: If the instance has no field ``relative_path``, or is not made from fields
            alone.
        ValueError: If another field is missing or unknown, or a field is invalid.
    """
    state = stub.state
    is_plain = not stub.is_call and stub.entries is None and type(state) is dict
    if not is_plain or "relative_path" not in state:
        raise UnknownNameError(stub.name)
    return _place(stub.arguments, builder.value(state))
