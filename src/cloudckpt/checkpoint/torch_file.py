"""Files of ``torch.save`` on a store: written whole or not at all, read as far as needed."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import torch

from cloudckpt.checkpoint.pickles import refused
from cloudckpt.checkpoint.skeletons import NotPlainError, Place, new_storage, replace_tensors
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    InvalidURIError,
    ObjectNotFoundError,
    UntrustedPickleError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.registry import open_store
from cloudckpt.transfer.download import Wanted
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.sinks import BoxSink, FlatSink
from cloudckpt.transfer.staging import row_major_slices
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.transfer.streams import ObjectFile, PinnedObject, sending
from cloudckpt.uri import CheckpointURI

__all__ = ["TorchFile", "check_destination", "write_torch_file"]

_ZIP = b"PK\3\4"
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # torch's magic, pickled
_HAS_DESCRIPTOR = 0x08  # flag of a record that has its sizes behind it
_MAX32 = 0xFFFFFFFF


def check_destination(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """The store and the key of a file to be written.

    Raises:
        InvalidURIError: If the location can't be that of a file.
        CheckpointExistsError: If there is something and ``overwrite`` is off. This looks once: it
            does not keep two writers apart.
    """
    store, key = _object(uri, config)
    if uri.scheme == "file" and os.path.isdir(key):
        raise InvalidURIError(f"{uri} is a folder: write for example {uri.join('model.pt')}")
    if not config.overwrite:
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(config.retry).call(lambda: store.head(key))
            raise CheckpointExistsError(
                "there is a file already and overwrite is off: delete it, or write another one",
                uri=str(uri),
            )
    return store, key


def write_torch_file(value: Any, uri: CheckpointURI, config: Config) -> Transferred:
    """``torch.save`` to a location: atomic, in parallel parts.

    The file appears, or replaces the one that is there, when it is complete. Besides ``value`` it
    takes ``memory_budget``; storages of accelerators pass through host memory one by one.

    Raises:
        CheckpointError: If ``torch.save`` can't write ``value``.
        StoreError: If the store refuses or stays unreachable. As with any failure, nothing changes
            at the location.
    """
    store, key = check_destination(uri, config)
    stats = TransferStats()
    with sending(store, key, config, stats, expected=_size_of(value)) as stream:
        try:
            torch.save(value, cast(IO[bytes], stream))
        except Exception as exc:
            if stream.failure is not None or isinstance(exc, CloudCheckpointError):
                raise
            raise CheckpointError(
                "torch.save can't write this state: remove or convert what it names",
                uri=str(uri),
                cause=exc,
            ) from exc
    return stats.snapshot()


class TorchFile:
    """A file of ``torch.save`` that is read over the network; all of it from one version.

    Args:
        uri: Where it is.
        config: Options.
        trust_pickle: Whether its pickle may run any code.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointError: If it is of another format, which the message names.
        CheckpointCorruptError: If it is truncated, or no file of ``torch.save``.
    """

    def __init__(self, uri: CheckpointURI, config: Config, *, trust_pickle: bool = False) -> None:
        self._uri = str(uri)
        self._config = config
        self._trust_pickle = trust_pickle
        store, key = _object(uri, config)
        try:
            self._object = PinnedObject(store, key, config)
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                "there is no file here: check the location (a folder with a DCP checkpoint is read "
                "by cloudckpt.load or converted by dcp_to_torch_save)",
                uri=self._uri,
            ) from error
        self._file = ObjectFile(self._object, config)
        self._sizes = self._read_directory()

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
        return self._load("meta")

    def load(self, map_location: Any = "cpu") -> Any:
        """What was saved.

        With the default, all tensors are fetched at once straight into their memory; it takes one
        copy of the state and ``memory_budget``. With another ``map_location``, or if the file holds
        more than plain tensors in dicts, lists and tuples, ``torch.load`` reads it front to back.

        Raises:
            UntrustedPickleError: If it needs code that is not on torch's allow-list.
            CheckpointCorruptError: If it can't be read.
        """
        if str(map_location) != "cpu" or not self._sizes:
            return self._load(map_location)
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
            CheckpointCorruptError: If the file was replaced or deleted meanwhile.
        """
        wanted: list[Wanted] = []
        for place, target in pairs:
            if place.is_row_major:
                wanted.extend(self._wanted(place, target.detach()))
        self._object.fetch(wanted)
        for place, target in pairs:
            if not place.is_row_major:
                target.detach().copy_(self.read(place))

    def read(self, place: Place) -> torch.Tensor:
        """A tensor as it was saved, with its strides."""
        first, stop = place.extent
        room = new_storage(stop - first)
        self._object.read([(place.storage_offset + first, _memory(room))])
        return place.view(room, first)

    def read_bytes(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fetches ranges of the file, each into its view."""
        self._object.read(ranges)

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

    def _load(self, map_location: Any) -> Any:
        self._file.seek(0)
        with self._errors():
            return torch.load(
                cast(IO[bytes], self._file),
                map_location=map_location,
                weights_only=not self._trust_pickle,
            )

    def _read_directory(self) -> Mapping[int, int]:
        """The size of each record with a storage, by the offset of its bytes."""
        with self._errors():
            head = self._file.read(len(_LEGACY)) or b""
            if not head.startswith(_ZIP):
                raise self._foreign(head)
            try:
                with zipfile.ZipFile(self._file) as archive:
                    return self._records(archive)
            except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, ValueError) as exc:
                raise CheckpointCorruptError(
                    f"the file is truncated or damaged: its {self._object.info.size} bytes do not "
                    "end with the directory of a zip archive; copy it here again",
                    uri=self._uri,
                    cause=exc,
                ) from exc

    def _foreign(self, head: bytes) -> CheckpointError:
        if head.startswith(_LEGACY):
            return CheckpointError(
                "the file is in torch's legacy format, of before torch 1.6, which can't be read in "
                "parts: torch.load a local copy and torch.save it again",
                uri=self._uri,
            )
        return CheckpointCorruptError("the file is not one of torch.save", uri=self._uri)

    def _records(self, archive: zipfile.ZipFile) -> Mapping[int, int]:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        names = {entry.filename.partition("/")[2] for entry in entries}
        if "constants.pkl" in names:
            raise CheckpointError(
                "the file is a TorchScript archive, not a state: torch.jit.load a local copy and "
                "torch.save its state_dict()",
                uri=self._uri,
            )
        if "data.pkl" not in names:
            raise CheckpointCorruptError(
                "the file is a zip archive, but not one of torch.save", uri=self._uri
            )
        root = entries[0].filename.partition("/")[0]
        order = archive.read(f"{root}/byteorder") if "byteorder" in names else b"little"
        if order.decode() != sys.byteorder or ".format_version" not in names:
            return {}  # torch.load converts, and reads each header to find the data
        sizes: dict[int, int] = {}
        ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
        for entry, end in zip(entries, ends, strict=True):
            if entry.compress_type == zipfile.ZIP_STORED and entry.file_size:
                descriptor = 0
                if entry.flag_bits & _HAS_DESCRIPTOR:
                    is_zip64 = max(entry.file_size, entry.header_offset) >= _MAX32
                    descriptor = 24 if is_zip64 else 16
                sizes[end - descriptor - entry.file_size] = entry.file_size
        return sizes

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if self._file.failure is not None:
                raise self._file.failure from None
            if isinstance(exc, CloudCheckpointError):
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


def _object(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    if not uri.prefix or uri.prefix == "/":
        raise InvalidURIError(f"{uri} names no file: write for example {uri.join('model.pt')}")
    return open_store(uri, config), uri.prefix


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """Its bytes; only valid as long as the caller keeps it."""
    return bytes_of(torch.empty(0, dtype=torch.uint8).set_(storage))


def _size_of(value: Any) -> int:
    """About how many bytes ``torch.save`` will write."""
    storages: dict[int, int] = {}
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # subclasses without a storage
                storage = value.untyped_storage()
                storages[storage._cdata] = max(storage.nbytes(), value.nbytes)
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return sum(storages.values()) + 1024 * (len(storages) + 1)
