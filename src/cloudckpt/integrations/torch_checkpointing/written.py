"""A file in its own object, which exists once its record is written.

Tensors in host memory that a library serializes are sent from there, without a copy:
:func:`is_tensor_memory` distinguishes that memory from temporary buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch

from cloudckpt.checkpoint.file_folder import StoredFile, record_bytes
from cloudckpt.checksum import BlockChecksums
from cloudckpt.config import Config
from cloudckpt.stores.base import ObjectStore
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.upload import put_whole

__all__ = ["RecordedFile", "is_tensor_memory"]

_BLOCK = 1024 * 1024  # bytes that share a checksum, in files of up to 1 GiB


class RecordedFile(WrittenFile):
    """A file whose record is written once all of the file is in the store."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        record: str,
        config: Config,
        expected: int,
        is_immutable: Callable[[memoryview], bool],
    ) -> None:
        self._checksums = BlockChecksums(store.capabilities.checksum, _BLOCK)
        self._where = (store, key, record, Retrier(config.retry))
        super().__init__(
            store,
            key,
            config,
            expected=expected,
            checks=self._checksums,
            is_immutable=is_immutable,
        )

    def __enter__(self) -> RecordedFile:
        """Makes ``torch.save`` leave out the CRC32, which nobody reads, in this thread."""
        self._before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.serialization.set_crc32_options(self._before)
        super().__exit__(kind, error, trace)

    def close(self) -> None:
        """Completes the file and makes it visible to others.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        if self.closed:
            return
        super().close()
        store, key, record, retrier = self._where
        algorithm, sums = store.capabilities.checksum, self._checksums.finish(self._at)
        file = StoredFile.of_blocks(key, self._at, algorithm, _BLOCK, sums)
        put_whole(store, record, memoryview(record_bytes(file)), retrier)


def is_tensor_memory(value: object) -> Callable[[memoryview], bool]:
    """A test of whether memory belongs to a tensor in host memory anywhere in ``value``."""
    ranges: set[tuple[int, int]] = set()
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            inner = getattr(one, "_local_tensor", None)
            if isinstance(inner, torch.Tensor):
                waiting.append(inner)
            elif one.is_cpu and one.layout is torch.strided:
                storage = one.untyped_storage()
                ranges.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
    starts = dict(sorted(ranges))  # the longest range for each start

    def is_of_tensor(view: memoryview, _kept: object = value) -> bool:
        start = np.frombuffer(view, np.uint8).ctypes.data
        stop = starts.get(start)
        return stop is not None and start + view.nbytes <= stop

    return is_of_tensor
