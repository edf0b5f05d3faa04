"""Pickles as tests need them: of calls, in files as ``torch.save`` writes them, in opcodes."""

import dataclasses
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata


class Call:
    """Pickles as a call, and as the state that its result is given."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def drop_strides(metadata: Metadata) -> None:
    """Drops from properties what torch 2.15 adds, and torch 2.14 can't read."""
    for entry in metadata.state_dict_metadata.values():
        if hasattr(properties := getattr(entry, "properties", None), "strides"):
            entry.properties = dataclasses.replace(properties, strides=None)


def touch(path: object) -> Call:
    """Leaves a file when it is unpickled."""
    return Call(os.system, f"touch '{path}'")


def saved(value: Any, **options: Any) -> bytes:
    """A file of ``torch.save``."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, buffer, **options)
    return buffer.getvalue()


def data_pkl(file: bytes) -> bytes:
    """The pickle in a file of ``torch.save``."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return archive.read("archive/data.pkl")


def containing(pickled: bytes) -> bytes:
    """A file of ``torch.save`` with this pickle."""
    source, target = zipfile.ZipFile(io.BytesIO(saved(torch.ones(1)))), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            archive.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


def opcodes(value: Any) -> bytes:
    """What makes a value, to be put among other opcodes: it uses no memo."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]
