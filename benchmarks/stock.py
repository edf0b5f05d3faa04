"""Stock DCP over a pair of storage classes, over local files, and over nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.places import Place, local_root


class StockDcp:
    """A pair of DCP storage classes under stock `dcp.save`, `dcp.load` and `dcp.async_save`."""

    def __init__(
        self, writer: Callable[[str], Any], reader: Callable[[str], Any], place: Place
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._place = place

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves through `torch.distributed.checkpoint.save`."""
        save(state_dict, storage_writer=self._writer(self._place.uri(name)))

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads through `torch.distributed.checkpoint.load`."""
        load(state_dict, storage_reader=self._reader(self._place.uri(name)))

    def async_save(self, state_dict: dict[str, Any], name: str) -> Any:
        """Starts a save in the background and returns what torch returns for it."""
        return async_save(state_dict, storage_writer=self._writer(self._place.uri(name)))


class Local:
    """Torch's own writer and reader on a folder in memory: no network at all."""

    def __init__(self, place: Place) -> None:
        self._root = local_root(place.port) / place.bucket

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves with `FileSystemWriter`'s defaults."""
        save(state_dict, storage_writer=FileSystemWriter(self._root / name))

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads with `FileSystemReader`."""
        load(state_dict, storage_reader=FileSystemReader(self._root / name))
