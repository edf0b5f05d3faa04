"""What a file of ``torch.save`` has for the keys that planners ask for."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from cloudckpt.checkpoint.torch_private import flatten_state_dict
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointError, MissingKeyError, UnsupportedTensorError
from cloudckpt.torch_files.skeletons import NotPlainError, Place, has_tensors
from cloudckpt.torch_files.torch_file import TorchFile
from cloudckpt.uri import CheckpointURI

__all__ = ["FileContents", "StoredTensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: its name, element type and shape."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FileContents:
    """The entries of a file, by the names that planners give them; no data of tensors is held.

    Attributes:
        file: The file.
        uri: Its location.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointCorruptError: If it can't be read, or is not one of ``torch.save``.
        CheckpointError: If it holds no dict.
        UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
    """

    def __init__(
        self, uri: CheckpointURI, config: Config, *, trust_pickle: bool, rank: int
    ) -> None:
        self.uri = str(uri)
        self.file = TorchFile(uri, config, trust_pickle=trust_pickle, rank=rank)
        self._entries = _named(self.file.skeleton(), self.uri)
        self._whole: Mapping[str, Any] | None = None

    def select(
        self, kinds: Mapping[str, LoadItemType]
    ) -> tuple[tuple[StoredTensor, ...], Mapping[str, bytes]]:
        """What is wanted, in the order of ``kinds``.

        Returns:
            The tensors, and what is no tensor, as ``torch.save`` writes it.

        Raises:
            MissingKeyError: If the file lacks a key.
            UnsupportedTensorError: If an entry is a tensor in the file and none in the state dict,
                or the other way round.
        """
        missing = [fqn for fqn in kinds if fqn not in self._entries]
        if missing:
            count = "1 key is" if len(missing) == 1 else f"{len(missing)} keys are"
            raise MissingKeyError(
                f"{count} not in the file, the first: {missing[:5]}. It has "
                f"{list(self._entries)[:5]}…; remove what is missing from the state dict",
                uri=self.uri,
                item=missing[0],
            )
        tensors: list[StoredTensor] = []
        values: dict[str, bytes] = {}
        for fqn, kind in kinds.items():
            stored = self._entries[fqn]
            if isinstance(stored, torch.Tensor) != (kind != LoadItemType.BYTE_IO):
                raise UnsupportedTensorError(
                    f"{fqn} is a {type(stored).__name__} in the file, and the state dict has "
                    f"{'none' if kind == LoadItemType.BYTE_IO else 'a tensor'} for it",
                    uri=self.uri,
                    item=fqn,
                )
            if isinstance(stored, torch.Tensor):
                tensors.append(StoredTensor(fqn, stored.dtype, tuple(stored.shape)))
            else:
                values[fqn] = self._pickled(fqn, stored)
        return tuple(tensors), values

    def place(self, fqn: str) -> Place | None:
        """Where a tensor lies; None if only ``torch.load`` can tell."""
        return self.file.place(self._entries[fqn])

    def whole(self) -> Mapping[str, Any]:
        """All entries with their data, in memory."""
        if self._whole is None:
            self._whole = _named(self.file.load(), self.uri)
        return self._whole

    def _pickled(self, fqn: str, value: Any) -> bytes:
        try:
            holds_tensors = has_tensors(value)
        except NotPlainError:  # an object, which may hide tensors that have no data yet
            holds_tensors, value = False, self.whole()[fqn]
        if holds_tensors:
            raise UnsupportedTensorError(
                f"{fqn} holds tensors in the file, and the planner asks for it as one value: use "
                "a planner that flattens the state dict, and give it the same structure",
                uri=self.uri,
                item=fqn,
            )
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()


def _named(state: Any, uri: str) -> dict[str, Any]:
    """The entries by their names, flattened and not."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the file holds a {type(state).__name__}, and only a dict can be loaded by key",
            uri=uri,
        )
    try:
        flattened, _ = flatten_state_dict(state)
    except ValueError as exc:
        raise CheckpointError(
            "two entries of the file have the same name when it is flattened", uri=uri, cause=exc
        ) from exc
    return {**{str(key): value for key, value in state.items()}, **flattened}
