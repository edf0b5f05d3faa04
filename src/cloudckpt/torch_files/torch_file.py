"""A file of ``torch.save`` on a store, read as far as needed."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import torch

from cloudckpt.checkpoint.torch_private import sparse_tensors_unchecked
from cloudckpt.checkpoint.values import load_plain, refused, whatever_it_warns
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    InvalidURIError,
    ObjectNotFoundError,
    UntrustedPickleError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.torch_files.object_file import ObjectFile, PinnedObject
from cloudckpt.torch_files.skeletons import (
    NotPlainError,
    Place,
    new_storage,
    replace_tensors,
)
from cloudckpt.torch_files.zip_directory import storage_sizes
from cloudckpt.transfer.boxes import row_major_slices
from cloudckpt.transfer.landing import BoxSink, FlatSink, Wanted, copy_into
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.opening import open_store
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["TorchFile", "object_at"]

_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # says nothing about the file


class TorchFile:
    """A file of ``torch.save`` that is read over the network; all of it from one version.

    Args:
        uri: Where it is.
        config: Options.
        trust_pickle: Whether its pickle may run any code.
        rank: Who reads, for the events.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointError: If it is of another format, which the message names.
        CheckpointCorruptError: If it is truncated, or no file of ``torch.save``.
    """

    def __init__(
        self, uri: CheckpointURI, config: Config, *, trust_pickle: bool = False, rank: int = 0
    ) -> None:
        self._uri = str(uri)
        self._config = config
        self._trust_pickle = trust_pickle
        store, key = object_at(uri, config)
        try:
            self._object = PinnedObject(store, key, config, TransferStats(self._uri, rank))
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                "there is no file here: check the location (a folder with a DCP checkpoint is read "
                "by cloudckpt.load or converted by dcp_to_torch_save)",
                uri=self._uri,
            ) from error
        self._file = ObjectFile(self._object, config)
        with self._errors():
            self._sizes: Mapping[int, int] = storage_sizes(self._file, self._uri)

    @property
    def transferred(self) -> Transferred:
        """What was received until now."""
        return self._object.transferred

    def skeleton(self) -> Any:
        """What was saved, with tensors on the ``meta`` device: nothing of their data is read.

        Raises:
            UntrustedPickleError: If it needs code that is not on torch's allow-list.
            CheckpointCorruptError: If it can't be read.
        """
        with sparse_tensors_unchecked():
            return self._load("meta")

    def load(self, map_location: Any = "cpu") -> Any:
        """What was saved.

        With the default, all tensors are fetched at once straight into their memory; it takes one
        copy of the state and ``memory_budget``. With another ``map_location``, or if the file holds
        more than plain tensors in dicts, lists and tuples, ``torch.load`` reads it front to back.

        Raises:
            UntrustedPickleError: If it needs code that is not on torch's allow-list.
            CheckpointCorruptError: If it can't be read.
            CheckpointError: If there is no such device as ``map_location``, or the file, names.
        """
        if str(map_location) != "cpu":
            return self._load_to(map_location)
        if not self._sizes:
            return self._load("cpu")
        skeleton = self.skeleton()
        rooms: dict[tuple[int, int], torch.UntypedStorage] = {}

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            place = self.place(tensor)
            if place is None:
                raise NotPlainError
            where = place.storage_offset, place.storage_nbytes
            if where not in rooms:
                rooms[where] = new_storage(place.storage_nbytes)
            return place.view(rooms[where])

        try:
            value = replace_tensors(skeleton, filled)
        except NotPlainError:
            rooms.clear()
            return self._load("cpu")
        self._object.read([(offset, _memory(room)) for (offset, _), room in rooms.items()])
        return value

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor of the skeleton lies in the file; None if only ``torch.load`` can tell."""
        place = Place.of(tensor)
        if place is None or not place.storage_nbytes:
            return place
        found = self._sizes.get(place.storage_offset)  # else the file was made by another zip
        return place if found == place.storage_nbytes else None

    def read_into(self, pairs: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Fetches tensors into targets of the same shape, of any device, strides and type.

        Contiguous targets in host memory receive their bytes themselves, all others through
        ``memory_budget``. A tensor that was saved with gaps between its elements is fetched with
        them, one such tensor at a time.

        Raises:
            CheckpointReplacedError: If the file was replaced or deleted meanwhile.
        """
        wanted: list[Wanted] = []
        for place, target in pairs:
            if place.is_row_major:
                wanted.extend(self._wanted(place, target.detach()))
        self._object.fetch(wanted)
        for place, target in pairs:
            if not place.is_row_major:
                copy_into(target, self.read(place))

    def read(self, place: Place) -> torch.Tensor:
        """A tensor as it was saved, with its strides."""
        first, stop = place.extent
        room = new_storage(stop - first)
        self._object.read([(place.storage_offset + first, _memory(room))])
        return place.view(room, first)

    def read_bytes(
        self, ranges: Sequence[tuple[int, memoryview]], *, request_size: int | None = None
    ) -> None:
        """Fetches ranges of the file, each into its view, by requests of about that many bytes."""
        self._object.read(ranges, request_size=request_size)

    def _wanted(self, place: Place, target: torch.Tensor) -> Iterator[Wanted]:
        nbytes = place.extent[1] - place.extent[0]
        start = place.storage_offset + place.extent[0]
        source, dtype = self._object.source(start, nbytes, place.name), place.dtype
        if target.is_contiguous():
            yield Wanted(source, 0, nbytes, FlatSink(target, dtype), True)
            return
        limit, at = self._config.request_size or even_share(0, self._config.connections), 0
        for box in row_major_slices(place.shape, dtype.itemsize, limit):
            sink = BoxSink(target, box, dtype, None)
            stop = at + torch.Size([length for _, length in box]).numel() * dtype.itemsize
            yield Wanted(source, at, stop, sink, False)
            at = stop

    def _load_to(self, map_location: Any) -> Any:
        try:
            return self._load(map_location)
        except CheckpointCorruptError as error:
            if self._file.failure is not None:
                raise
            self.skeleton()  # which fails, too, if it is the file that can't be read
            raise CheckpointError(
                "torch.load can't put the tensors where map_location, or the file itself, says: "
                'map_location="cpu" needs no other device',
                uri=self._uri,
                cause=error.cause,
            ) from error

    def _load(self, map_location: Any) -> Any:
        def load() -> Any:
            self._file.seek(0)
            if not self._trust_pickle:
                return load_plain(cast(IO[bytes], self._file), map_location)
            return torch.load(
                cast(IO[bytes], self._file),
                map_location=map_location,
                weights_only=False,
                mmap=False,  # whatever torch.utils.serialization.config says: this is no path
            )

        with self._errors():
            return whatever_it_warns(load)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if self._file.failure is not None:
                raise self._file.failure from None
            if isinstance(exc, (CloudCheckpointError, Warning, *_OUT_OF_MEMORY)):
                raise
            if isinstance(exc, pickle.UnpicklingError) and not self._trust_pickle:
                raise UntrustedPickleError(
                    "the file can't be loaded without running code that is not on torch's "
                    "allow-list: if you trust whoever can write to this location, pass "
                    "trust_pickle=True, or allow the class by "
                    "torch.serialization.add_safe_globals([...])",
                    uri=self._uri,
                    cause=refused(exc),
                ) from None
            raise CheckpointCorruptError(
                "torch.load can't read the file: it is damaged, or was written by something else",
                uri=self._uri,
                cause=exc,
            ) from exc


def object_at(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """The store and the key of a file.

    Raises:
        InvalidURIError: If the location is a bucket, or the root of the file system.
    """
    if not uri.prefix or uri.prefix == "/":
        raise InvalidURIError(f"{uri} names no file: write for example {uri.join('model.pt')}")
    return open_store(uri, config), uri.prefix


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """Its bytes; only valid as long as the caller keeps it."""
    return bytes_of(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
