"""The contents of a ``torch.save`` file, by the keys that planners ask for."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from cloudckpt.checkpoint.torch_private import flatten_state_dict
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointError, MissingKeyError, UnsupportedTensorError
from cloudckpt.torch_files.batches import Batch, FileTensor
from cloudckpt.torch_files.torch_file import TorchFile, tensors_in
from cloudckpt.transfer.memory import narrow
from cloudckpt.uri import CheckpointURI

__all__ = ["FileContents"]


class FileContents:
    """The entries of a file, by planners' names.

    No tensor data is held, except one tensor saved with gaps between its elements; or everything,
    if there are entries that only ``torch.load`` can build.

    Attributes:
        file: The file.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointCorruptError: If it can't be read, or is not a ``torch.save`` file.
        CheckpointError: If it does not hold a dict.
        UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
    """

    def __init__(
        self, uri: CheckpointURI, config: Config, *, trust_pickle: bool, rank: int
    ) -> None:
        self.file = TorchFile(uri, config, trust_pickle=trust_pickle, rank=rank)
        self._uri = str(uri)
        self._entries = _named(self.file.skeleton(), self._uri)
        self._held: tuple[str, torch.Tensor] | None = None

    def select(
        self, kinds: Mapping[str, LoadItemType]
    ) -> tuple[tuple[FileTensor, ...], Mapping[str, bytes]]:
        """Selects the wanted entries, in the order of ``kinds``.

        Returns:
            The tensors, and the other values as written by ``torch.save``.

        Raises:
            MissingKeyError: If the file lacks a key.
            UnsupportedTensorError: If an entry is a tensor in the file but not in the state dict,
                or vice versa.
        """
        missing = [fqn for fqn in kinds if fqn not in self._entries]
        if missing:
            count = "1 key is" if len(missing) == 1 else f"{len(missing)} keys are"
            raise MissingKeyError(
                f"{count} not in the file, the first: {missing[:5]}. It has "
                f"{list(self._entries)[:5]}…; remove what is missing from the state dict",
                uri=self._uri,
                item=missing[0],
            )
        tensors: list[FileTensor] = []
        values: dict[str, bytes] = {}
        for fqn, kind in kinds.items():
            stored = self._entries[fqn]
            if isinstance(stored, torch.Tensor) != (kind != LoadItemType.BYTE_IO):
                raise UnsupportedTensorError(
                    f"{fqn} is a {type(stored).__name__} in the file, and the state dict has "
                    f"{'none' if kind == LoadItemType.BYTE_IO else 'a tensor'} for it",
                    uri=self._uri,
                    item=fqn,
                )
            if isinstance(stored, torch.Tensor):
                tensors.append(FileTensor(fqn, stored.dtype, tuple(stored.shape)))
            else:
                values[fqn] = self._pickled(fqn, stored)
        return tuple(tensors), values

    def fill(self, batch: Batch, room: torch.Tensor) -> None:
        """Reads the data of a batch, over parallel connections."""
        ranges = []
        for part in batch.slices:
            entry = self._entries[part.tensor.fqn]
            extent = self.file.extent(entry)
            if extent is not None and entry.is_contiguous():
                ranges.append((extent[0] + part.first, part.bytes_in(room)))
            else:
                part.view(room).copy_(narrow(self._tensor(part.tensor.fqn, entry), part.box))
        self.file.read_ranges(ranges)

    def _tensor(self, fqn: str, entry: torch.Tensor) -> torch.Tensor:
        if self._held is None or self._held[0] != fqn:
            self._held = None  # one at a time
            self._held = fqn, self._read(fqn, entry).detach()
        return self._held[1]

    def _read(self, fqn: str, entry: torch.Tensor) -> torch.Tensor:
        if self.file.extent(entry) is not None:
            return self.file.read(entry)
        tensor = self._whole[fqn] if entry.is_meta else entry
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise UnsupportedTensorError(
                f"{fqn} is a {type(tensor).__name__} of layout {tensor.layout}, which can't be "
                "sharded: convert it to a plain tensor and save it again",
                uri=self._uri,
                item=fqn,
            )
        return tensor

    @functools.cached_property
    def _whole(self) -> Mapping[str, Any]:
        """All entries with their data, for those that only ``torch.load`` can build."""
        return _named(self.file.load(), self._uri)

    def _pickled(self, fqn: str, value: Any) -> bytes:
        tensors = tensors_in(value)
        if tensors:
            raise UnsupportedTensorError(
                f"{fqn} holds tensors in the file, and the planner asks for it as one value: use "
                "a planner that flattens the state dict, and give it the same structure",
                uri=self._uri,
                item=fqn,
            )
        buffer = io.BytesIO()
        # an object may hide tensors that have no data yet
        torch.save(value if tensors is not None else self._whole[fqn], buffer)
        return buffer.getvalue()


def _named(state: Any, uri: str) -> dict[str, Any]:
    """The entries by name, both flattened and unflattened."""
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
