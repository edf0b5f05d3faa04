"""Exports a committed checkpoint as a model in safetensors files, by store-side copies if possible.

The store copies a part of a file if it is a range of one data object of the checkpoint. Ranges that
are smaller than the least part (headers, small tensors, the start of a tensor after them) are read
and sent by this process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.model_folder import KeyMapping, renamed
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    InvalidRequestError,
    InvalidURIError,
    KeyCollisionError,
)
from cloudckpt.hf.commit import FilesUnderConstruction, look_for_older
from cloudckpt.hf.layout import (
    Chunk,
    FilePlan,
    TensorPlan,
    bytes_of_size,
    least_part,
    model_location,
    natural,
    plan_files,
)
from cloudckpt.hf.sending import FileUpload, RankWork, plan_work, send_work
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Part, Upload
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.download import download
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.parts import PartPlan, Piece
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Exported", "export_checkpoint"]

logger = logging.getLogger("cloudckpt")

_COPY = 256 * MIB  # a store copies some hundred MiB per second and request


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        files: The names of the files.
        nbytes: The bytes of the files.
        moved: The bytes that this process sent; the rest was copied within the store.
        left_out: The names of entries that are not tensors, or that ``key_mapping`` left out.
    """

    files: Sequence[str]
    nbytes: int
    moved: int
    left_out: Sequence[str]


def export_checkpoint(
    source: URILike,
    target: URILike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    fqn_to_file: Mapping[str, int] | None = None,
    key_mapping: KeyMapping | None = None,
    config: Config | None = None,
) -> Exported:
    """Exports the tensors of a committed checkpoint as a model in safetensors files.

    The files are those of :func:`save`, and are committed in the same way. If the store can copy
    ranges, and reach both locations with the same credentials, it copies nearly all bytes itself.
    Otherwise, and if types are converted, or tensors were saved in columns, this process writes the
    files one after another, in about ``max_shard_size`` bytes of memory. Call it on one rank: it
    uses no collectives.

    Args:
        source: The location of a committed checkpoint, of cloudckpt or of torch.
        target: The folder of the model.
        max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``.
        dtype: The type that floating-point tensors are converted to; None converts no tensor.
        fqn_to_file: The number of each tensor's file, from 1, instead of a division by
            ``max_shard_size``.
        key_mapping: Returns the name in the model of a tensor of the checkpoint, or None to leave
            the tensor out, as usual for ``optim.…``.
        config: Options, for both locations.

    Raises:
        InvalidURIError: If ``target`` is the location of a single file, or of the checkpoint.
        CheckpointNotFoundError: If there is no checkpoint, or ``key_mapping`` leaves out all
            tensors.
        CheckpointExistsError: If ``target`` has a model, and ``overwrite`` is off.
        CheckpointCorruptError: If bytes of the checkpoint are missing or damaged.
        UnsupportedTensorError: If the safetensors format can't represent a tensor.
        KeyCollisionError: If ``key_mapping`` gives two tensors the same name.
        ConfigError: If ``key_mapping`` gives a tensor several names, as for a stack of experts.
        CloudCheckpointError: The errors of :func:`save`.
    """
    config = config_or_default(config)
    stored, uri = CheckpointURI.parse(source), model_location(target)
    if stored == uri:
        raise InvalidURIError(f"{uri} is both the checkpoint and the target: choose another target")
    there = look_for_older(View(uri, config))
    found = _Source(stored, config, key_mapping, dtype)
    files = plan_files(found.tensors, bytes_of_size(max_shard_size), fqn_to_file)
    stats = TransferStats(str(uri), 0, sum(file.size for file in files))
    store = open_store(uri, config)
    limits = store.capabilities
    can_copy = uri.is_cloud and limits.copies_parts and not limits.equal_parts

    def build(
        part_sizes: Sequence[int], fill: Callable[[Sequence[Upload]], list[list[Part]]]
    ) -> None:
        building = FilesUnderConstruction(uri, config, files, there)
        building.begin(part_sizes)
        try:
            parts = fill(building.uploads)
        except BaseException:
            building.abandon()
            raise
        building.commit(parts)

    def send() -> None:
        sizes, (work,) = plan_work(files, 1, config, limits, by_position=not uri.is_cloud)
        build(sizes, lambda uploads: _sent(files, work, uploads, found, store, config, stats))

    if can_copy and found.is_copyable and store.copies_from(found.store):
        sizes = [least_part(file.size, limits) for file in files]
        try:
            build(sizes, lambda uploads: _copied(files, uploads, found, store, config, stats))
        except InvalidRequestError as error:  # some servers need equal parts, or can't copy ranges
            logger.warning(
                "the store can't copy this by itself, so the bytes pass through this machine: %s",
                error,
            )
            send()
    else:
        send()
    size = sum(file.size for file in files)
    return Exported([file.name for file in files], size, stats.snapshot().nbytes, found.left_out)


