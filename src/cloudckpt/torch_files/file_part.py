"""A part of a file of ``torch.save``: what a state dict asks for, merged into it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from cloudckpt.errors import CheckpointError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.torch_files.torch_file import TorchFile, tensors_in
from cloudckpt.transfer.landing import copy_into

__all__ = ["FilePart"]

_Path = tuple[Any, ...]
"""Keys and indices that lead to an entry."""


class FilePart:
    """The part of a file that a state dict names: first :meth:`merged`, then :meth:`fetch`.

    Args:
        file: The file.
        map_location: A device for tensors that are made here; anything else stands for the host.
        uri: The file, for messages.

    Attributes:
        missing: What the file does not have.
    """

    def __init__(self, file: TorchFile, map_location: Any, uri: str) -> None:
        self.missing: list[str] = []
        self._file = file
        self._uri = uri
        self._device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: list[tuple[_Path, torch.Tensor]] = []

    def merged(self, target: Any, source: Any, path: _Path = ()) -> Any:
        """``target`` with what the file has for it; tensors are noted, to be fetched together."""
        if target is not None and not _is_like(target, source):
            raise CheckpointError(
                f"{_text(path)} is a {type(target).__name__}, and the file has a "
                f"{type(source).__name__} there",
                uri=self._uri,
                item=_text(path),
            )
        if isinstance(source, torch.Tensor):
            return self._tensor(target, source, path)
        if isinstance(source, Mapping):
            target = dict.fromkeys(source) if target is None else target
            for key in list(target):
                below = (*path, key)
                if key in source:
                    target[key] = self.merged(target[key], source[key], below)
                else:
                    self.missing.append(_text(below))
            return target
        if type(source) in (list, tuple):
            wanted = list(target) if target is not None else []
            if len(wanted) > len(source):
                raise CheckpointError(
                    f"{_text(path)} has {len(wanted)} entries, and the file {len(source)}",
                    uri=self._uri,
                    item=_text(path),
                )
            wanted.extend([None] * (len(source) - len(wanted)))
            pairs = enumerate(zip(wanted, source, strict=True))
            return type(source)(self.merged(t, s, (*path, at)) for at, (t, s) in pairs)
        return source if tensors_in(source) == [] else self._whole(path)

    def _tensor(
        self, target: torch.Tensor | None, source: torch.Tensor, path: _Path
    ) -> torch.Tensor:
        is_plain = self._file.extent(source) is not None
        if target is None:
            if not is_plain:
                whole: torch.Tensor = self._whole(path)
                return whole.to(self._device)
            target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        elif target.shape != source.shape or target.dtype != source.dtype:
            raise ShapeMismatchError(
                f"{_text(path)} has shape {tuple(source.shape)} and type {source.dtype} in the "
                f"file, and {tuple(target.shape)} and {target.dtype} in the state dict",
                uri=self._uri,
                item=_text(path),
            )
        elif target.layout != source.layout:
            raise UnsupportedTensorError(
                f"{_text(path)} has the layout {source.layout} in the file, and {target.layout} in "
                "the state dict: give None for it",
                uri=self._uri,
                item=_text(path),
            )
        if is_plain:
            self._pairs.append((source, target))
        else:
            self._others.append((path, target))
        return target

    def fetch(self) -> None:
        """Fills the tensors."""
        self._file.read_into(self._pairs)
        for path, target in self._others:
            copy_into(target, self._whole(path))

    @functools.cached_property
    def _all(self) -> Any:
        """What was saved, for what only ``torch.load`` can build."""
        return self._file.load()

    def _whole(self, path: _Path) -> Any:
        value = self._all
        for key in path:
            value = value[key]
        return value


def _text(path: _Path) -> str:
    """A path as torch's reader writes it."""
    text = ""
    for key in path:
        text += f"[{key}]" if type(key) is int else f".{key}" if text else str(key)
    return text or "the state dict"


def _is_like(target: Any, source: Any) -> bool:
    for kind in (torch.Tensor, Mapping, list, tuple):
        if isinstance(source, kind):
            return isinstance(target, kind)
    return isinstance(target, type(source))
