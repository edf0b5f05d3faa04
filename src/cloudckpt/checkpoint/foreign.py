"""Parses the pickle in ``.metadata``, of any writer; by default without running its code."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

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
from cloudckpt.checkpoint.torch_private import MemoryFormat, StorageInfo, with_strides
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
        UntrustedPickleError: If the pickle needs a class or function that is not known as harmless.
        CheckpointCorruptError: If the pickle is damaged, or not metadata.
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
                if isinstance(metadata, Metadata):  # its chunks must fit their tensors
                    table_of_metadata(Metadata(metadata.state_dict_metadata))
    except Warning:
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the checkpoint's metadata needs {unknown}, which is not among the classes of torch's "
            "metadata: if you trust everyone who can write here, pass trust_pickle=True",
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


_END = 1 << 63


def _classes(annotation: Any) -> tuple[type[Any], ...]:
    """Returns the classes that a type annotation of a field allows, such as ``str | None``."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    allowed = [
        get_origin(one) or one for one in (get_args(annotation) if is_union else [annotation])
    ]
    named: dict[Any, tuple[type[Any], ...]] = {Any: (object,), Sequence: (list, tuple)}
    return tuple(itertools.chain.from_iterable(named.get(one, (one,)) for one in allowed))


def _instance_of(cls: type[Any], *, more: bool = False, checked: str = "") -> Constructor:
    """Returns a function that makes instances of a dataclass of torch, and checks their fields.

    Args:
        cls: The class.
        more: Whether fields that torch does not have are accepted, too.
        checked: The only field that is checked; empty for all.
    """
    hints = get_type_hints(cls)
    annotated = {name: _classes(hints[name]) for name in ([checked] if checked else hints)}
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    others = (object,) if more else ()

    def make(arguments: tuple[Any, ...], state: Any) -> Any:
        made = object.__new__(cls)  # constructors of frozen classes take four times as long
        if state is not None:
            vars(made).update(state)
        for name, value in vars(made).items():
            if not isinstance(value, annotated.get(name, others)):
                raise ValueError(
                    f"invalid metadata: {cls.__name__}.{name[:200]} is an unknown field, or can't "
                    f"be a {type(value).__name__}"
                )
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


def _properties(arguments: tuple[Any, ...], state: Any) -> TensorProperties:
    names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    *known, strides = state if len(state) == 6 else (*state, None)  # torch 2.15 has strides
    fields = dict(zip(names, known, strict=True))
    made: TensorProperties = _plain_properties(arguments, fields)
    return with_strides(made, strides)


_plain_properties = _instance_of(TensorProperties)
_place = _instance_of(StorageInfo)
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
    f"{_DCP}.StorageMeta": _instance_of(StorageMeta, more=True, checked="save_id"),
    **{
        f"{_DCP}.{one.__name__}": _instance_of(one)
        for one in (TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
    },
    f"{_DCP}.MetadataIndex": _instance_of(MetadataIndex),
    f"{_DCP}.TensorProperties": _properties,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _place,
}


def _place_of_another_library(builder: Builder, stub: Stub) -> Any:
    """Makes torch's ``_StorageInfo`` from an instance of any class that has the same fields.

    Some libraries, such as OLMo-core, describe the location of an item by a class of their own.
    """
    state = stub.state
    is_plain = not stub.is_call and stub.entries is None and type(state) is dict
    if not is_plain or "relative_path" not in state:
        raise UnknownNameError(stub.name)
    return _place(stub.arguments, builder.value(state))
