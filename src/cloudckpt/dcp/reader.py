"""``CloudStorageReader``: torch's StorageReader on an object store."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt.checkpoint.foreign import ForeignItem, locate
from cloudckpt.checkpoint.manifest import Manifest, ManifestId
from cloudckpt.checkpoint.metadata import load_metadata
from cloudckpt.checkpoint.names import checked, metadata_name
from cloudckpt.checkpoint.pickles import check_trusted, load_tensor
from cloudckpt.checkpoint.records import unpack_crcs
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.config import Config
from cloudckpt.dcp.torch_private import ExtensionRegistry, StreamTransformExtension
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ObjectNotFoundError,
    ShapeMismatchError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.registry import open_store
from cloudckpt.transfer.download import Source, Wanted, download
from cloudckpt.transfer.memory import is_plain
from cloudckpt.transfer.ranges import plan_boxes
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.sinks import BoxSink, BytesSink, FlatSink, narrow
from cloudckpt.transfer.staging import row_major_slices
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageReader"]


@dataclass(frozen=True)
class _Stored:
    """The raw data of a plain tensor in the checkpoint."""

    source: Source
    dtype: torch.dtype
    shape: tuple[int, ...]


class CloudStorageReader(StorageReader):
    """Reads a checkpoint from ``s3://``, ``file://`` or a local path.

    Works wherever torch takes a ``storage_reader``, on checkpoints of cloudckpt and of torch's own
    writers. Only the bytes that this rank needs are fetched, straight into its tensors where these
    are contiguous in host memory; every block is checked against its CRC32C.

    Attributes:
        transferred: What this rank received in the last load.
        failure: Why the metadata could not be read, which torch only passes on as a text.
    """

    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        config: Config | None = None,
        trust_pickle: bool = False,
    ) -> None:
        """
        Args:
            checkpoint_id: Where to load from; :meth:`reset` may name another place later.
            config: Options; read from the environment where they are not given.
            trust_pickle: Whether pickles in the checkpoint may run any code.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is no location.
        """
        super().__init__()
        self.uri = CheckpointURI.parse(checkpoint_id)
        self.config = config if config is not None else Config()
        self.trust_pickle = trust_pickle
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "config": self.config, "trust_pickle": self.trust_pickle}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["uri"], config=state["config"], trust_pickle=state["trust_pickle"]
        )

    @property
    def checkpoint_id(self) -> str:
        """The location, as a string."""
        return str(self.uri)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the location can be parsed."""
        try:
            CheckpointURI.parse(checkpoint_id)
        except CloudCheckpointError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forgets what was read, and goes to another location if one is given."""
        if checkpoint_id:
            self.uri = CheckpointURI.parse(checkpoint_id)
        self.transferred: Transferred | None = None
        self.failure: CloudCheckpointError | None = None
        self._load_id = str(uuid.uuid4())
        self._places: Mapping[MetadataIndex, StorageInfo] = {}
        self._manifest: Manifest | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the commit object and the manifest it names.

        Raises:
            CheckpointNotFoundError: If there is no committed checkpoint.
            UntrustedPickleError: If the metadata names code that is not on the allow-list.
            CheckpointCorruptError: If metadata or manifest are damaged.
        """
        # torch asks for the metadata of one rank through a parameter named exactly `kwargs`
        rank = kwargs.get("rank")
        try:
            metadata = self._read_metadata(rank)
        except CloudCheckpointError as error:
            if self.failure is None:
                self.failure = error
            raise
        self.failure = None
        return metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        store, key = self._store(), self.uri.key(metadata_name(rank))
        try:
            data, _ = self._retrier().call(lambda: store.get(key))
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                "there is no committed checkpoint here: it has no .metadata. Check the location; a "
                "save that was interrupted leaves none",
                uri=str(self.uri),
            ) from error
        uri = store.uri(key)
        metadata = load_metadata(data, uri, trust_pickle=self.trust_pickle)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        identity = ManifestId.parse(metadata.storage_meta.save_id, uri)
        self._manifest = self._read_manifest(identity) if identity is not None else None
        return metadata

    def _read_manifest(self, identity: ManifestId) -> Manifest | None:
        store, key = self._store(), self.uri.key(identity.name)
        try:
            data, _ = self._retrier().call(lambda: store.get(key))
        except ObjectNotFoundError as error:
            if not self.config.verify:
                return None
            raise CheckpointCorruptError(
                "the manifest with the checksums is gone; Config(verify=False) loads without it",
                uri=store.uri(key),
            ) from error
        return Manifest.from_json(data, identity, store.uri(key))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(metadata.storage_data, dict):
            raise CheckpointCorruptError(
                "the metadata does not say where the items are", uri=str(self.uri)
            )
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetches this rank's items; returns when all of them have arrived and are verified.

        If it raises, tensors of the state dict may hold a part of the new values.
        """
        stats = TransferStats()
        try:
            _Load(self, self._store(), plan, planner, stats).run()
        finally:
            self.transferred = stats.snapshot()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def place(self, index: MetadataIndex) -> StorageInfo:
        """Where an item lies."""
        info = self._places.get(index)
        if not isinstance(info, StorageInfo):
            raise CheckpointCorruptError(
                f"the metadata does not say where {index.fqn} (offsets {index.offset}) is",
                uri=str(self.uri),
                item=index.fqn,
            )
        return info

    def item_source(self, index: MetadataIndex) -> tuple[Source, _Stored | None]:
        """The whole item, and the plain tensor in it if the manifest says that there is one."""
        info = self.place(index)
        key = self.uri.key(checked(info.relative_path, str(self.uri)))
        if self._manifest is None:
            return Source(key, info.offset, info.length, 0, (), None, index.fqn), None
        offsets = None if index.offset is None else tuple(index.offset)
        record = self._manifest.items.get((index.fqn, offsets))
        if record is None or (record.object.name, record.offset, record.length) != (
            info.relative_path,
            info.offset,
            info.length,
        ):
            raise CheckpointCorruptError(
                "manifest and metadata contradict each other", uri=str(self.uri), item=index.fqn
            )
        raw = Source(
            key,
            record.raw_offset,
            record.raw_length,
            record.block_size,
            unpack_crcs(record.crcs),
            record.object.size,
            index.fqn,
        )
        if record.dtype is None:
            return raw, None
        dtype = getattr(torch, record.dtype, None)
        size = torch.Size(record.shape).numel()
        if not isinstance(dtype, torch.dtype) or size * dtype.itemsize != record.raw_length:
            raise CheckpointCorruptError(
                f"the manifest describes {index.fqn} wrongly, or this torch does not know "
                f"{record.dtype}",
                uri=str(self.uri),
                item=index.fqn,
            )
        return raw, _Stored(raw, dtype, record.shape)

    @property
    def has_manifest(self) -> bool:
        """Whether the checkpoint has one, and with it checksums."""
        return self._manifest is not None

    def _store(self) -> ObjectStore:
        return open_store(self.uri, self.config)

    def _retrier(self) -> Retrier:
        return Retrier(self.config.retry)


class _Load:
    """One ``read_data``: what is wanted, the download, and what the planner is told."""

    def __init__(
        self,
        reader: CloudStorageReader,
        store: ObjectStore,
        plan: LoadPlan,
        planner: LoadPlanner,
        stats: TransferStats,
    ) -> None:
        self._reader = reader
        self._store = store
        self._plan = plan
        self._planner = planner
        self._stats = stats
        self._uri = str(reader.uri)
        self._wanted: list[Wanted] = []
        self._afterwards: list[Callable[[], None]] = []

    def run(self) -> None:
        located = self._located()
        with paused_gc():
            for item, whole, stored in located:
                if item.type == LoadItemType.BYTE_IO:
                    self._want_bytes(item, whole)
                elif stored is not None:
                    self._want_tensor(item, stored)
                else:
                    self._want_pickled_tensor(item, whole)
        download(self._store, self._wanted, self._reader.config, self._stats)
        for finish in self._afterwards:
            finish()

    def _located(self) -> list[tuple[ReadItem, Source, _Stored | None]]:
        """Each item with its bytes and, if it is a plain tensor, where its elements are."""
        with paused_gc():
            found = [
                (item, *self._reader.item_source(item.storage_index)) for item in self._plan.items
            ]
        if self._reader.has_manifest:
            return found
        foreign = {
            id(item): ForeignItem(whole.key, whole.offset, whole.nbytes, whole.item)
            for item, whole, _ in found
            if item.type != LoadItemType.BYTE_IO and not self._transforms(item)
        }
        raw = locate(self._store, list(foreign.values()), self._reader.config, self._stats)
        located: list[tuple[ReadItem, Source, _Stored | None]] = []
        for item, whole, _ in found:
            place = raw.get(foreign[id(item)]) if id(item) in foreign else None
            stored = None
            if place is not None:
                nbytes = torch.Size(place.shape).numel() * place.dtype.itemsize
                source = Source(whole.key, place.offset, nbytes, 0, (), None, whole.item)
                stored = _Stored(source, place.dtype, place.shape)
            located.append((item, whole, stored))
        return located

    def _want_tensor(self, item: ReadItem, stored: _Stored) -> None:
        target = self._planner.resolve_tensor(item).detach()
        self._afterwards.append(lambda: self._planner.commit_tensor(item, target))
        self._check_shape(item, target, stored.shape)
        source, config = stored.source, self._reader.config
        for read in plan_boxes(
            stored.shape,
            item.storage_offsets,
            item.lengths,
            stored.dtype.itemsize,
            limit=config.request_size,
            merge_gap=config.merge_gap,
        ):
            if not read.contiguous:
                sink = BoxSink(target, read.box, stored.dtype, stored.shape)
                self._wanted.append(Wanted(source, read.start, read.stop, sink, False))
                continue
            part = narrow(target, read.box)
            if part.is_contiguous() and (is_plain(part) or not (part.is_conj() or part.is_neg())):
                flat = FlatSink(part, stored.dtype)
                self._wanted.append(Wanted(source, read.start, read.stop, flat, True))
                continue
            start, itemsize = read.start, stored.dtype.itemsize
            for box in row_major_slices(tuple(part.shape), itemsize, config.request_size):
                rows = BoxSink(part, box, stored.dtype, None)
                stop = start + torch.Size([length for _, length in box]).numel() * itemsize
                self._wanted.append(Wanted(source, start, stop, rows, False))
                start = stop

    def _want_bytes(self, item: ReadItem, whole: Source) -> None:
        sink = self._whole(whole)

        def finish() -> None:
            data = self._plain(item, sink.data)
            default = type(self._planner).load_bytes is DefaultLoadPlanner.load_bytes
            if default and not self._reader.trust_pickle:
                # that planner unpickles without restrictions: see first that it may
                check_trusted(data, whole.item, self._uri)
            self._planner.load_bytes(item, io.BytesIO(data))

        self._afterwards.append(finish)

    def _want_pickled_tensor(self, item: ReadItem, whole: Source) -> None:
        sink = self._whole(whole)

        def finish() -> None:
            data = io.BytesIO(self._plain(item, sink.data))
            tensor = load_tensor(data, whole.item, self._uri, trust=self._reader.trust_pickle)
            target = self._planner.resolve_tensor(item).detach()
            self._check_shape(item, target, tuple(tensor.shape))
            box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
            target.copy_(narrow(tensor, box))
            self._planner.commit_tensor(item, target)

        self._afterwards.append(finish)

    def _whole(self, source: Source) -> BytesSink:
        sink = BytesSink(source.nbytes)
        self._wanted.append(Wanted(source, 0, source.nbytes, sink, True))
        return sink

    def _transforms(self, item: ReadItem) -> Sequence[str]:
        # older versions of torch do not write this field
        place = self._reader.place(item.storage_index)
        return getattr(place, "transform_descriptors", None) or ()

    def _plain(self, item: ReadItem, data: bytearray) -> bytes | bytearray:
        """The item's bytes without the stream transforms (compression) that torch applied."""
        descriptors = self._transforms(item)
        if not descriptors:
            return data
        stream: Any = io.BytesIO(data)
        for extension in ExtensionRegistry().from_descriptor_list(descriptors):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        return cast(bytes, stream.read(-1))

    def _check_shape(self, item: ReadItem, target: torch.Tensor, stored: tuple[int, ...]) -> None:
        fqn = item.storage_index.fqn
        if tuple(target.shape) != tuple(item.lengths):
            raise ShapeMismatchError(
                f"{fqn}: {tuple(item.lengths)} is to be loaded into a target of shape "
                f"{tuple(target.shape)}",
                uri=self._uri,
                item=fqn,
            )
        fits = len(stored) == len(item.lengths) and all(
            offset + length <= size
            for offset, length, size in zip(item.storage_offsets, item.lengths, stored, strict=True)
        )
        if not fits:
            raise CheckpointCorruptError(
                f"{fqn} is stored with shape {stored}, which does not hold {tuple(item.lengths)} "
                f"at {tuple(item.storage_offsets)}",
                uri=self._uri,
                item=fqn,
            )