class _Source:
    """The tensors of a checkpoint to export, and the positions of their bytes.

    Attributes:
        tensors: The tensors as they will be stored in the model, with their new names.
        stored: The chunks of each tensor, each with its offsets in the tensor.
        left_out: The names of the entries that are not exported.
        is_copyable: Whether all bytes are in the checkpoint exactly as they will be in the files.
    """

    def __init__(
        self,
        uri: CheckpointURI,
        config: Config,
        key_mapping: KeyMapping | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._config = config
        self.uri = uri
        self.store: ObjectStore = open_store(uri, config)
        self.reader = CloudStorageReader(uri, config=config)
        metadata = self.reader.read_metadata()
        self.tensors: list[TensorPlan] = []
        self.stored: dict[str, list[tuple[tuple[int, ...], StoredTensor]]] = {}
        self.names: dict[str, str] = {}
        self.left_out: list[str] = []
        entries: dict[str, TensorStorageMetadata] = {}
        for name, entry in metadata.state_dict_metadata.items():
            wanted = name if key_mapping is None else renamed(name, key_mapping, str(uri))
            if wanted is None or not isinstance(entry, TensorStorageMetadata):
                self.left_out.append(name)
                continue
            if wanted in entries:
                raise KeyCollisionError(
                    f"two tensors get the name {wanted}: change key_mapping",
                    uri=str(uri),
                    item=name,
                )
            entries[wanted], self.names[wanted] = entry, name
        if not entries:
            raise CheckpointNotFoundError(
                "no tensor has a name to export: see `cloudckpt inspect` for the names, and "
                "change key_mapping",
                uri=str(uri),
            )
        for name in sorted(entries, key=natural):
            entry = entries[name]
            kind = entry.properties.dtype
            if dtype is not None and kind.is_floating_point:
                kind = dtype
            box = tuple((0, size) for size in entry.size)
            chunk = Chunk(0, len(self.tensors), box)
            self.tensors.append(TensorPlan(name, kind, tuple(entry.size), [chunk]))
        indices = [
            (name, MetadataIndex(self.names[name], chunk.offsets))
            for name in entries
            for chunk in entries[name].chunks
        ]
        places = self.reader.places_in(metadata)
        found = places.find(
            [index for _, index in indices], self.store, config, TransferStats(str(uri))
        )
        self.is_copyable = True
        for (name, index), place in zip(indices, found, strict=True):
            if place.tensor is None:
                self.is_copyable = False
                continue
            begin = tuple(index.offset or ())
            self.stored.setdefault(name, []).append((begin, place.tensor))
        self.is_copyable = self.is_copyable and all(map(self._is_in_order, self.tensors))

    def _is_in_order(self, tensor: TensorPlan) -> bool:
        """Sorts the chunks of a tensor; returns whether they are its bytes in row-major order."""
        chunks = sorted(self.stored[tensor.name], key=lambda chunk: chunk[0])
        self.stored[tensor.name] = chunks
        rows = 0
        for begin, stored in chunks:
            is_rows = stored.shape[1:] == tensor.shape[1:] and begin[:1] == (rows,)[: len(begin)]
            if stored.dtype != tensor.dtype or not is_rows or any(begin[1:]):
                return False
            rows += stored.shape[0] if stored.shape else 1
        return rows == (tensor.shape[0] if tensor.shape else 1)

    def elements(self, file: FilePlan) -> list[StoredBytes]:
        """Returns the stored bytes of a file's tensors, if all are copyable, in order."""
        return [
            stored.elements for tensor in file.tensors for _, stored in self.stored[tensor.name]
        ]

    def loaded(self, tensors: Sequence[TensorPlan]) -> dict[str, torch.Tensor]:
        """Loads tensors into memory, verifies and converts them."""
        state = {
            self.names[tensor.name]: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor in tensors
        }
        reader = CloudStorageReader(self.uri, config=self._config)
        planner = CloudLoadPlanner(reader.checkpoint_id, tells=False)
        load_prepared(state, lambda: ToLoad(reader, planner), reader, no_dist=True)
        return {tensor.name: state[self.names[tensor.name]] for tensor in tensors}


def _sent(
    files: Sequence[FilePlan],
    work: RankWork,
    uploads: Sequence[Upload],
    found: _Source,
    store: ObjectStore,
    config: Config,
    stats: TransferStats,
) -> list[list[Part]]:
    """Loads and sends the files one after another; returns the parts of each file."""
    names = [tensor.name for tensor in found.tensors]
    sent: list[list[Part]] = []
    for number, (file, upload) in enumerate(zip(files, uploads, strict=True)):
        own = [dataclasses.replace(one, file=0) for one in work.stretches if one.file == number]
        state = found.loaded(file.tensors)

        def resolve(item: int, state: Mapping[str, torch.Tensor] = state) -> torch.Tensor:
            return state[names[item]]

        sent += send_work(RankWork(own), [upload], resolve, store, config, stats, None)
    return sent


def _copied(
    files: Sequence[FilePlan],
    begun: Sequence[Upload],
    found: _Source,
    store: ObjectStore,
    config: Config,
    stats: TransferStats,
) -> list[list[Part]]:
    """Has the store copy the files' parts; reads and sends the others; returns all parts."""
    most = min(_COPY, store.capabilities.max_part_size // 2)
    group = TaskGroup(config.requests_at_once, name="cloudckpt-copy", interrupt=store.interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    uploads = [
        FileUpload(store, one.key, one.part_size, group, retrier, stats, upload=one)
        for one in begun
    ]
    infos: dict[str, ObjectInfo] = {}

    def info_of(key: str) -> ObjectInfo:
        if key not in infos:
            infos[key] = retrier.call(lambda: found.store.head(key))
        return infos[key]

    def produce() -> None:
        for file, upload in zip(files, uploads, strict=True):
            least = upload.upload.part_size
            stored = found.elements(file)
            parts = cut(file.header, stored, least=least, most=max(most, 2 * least))
            for number, part in enumerate(parts, 1):
                if isinstance(part, Range):
                    info = info_of(part.source.key)
                    task: Callable[[], None] = functools.partial(
                        _copy, store, found.store, info, number, part, upload, retrier
                    )
                else:
                    task = functools.partial(
                        _relay, found.store, part, number, upload, config, stats
                    )
                group.submit(task)

    group.run(produce)
    return [upload.sent for upload in uploads]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start`` to ``stop`` of a tensor's stored bytes."""

    source: StoredBytes
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def cut(
    header: bytes, stored: Iterable[StoredBytes], *, least: int, most: int
) -> Iterator[Range | list[bytes | Range]]:
    """Cuts a file into parts: ranges that the store can copy, and lists of what must be sent.

    Each part has at least ``least`` bytes, except the last. Ranges are cut at blocks that have a
    checksum, if there are any, so that the checksum that the store reports for a copy can be
    compared.

    Args:
        header: The bytes at the start of the file.
        stored: The bytes after the header, in order.
        least: Minimum bytes of a part.
        most: Maximum bytes of a range; at least twice ``least``.
    """
    sent: list[bytes | Range] = [header]
    size = len(header)
    for source in stored:
        grain = source.blocks.size if source.blocks is not None else 1
        taken = min(aligned(max(least - size, 0), grain), source.nbytes) if size else 0
        if source.nbytes - taken < least:
            taken = source.nbytes
        if taken:
            sent.append(Range(source, 0, taken))
            size += taken
        if size >= least:
            yield sent
            sent, size = [], 0
        if rest := source.nbytes - taken:
            count = -(-rest // most)
            step = max(rest // count // grain * grain, grain)
            starts = [taken + number * step for number in range(count)]
            for start, stop in zip(starts, [*starts[1:], source.nbytes], strict=True):
                yield Range(source, start, stop)
    if size:
        yield sent


def _copy(
    store: ObjectStore,
    source: ObjectStore,
    info: ObjectInfo,
    number: int,
    planned: Range,
    to: FileUpload,
    retrier: Retrier,
) -> None:
    offset = planned.source.offset
    start, stop = offset + planned.start, offset + planned.stop
    part = retrier.call(lambda: store.copy_part(source, info, to.upload, number, start, stop))
    expected = _checksum_of(planned, store)
    if part.checksum is not None and expected is not None and part.checksum != expected:
        raise CheckpointCorruptError(
            f"bytes {start} to {stop} of the object do not match their checksum: the object is "
            "damaged; restore it or export an older checkpoint",
            uri=source.uri(info.key),
            item=planned.source.item,
        )
    to.record_part(part)


def _checksum_of(planned: Range, store: ObjectStore) -> int | None:
    """Combines the checksums of the blocks in a range; None if it can't be known."""
    blocks = planned.source.blocks
    algorithm = store.capabilities.checksum
    if blocks is None or blocks.algorithm.name != algorithm.name or planned.start % blocks.size:
        return None
    if planned.stop % blocks.size and planned.stop != planned.source.nbytes:
        return None
    first, last = planned.start // blocks.size, -(-planned.stop // blocks.size)
    lengths = [blocks.size] * (last - first)
    lengths[-1] = planned.stop - (last - 1) * blocks.size
    return algorithm.combine(zip(blocks.checksums[first:last], lengths, strict=True))


def _relay(
    source: ObjectStore,
    content: Sequence[bytes | Range],
    number: int,
    to: FileUpload,
    config: Config,
    stats: TransferStats,
) -> None:
    """Reads the content of a part from the checkpoint, verifies it, and sends it."""
    sinks = [one if isinstance(one, bytes) else BytesSink(one.nbytes) for one in content]
    wanted = [
        Wanted(one.source, one.start, one.stop, sink, True)
        for one, sink in zip(content, sinks, strict=True)
        if not isinstance(one, bytes) and not isinstance(sink, bytes)
    ]
    download(source, wanted, dataclasses.replace(config, connections=1), TransferStats())
    part = PartPlan(number)
    for sink in sinks:
        view = memoryview(sink if isinstance(sink, bytes) else sink.data).toreadonly()
        part.pieces.append(Piece(view))
        part.size += view.nbytes
    to.send_now(part)
