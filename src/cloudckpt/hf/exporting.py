"""Exports a committed checkpoint as a model in safetensors files, by store-side copies if possible.

The store copies a part of a file if that part is a range of one data object of the checkpoint. This
process sends the pieces that are smaller than the smallest part that the store accepts: headers and
small tensors, with the start of the next tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.objects import natural_order
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.reader import CloudStorageReader, KeyMapping
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    InvalidRequestError,
    InvalidURIError,
)
from cloudckpt.hf.commit import ModelCommit, find_older_model, model_location
from cloudckpt.hf.loading import renamed
from cloudckpt.hf.safetensors import (
    Chunk,
    FilePlan,
    TensorPlan,
    bytes_of_size,
    plan_files,
)
from cloudckpt.hf.sending import FileUpload, least_part, plan_work, send_work
from cloudckpt.stores.base import CopySource, ObjectInfo, ObjectStore, Part, Upload
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
        files: The names of the safetensors files, without the index.
        nbytes: The total size of these files in bytes.
        moved: How many bytes this process sent; the store copied all others itself.
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
    Otherwise, or if any tensor is converted or was divided along another dimension than the first,
    this process writes the files one after another, in about ``max_shard_size`` bytes of memory.
    Call it on one rank: it uses no collectives.

    Args:
        source: The location of a committed checkpoint, of cloudckpt or of torch.
        target: The folder of the model.
        max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``.
        dtype: The type that floating-point tensors are converted to; None converts no tensor.
        fqn_to_file: The number of each tensor's file, from 1, by the tensor's name in the model;
            None divides by ``max_shard_size``. It has to have all tensors.
        key_mapping: Called with the name of each tensor of the checkpoint; returns its name in the
            model, or None to leave the tensor out, as usual for ``optim.…``.
        config: Options for both locations; None reads them from the environment.

    Returns:
        The names and total size of the files, how many bytes this process sent, and the names of
        the entries that were left out.

    Raises:
        InvalidURIError: If a location is not valid, or if ``target`` is the location of a single
            file, or of the checkpoint.
        CheckpointNotFoundError: If there is no checkpoint, or it has no tensors, or ``key_mapping``
            leaves all of them out.
        CheckpointExistsError: If ``target`` has a model, and ``overwrite`` is off.
        CheckpointCorruptError: If bytes of the checkpoint are missing or damaged.
        CheckpointReplacedError: If the checkpoint was replaced during the export.
        UntrustedPickleError: If another library's metadata, or a tensor that is not stored as plain
            elements, needs code that is not on the allow-list.
        UnsupportedTensorError: If the safetensors format can't represent a tensor.
        KeyCollisionError: If ``key_mapping`` gives two tensors the same name.
        ConfigError: If ``key_mapping`` returns anything but one name or None for a tensor, such as
            several names for a stack of experts.
        CloudCheckpointError: The errors of :func:`save`.
    """
    config = config_or_default(config)
    checkpoint, uri = CheckpointURI.parse(source), model_location(target)
    if checkpoint == uri:
        raise InvalidURIError(f"{uri} is both the source and the target: choose another target")
    older = find_older_model(View(uri, config))
    origin = _Source(checkpoint, config, key_mapping, dtype)
    files = plan_files(origin.tensors, bytes_of_size(max_shard_size), fqn_to_file)
    size = sum(file.size for file in files)
    stats = TransferStats(str(uri), 0, size)
    store = open_store(uri, config)
    limits = store.capabilities

    def build(sizes: Sequence[int], fill: Callable[[Sequence[Upload]], list[list[Part]]]) -> None:
        commit = ModelCommit(uri, config, files, older)
        try:
            parts = fill(commit.begin(sizes))
        except BaseException:
            commit.abandon()
            raise
        commit.complete(parts)

    def send() -> None:
        sizes, (work,) = plan_work(files, 1, config, limits, by_position=not uri.is_cloud)
        load = _load_by_file(files, origin)
        build(sizes, lambda uploads: send_work(work, uploads, load, store, config, stats, None))

    can_copy = uri.is_cloud and limits.copies_parts and not limits.equal_parts
    if can_copy and None not in origin.stored.values() and store.copies_from(origin.store):
        sizes = [least_part(file.size, limits) for file in files]
        try:
            build(sizes, lambda uploads: _copied(files, uploads, origin, store, config, stats))
        except InvalidRequestError as error:  # some servers need equal parts, or can't copy ranges
            logger.warning(
                "the store refused to copy bytes itself, so they pass through this machine: %s",
                error,
            )
            send()
    else:
        send()
    moved = stats.snapshot().nbytes
    return Exported([file.name for file in files], size, moved, origin.left_out)


