"""Exports a committed checkpoint as a model in safetensors files, by store-side copies if possible.

The store copies a part of a file if it is a range of one data object of the checkpoint. Ranges that
are smaller than the least part (headers, small tensors, the start of a tensor after them) are read
and sent by this process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.model_folder import KeyMapping, renamed
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.dcp.planners import CloudLoadPlanner
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
    Extent,
    FilePlan,
    Mixed,
    Range,
    TensorPlan,
    cut,
    least_part,
    natural,
    plan_files,
)
from cloudckpt.hf.sending import FileUpload, RankWork, plan_work, send_work
from cloudckpt.hf.writer import bytes_of_size, model_location
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Part, Upload
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
    fqn_to_file: Mapping[str, str | int] | None = None,
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
        fqn_to_file: The file of each tensor, as a file name or a number from 1, instead of a
            division by ``max_shard_size``.
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
    target_store = open_store(uri, config)
    copies = found.store if uri.is_cloud and target_store.copies_from(found.store) else None
    limits = target_store.capabilities
    can_copy = limits.copies_parts and not limits.equal_parts
    if copies is not None and can_copy and found.is_copyable:
        try:
            _export_by_copies(uri, config, files, there, found, stats)
            return _outcome(files, stats, found)
        except InvalidRequestError as error:  # some servers need equal parts, or can't copy ranges
            logger.warning(
                "the store can't copy this by itself, so the bytes pass through this machine: %s",
                error,
            )
    building = FilesUnderConstruction(uri, config, files, there)
    sizes, (work,) = plan_work(files, 1, config, limits, by_position=not uri.is_cloud)
    building.begin(sizes)
    try:
        parts = _sent_by_files(files, work, building.uploads, found, target_store, config, stats)
    except BaseException:
        building.abandon()
        raise
    building.commit(parts)
    return _outcome(files, stats, found)


def _outcome(files: Sequence[FilePlan], stats: TransferStats, found: _Source) -> Exported:
    """Makes the result of an export."""
    size = sum(file.size for file in files)
    names = [file.name for file in files]
    return Exported(names, size, stats.snapshot().nbytes, found.left_out)


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

    def extents(self, tensor: TensorPlan) -> Iterator[Extent[StoredBytes]]:
        """Yields the stored bytes of a copyable tensor, in order.

        They are cut at blocks that have a checksum, if there are any, so that the checksum that the
        store reports for a copy can be compared.
        """
        for _, stored in self.stored[tensor.name]:
            blocks = stored.elements.blocks
            grain = blocks.size if blocks is not None else 1
            yield Extent(stored.elements, stored.elements.nbytes, grain)

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


def _sent_by_files(
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
        own = [dataclasses.replace(part, file=0) for part in work.own if part.file == number]
        state = found.loaded(file.tensors)

        def resolve(item: int, state: Mapping[str, torch.Tensor] = state) -> torch.Tensor:
            return state[names[item]]

        (parts,) = send_work(RankWork([], own), [upload], resolve, store, config, stats, None)
        sent.append(sorted(parts, key=lambda part: part.number))
    return sent


def _export_by_copies(
    uri: CheckpointURI,
    config: Config,
    files: Sequence[FilePlan],
    there: Mapping[str, ObjectInfo],
    found: _Source,
    stats: TransferStats,
) -> None:
    store = open_store(uri, config)
    limits = store.capabilities
    most = min(_COPY, limits.max_part_size // 2)
    group = TaskGroup(config.requests_at_once, name="cloudckpt-copy", interrupt=store.interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    building = FilesUnderConstruction(uri, config, files, there)
    building.begin([least_part(file.size, limits) for file in files])
    uploads = [
        FileUpload(store, begun.key, begun.part_size, group, retrier, stats)
        for begun in building.uploads
    ]
    infos: dict[str, ObjectInfo] = {}

    def info_of(key: str) -> ObjectInfo:
        if key not in infos:
            infos[key] = retrier.call(lambda: found.store.head(key))
        return infos[key]

    def produce() -> None:
        for file, upload, begun in zip(files, uploads, building.uploads, strict=True):
            upload.attach(begun)
            extents = [one for tensor in file.tensors for one in found.extents(tensor)]
            least = begun.part_size
            parts = cut(file.header, extents, least=least, most=max(most, 2 * least))
            for number, part in enumerate(parts, 1):
                if isinstance(part, Range):
                    info = info_of(part.extent.source.key)
                    task: Callable[[], None] = functools.partial(
                        _copy, store, found.store, info, begun, number, part, upload, retrier
                    )
                else:
                    task = functools.partial(
                        _relay, found.store, part, number, upload, config, stats
                    )
                group.submit(task)

    try:
        group.run(produce)
    except BaseException:
        building.abandon()
        raise
    building.commit([sorted(one.sent, key=lambda part: part.number) for one in uploads])


def _copy(
    store: ObjectStore,
    source: ObjectStore,
    info: ObjectInfo,
    upload: Upload,
    number: int,
    planned: Range[StoredBytes],
    to: FileUpload,
    retrier: Retrier,
) -> None:
    start, stop = (
        planned.extent.source.offset + planned.start,
        planned.extent.source.offset + planned.stop,
    )
    part = retrier.call(lambda: store.copy_part(source, info, upload, number, start, stop))
    expected = _checksum_of(planned, store)
    if part.checksum is not None and expected is not None and part.checksum != expected:
        raise CheckpointCorruptError(
            f"bytes {start} to {stop} of the object do not match their checksum: the object is "
            "damaged; restore it or export an older checkpoint",
            uri=source.uri(info.key),
            item=planned.extent.source.item,
        )
    to.record_part(part)


def _checksum_of(planned: Range[StoredBytes], store: ObjectStore) -> int | None:
    """Combines the checksums of the blocks in a range; None if it can't be known."""
    blocks = planned.extent.source.blocks
    algorithm = store.capabilities.checksum
    if blocks is None or blocks.algorithm.name != algorithm.name or planned.start % blocks.size:
        return None
    if planned.stop % blocks.size and planned.stop != planned.extent.source.nbytes:
        return None
    first, last = planned.start // blocks.size, -(-planned.stop // blocks.size)
    lengths = [blocks.size] * (last - first)
    lengths[-1] = planned.stop - (last - 1) * blocks.size
    return algorithm.combine(zip(blocks.checksums[first:last], lengths, strict=True))


def _relay(
    source: ObjectStore,
    content: Mixed[StoredBytes],
    number: int,
    to: FileUpload,
    config: Config,
    stats: TransferStats,
) -> None:
    """Reads the content of a part from the checkpoint, verifies it, and sends it."""
    sinks = [one if isinstance(one, bytes) else BytesSink(one.nbytes) for one in content]
    wanted = [
        Wanted(one.extent.source, one.start, one.stop, sink, True)
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
