"""A ``torch.save`` file on a store, read as far as needed."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

import torch

from cloudckpt.checkpoint.torch_private import meta_reads_no_data, sparse_tensors_unchecked
from cloudckpt.checkpoint.values import load_saved, untrusted
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    InvalidURIError,
    ObjectNotFoundError,
)
from cloudckpt.events import Transferred
from cloudckpt.stores.base import ObjectStore
from cloudckpt.torch_files.object_file import ObjectFile, PinnedObject
from cloudckpt.torch_files.zip_directory import storage_sizes
from cloudckpt.transfer.boxes import row_major_slices
from cloudckpt.transfer.landing import BoxSink, FlatSink, Wanted, copy_into
from cloudckpt.transfer.memory import extent
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.retry import open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["TorchFile", "object_at", "tensors_in"]

_VALUES = (
    *(int, float, complex, bool, str, bytes, bytearray, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # says nothing about the file


class TorchFile:
    """A ``torch.save`` file read over the network, all from one version.

    torch unpickles the *skeleton*: what was saved, with tensors on the ``meta`` device, which have
    no data but know their place in the file. Any of them, or all at once, can be read.

    Args:
        uri: The file.
        config: Options.
        trust_pickle: Whether its pickle may run any code.
        rank: The reading rank, for the events.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointError: If it has another format, which the message names.
        CheckpointCorruptError: If it is truncated, or not a ``torch.save`` file.
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
            sizes = storage_sizes(self._file, self._uri)
        self._sizes = sizes or {}
        self._is_native = sizes is not None and meta_reads_no_data()

    @property
    def transferred(self) -> Transferred:
        """What was received so far."""
        return self._object.transferred

    def skeleton(self) -> Any:
        """What was saved, with tensors on the ``meta`` device: none of their data is read.

        The tensors have data where torch does not support this: in files of another byte order,
        where torch crashes swapping missing data, in files with nested or quantized tensors, and
        with some versions such as torch 2.9 in all files.

        Raises:
            UntrustedPickleError: If it needs code that is not on torch's allow-list.
            CheckpointCorruptError: If it can't be read.
        """
        return self._parsed()[0]

    def _parsed(self) -> tuple[Any, bool]:
        """The skeleton, and whether its tensors have their data."""
        if self._is_native:
            with contextlib.suppress(CheckpointCorruptError), sparse_tensors_unchecked():
                return self._load("meta"), False
        return self._load("cpu"), True

    def load(self, map_location: Any = "cpu") -> Any:
        """Loads what was saved.

        By default, all tensors are fetched at once straight into their memory; this takes one copy
        of the state and ``memory_budget``. With another ``map_location``, or if the file holds more
        than plain tensors in dicts, lists and tuples, ``torch.load`` reads it front to back.

        Raises:
            UntrustedPickleError: If it needs code that is not on torch's allow-list.
            CheckpointCorruptError: If it can't be read.
            CheckpointError: If the device named by ``map_location`` or the file does not exist.
        """
        if str(map_location) != "cpu":
            return self._load_to(map_location)
        value, is_whole = self._parsed()
        if is_whole:
            return value
        tensors = tensors_in(value)
        if tensors is None or any(self.extent(tensor) is None for tensor in tensors):
            return self._load("cpu")
        storages: dict[int, torch.Tensor] = {}  # as bytes, by their place: views go on sharing one
        for tensor in tensors:
            place, size = _place(tensor) or 0, tensor.untyped_storage().nbytes()
            if place not in storages:
                storages[place] = _bytes(size)
            torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                tensor, _filled(tensor, storages[place])
            )
        self._object.read(list(storages.items()))
        return value

    def extent(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The first byte in the file of a tensor of the skeleton, and the end after its last.

        None if only ``torch.load`` knows: if the tensor is more than a view of a storage, or the
        file was packed by a zip program other than torch's.
        """
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or not tensor.is_meta
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_neg()
            or tensor.is_conj()
            or vars(tensor)
        ):
            return None
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        first, stop = extent(tensor) if tensor.numel() else (0, 0)
        if place is None or stop > size or (size and self._sizes.get(place) != size):
            return None
        return place + first, place + stop

    def read_into(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fetches tensors of the skeleton into targets of the same shape, wherever these lie.

        Contiguous targets in host memory receive their bytes directly, all others through
        ``memory_budget``. A tensor saved with gaps between its elements is fetched with the gaps,
        one such tensor at a time.

        Raises:
            CheckpointReplacedError: If the file was replaced or deleted meanwhile.
        """
        gapless = [pair for pair in pairs if pair[0].is_contiguous()]
        wanted = (self._wanted(tensor, target.detach()) for tensor, target in gapless)
        self._object.fetch([want for of_one in wanted for want in of_one])
        for tensor, target in pairs:
            if not tensor.is_contiguous():
                copy_into(target, self.read(tensor))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the skeleton as it was saved, with its strides."""
        start, stop = self._extent(tensor)
        room = _bytes(stop - start)
        self._object.read([(start, room)])
        return _filled(tensor, room, start - (_place(tensor) or 0))

    def read_ranges(self, ranges: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fills each byte tensor with the file's bytes from a position on."""
        self._object.read(ranges)

    def _extent(self, tensor: torch.Tensor) -> tuple[int, int]:
        found = self.extent(tensor)
        assert found is not None
        return found

    def _wanted(self, tensor: torch.Tensor, target: torch.Tensor) -> Iterator[Wanted]:
        start, stop = self._extent(tensor)
        source, dtype = self._object.source(start, stop - start), tensor.dtype
        if target.is_contiguous():
            yield Wanted(source, 0, stop - start, FlatSink(target, dtype), True)
            return
        limit = even_share(0, self._config.most_connections)
        for rows in row_major_slices(tensor.shape, dtype.itemsize, limit):
            sink = BoxSink(target, rows.box, dtype, None)
            yield Wanted(source, rows.start, rows.stop, sink, False)

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
        file = cast(IO[bytes], self._file)
        file.seek(0)
        with self._errors():
            return load_saved(file, map_location, trust=self._trust_pickle)

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
                raise untrusted("the file", exc, self._uri) from None
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


def tensors_in(value: Any) -> list[torch.Tensor] | None:
    """The tensors in dicts, lists, tuples and sets; None if an object may hold others."""
    found: list[torch.Tensor] = []
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if type(value) in _VALUES or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple, set, frozenset):
            waiting.extend(value)
        elif type(value) in _DICTS:
            waiting.extend(value)
            waiting.extend(value.values())
            waiting.extend(getattr(value, "__dict__", {}).values())  # state_dict()._metadata
        else:
            return None
    return found


def _place(tensor: torch.Tensor) -> int | None:
    """The first byte in the file of the storage of a tensor of the skeleton."""
    # torch's own readers use it, too
    place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return place if isinstance(place, int) else None


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")  # whatever the default device is


def _filled(tensor: torch.Tensor, room: torch.Tensor, skipped: int = 0) -> torch.Tensor:
    """A tensor of the skeleton over the bytes of its storage but the first ``skipped``."""
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    first = int(tensor.storage_offset()) - skipped // tensor.itemsize
    made.set_(room.untyped_storage(), first, tensor.shape, tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