class _Source:
    """The tensors of a checkpoint to export, and the positions of their bytes.

    Attributes:
        tensors: The tensors as they will be stored in the model, with their new names.
        names: For each new name, the tensor's name in the checkpoint.
        stored: For each new name, the tensor's stored bytes in order; None if the bytes have
            another type or order in the model's files.
        left_out: The names of the entries that are not exported.
        commit: The commit object of the checkpoint; None if it was not read.
    """

    def __init__(
        self,
        uri: CheckpointURI,
        config: Config,
        key_mapping: KeyMapping | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.uri, self.config = uri, config
        self.store: ObjectStore = open_store(uri, config)
        reader = CloudStorageReader(uri, config=config)
        metadata = reader.read_metadata()
        self.commit = None if reader.commit is None else reader.commit.info
        entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.names = renamed(entries, key_mapping, uri)
        exported = set(self.names.values())
        self.left_out = [name for name in metadata.state_dict_metadata if name not in exported]
        if not self.names:
            raise CheckpointNotFoundError(
                "there is no tensor to export: the checkpoint has none, or key_mapping (--prefix) "
                "leaves all out; see the names with cloudckpt inspect",
                uri=str(uri),
            )
        self.tensors: list[TensorPlan] = []
        for number, name in enumerate(sorted(self.names, key=natural_order)):
            entry = entries[self.names[name]]
            stored_dtype, box = entry.properties.dtype, tuple((0, size) for size in entry.size)
            if dtype is not None and stored_dtype.is_floating_point:
                stored_dtype = dtype
            chunk = Chunk(0, number, box, stored_dtype)
            self.tensors.append(TensorPlan(name, stored_dtype, tuple(entry.size), [chunk]))
        indices = [
            [MetadataIndex(old, chunk.offsets) for chunk in entries[old].chunks]
            for old in (self.names[tensor.name] for tensor in self.tensors)
        ]
        every, stats = [*itertools.chain(*indices)], TransferStats(str(uri))
        places = iter(reader.places_in(metadata).find(every, self.store, config, stats))
        self.stored: dict[str, list[StoredBytes] | None] = {}
        for tensor, own in zip(self.tensors, indices, strict=True):
            chunks = [(tuple(index.offset or ()), next(places).tensor) for index in own]
            self.stored[tensor.name] = _in_order(tensor, chunks)


def _in_order(
    tensor: TensorPlan, chunks: Iterable[tuple[tuple[int, ...], StoredTensor | None]]
) -> list[StoredBytes] | None:
    """Returns the stored bytes of a tensor's chunks, in the order in which a file has them.

    Returns None if the tensor was divided along another dimension than its first, if it is not
    stored in the type of the model, or if a chunk is missing or not stored as plain elements.

    Args:
        tensor: The tensor as it will be in the model.
        chunks: For each chunk, its offsets and its stored tensor, which is None if the chunk is not
            stored as plain elements.
    """
    rows, elements = 0, list[StoredBytes]()
    for begin, stored in sorted(chunks, key=lambda chunk: chunk[0]):
        if stored is None or stored.dtype != tensor.dtype or any(begin[1:]):
            return None
        if stored.shape[1:] != tensor.shape[1:] or begin[:1] != (rows,)[: len(begin)]:
            return None
        elements.append(stored.elements)
        rows += stored.shape[0] if stored.shape else 1
    return elements if rows == (tensor.shape[0] if tensor.shape else 1) else None


def _load_by_file(files: Sequence[FilePlan], source: _Source) -> Callable[[int], torch.Tensor]:
    """Returns a function that loads and converts a tensor, given its index in ``source.tensors``.

    The function loads and verifies all tensors of a file together, after dropping the tensors of
    the previous file. It raises CheckpointReplacedError if the checkpoint was replaced since
    ``source`` has read its metadata.
    """
    together = {tensor.name: file.tensors for file in files for tensor in file.tensors}
    loaded: dict[str, torch.Tensor] = {}

    def load(item: int) -> torch.Tensor:
        name = source.tensors[item].name
        if source.names[name] not in loaded:
            loaded.clear()
            for one in together[name]:
                empty = torch.empty(one.shape, dtype=one.dtype, device="cpu")
                loaded[source.names[one.name]] = empty
            reader = CloudStorageReader(source.uri, config=source.config)
            planner = CloudLoadPlanner(reader.checkpoint_id, logs=False)
            load_prepared(loaded, lambda: ToLoad(reader, planner), reader, no_dist=True)
            if reader.commit is None or reader.commit.info != source.commit:
                raise CheckpointReplacedError(
                    "the checkpoint was replaced while it was exported; export it again",
                    uri=str(source.uri),
                )
        return loaded[source.names[name]]

    return load


def _copied(
    files: Sequence[FilePlan],
    uploads: Sequence[Upload],
    origin: _Source,
    store: ObjectStore,
    config: Config,
    stats: TransferStats,
) -> list[list[Part]]:
    """Has the store copy parts, and sends the others; returns all parts of each file.

    Raises:
        CheckpointCorruptError: If copied or sent bytes do not match their checksum.
        InvalidRequestError: If the store refuses to copy ranges.
        StoreError: If the store refuses another request or stays unreachable.
    """
    group = TaskGroup(config.requests_at_once, name="cloudckpt-copy", interrupt=store.interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    sent = [
        FileUpload(store, one.key, one.part_size, group, config, stats, upload=one)
        for one in uploads
    ]

    @functools.cache
    def info_of(key: str) -> ObjectInfo:
        return retrier.call(lambda: origin.store.head(key))

    def copy(info: ObjectInfo, planned: Range, number: int, to: FileUpload) -> None:
        start, stop = (planned.source.offset + at for at in (planned.start, planned.stop))
        part = to.copy(CopySource(origin.store, info), number, start, stop)
        expected = _checksum_of(planned, store)
        if None not in (part.checksum, expected) and part.checksum != expected:
            raise CheckpointCorruptError(
                f"bytes {start} to {stop} of the object do not match their checksum: the object "
                "is damaged; replace it by a backup, or export an older checkpoint",
                uri=origin.store.uri(info.key),
                item=planned.source.item,
            )

    def relay(content: Sequence[bytes | Range], number: int, to: FileUpload) -> None:
        """Reads the content of a part from the checkpoint, verifies it, and sends it."""
        part, wanted = PartPlan(number), list[Wanted]()
        for one in content:
            data: bytes | bytearray | memoryview = b""
            if isinstance(one, bytes):
                data = one
            else:
                sink = BytesSink(one.nbytes)
                wanted.append(Wanted(one.source, one.start, one.stop, sink, True))
                data = sink.data
            part.pieces.append(Piece(memoryview(data).toreadonly()))
            part.size += len(data)
        alone = dataclasses.replace(config, connections=1)
        download(origin.store, wanted, alone, TransferStats())
        to.put(part)

    def produce() -> None:
        for file, to, upload in zip(files, sent, uploads, strict=True):
            stored = [one for each in file.tensors for one in origin.stored[each.name] or ()]
            least = upload.part_size
            most = max(min(_COPY, store.capabilities.max_part_size // 2), 2 * least)
            for number, part in enumerate(cut(file.header, stored, least=least, most=most), 1):
                if isinstance(part, Range):
                    task = functools.partial(copy, info_of(part.source.key), part)
                else:
                    task = functools.partial(relay, part)
                group.submit(functools.partial(task, number, to))

    group.run(produce)
    return [file.sent for file in sent]


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a tensor's stored bytes, from ``start`` to before ``stop``."""

    source: StoredBytes
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes in the range."""
        return self.stop - self.start


def cut(
    header: bytes, stored: Iterable[StoredBytes], *, least: int, most: int
) -> Iterator[Range | list[bytes | Range]]:
    """Yields the parts of a file in order.

    A part that the store copies is yielded as a range, a part to be sent as a list of its contents.
    Each part has at least ``least`` bytes, except the last. Ranges are cut at blocks that have a
    checksum, if there are any, so that the checksum that the store reports for a copy can be
    compared.

    Args:
        header: The bytes at the start of the file.
        stored: The bytes after the header, in order.
        least: Minimum bytes of a part.
        most: Maximum bytes of a range, apart from a few blocks; at least twice ``least``.
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


def _checksum_of(planned: Range, store: ObjectStore) -> int | None:
    """Returns a range's checksum by the store's algorithm.

    Returns None if the range's blocks have no checksums, or checksums of another algorithm.
    """
    blocks, algorithm = planned.source.blocks, store.capabilities.checksum
    if blocks is None or blocks.algorithm.name != algorithm.name:
        return None
    starts = range(planned.start, planned.stop, blocks.size)  # ranges consist of whole blocks
    return algorithm.combine(
        (blocks.checksums[start // blocks.size], min(blocks.size, planned.stop - start))
        for start in starts
    )
