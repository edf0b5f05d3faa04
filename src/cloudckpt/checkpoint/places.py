"""Where the items of a loaded checkpoint lie, as its metadata and manifest say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from cloudckpt.checkpoint.foreign import ForeignItem, locate
from cloudckpt.checkpoint.manifest import Manifest
from cloudckpt.checkpoint.names import checked
from cloudckpt.checkpoint.records import ItemRecord
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checksum import Blocks
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.landing import Source
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["ItemPlace", "Places", "StoredTensor"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A plain tensor in the checkpoint: its elements in row-major order, their type, its shape."""

    elements: Source
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """An item.

    Attributes:
        whole: All of its bytes.
        tensor: The plain tensor in it, or None: then only ``torch.load`` can read it.
        transforms: The stream transforms (compression) that torch's writer applied to it.
    """

    whole: Source
    tensor: StoredTensor | None
    transforms: Sequence[str] = ()


class Places:
    """Finds the items of one checkpoint.

    Args:
        uri: The checkpoint.
        entries: ``storage_data`` of torch's metadata.
        manifest: The manifest, or None for a checkpoint of another writer.
    """

    def __init__(
        self,
        uri: CheckpointURI,
        entries: Mapping[MetadataIndex, StorageInfo],
        manifest: Manifest | None,
    ) -> None:
        self._uri = uri
        self._entries = entries
        self._manifest = manifest

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: ObjectStore,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        """The places of items, in the same order.

        Without a manifest, this reads the edges of the items that hold tensors.

        Raises:
            CheckpointCorruptError: If an item has no place, or a contradictory one.
        """
        with paused_gc():
            if self._manifest is not None:
                return [self._in_manifest(index, self._manifest) for index in indices]
            wholes = [self._whole(index) for index in indices]
            probed = [
                ForeignItem(place.whole.key, place.whole.offset, place.whole.nbytes, index.fqn)
                for index, place in zip(indices, wholes, strict=True)
                if index.offset is not None and not place.transforms
            ]
        found = locate(store, probed, config, stats)
        places: list[ItemPlace] = []
        for index, place in zip(indices, wholes, strict=True):
            whole = place.whole
            raw = found.get(ForeignItem(whole.key, whole.offset, whole.nbytes, index.fqn))
            if raw is not None:
                nbytes = torch.Size(raw.shape).numel() * raw.dtype.itemsize
                elements = Source(whole.key, raw.offset, nbytes, None, None, index.fqn)
                place = ItemPlace(whole, StoredTensor(elements, raw.dtype, raw.shape))
            places.append(place)
        return places

    def _entry(self, index: MetadataIndex) -> StorageInfo:
        entry = self._entries.get(index)
        if not isinstance(entry, StorageInfo):
            raise self._corrupt(
                f"the metadata does not say where {index.fqn} (offsets {index.offset}) is", index
            )
        return entry

    def _whole(self, index: MetadataIndex) -> ItemPlace:
        entry = self._entry(index)
        key = self._uri.key(checked(entry.relative_path, str(self._uri)))
        whole = Source(key, entry.offset, entry.length, None, None, index.fqn)
        # older versions of torch do not write this field
        return ItemPlace(whole, None, getattr(entry, "transform_descriptors", None) or ())

    def _in_manifest(self, index: MetadataIndex, manifest: Manifest) -> ItemPlace:
        entry = self._entry(index)
        offsets = None if index.offset is None else tuple(index.offset)
        record = manifest.items.get((index.fqn, offsets))
        if record is None or (record.object.name, record.offset, record.length) != (
            entry.relative_path,
            entry.offset,
            entry.length,
        ):
            raise self._corrupt("manifest and metadata contradict each other", index)
        checksum = manifest.checksum
        raw = Source(
            self._uri.key(record.object.name),
            record.raw_offset,
            record.raw_length,
            Blocks(checksum, record.block_size, checksum.unpack(record.checksums)),
            record.object.size,
            index.fqn,
        )
        if record.dtype is None:
            return ItemPlace(raw, None)
        return ItemPlace(raw, StoredTensor(raw, self._dtype(record, index), record.shape))

    def _dtype(self, record: ItemRecord, index: MetadataIndex) -> torch.dtype:
        dtype = getattr(torch, record.dtype or "", None)
        size = math.prod(record.shape)
        if not isinstance(dtype, torch.dtype) or size * dtype.itemsize != record.raw_length:
            raise self._corrupt(
                f"the manifest describes {index.fqn} wrongly, or this torch does not know the "
                f"type {record.dtype}",
                index,
            )
        return dtype

    def _corrupt(self, message: str, index: MetadataIndex) -> CheckpointCorruptError:
        return CheckpointCorruptError(message, uri=str(self._uri), item=index.fqn)
