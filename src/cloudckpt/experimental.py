"""torch's experimental checkpointers on URIs: one object for each rank.

:class:`CloudCheckpointWriter` and :class:`CloudCheckpointReader` take the place of torch's
``CheckpointWriter`` and ``CheckpointReader``, so that ``SyncCheckpointer``, ``AsyncCheckpointer``
and ``CheckpointProcess`` of ``torch.distributed.checkpoint._experimental`` save to object stores.
Rank ``n`` saves ``checkpoint_{n}.pt`` beneath the location, a plain file of ``torch.save``.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from cloudckpt.config import Config
from cloudckpt.errors import InstallError
from cloudckpt.events import Span
from cloudckpt.torch_files.file_part import FilePart
from cloudckpt.torch_files.torch_file import TorchFile
from cloudckpt.torch_files.torch_save import write_torch_file
from cloudckpt.transfer.stats import Transferred
from cloudckpt.uri import CheckpointURI

try:
    from torch.distributed.checkpoint._experimental import (
        CheckpointReader,
        CheckpointWriter,
        CheckpointWriterConfig,
        RankInfo,
        WriterHook,
    )
    from torch.distributed.checkpoint._experimental.barriers import Barrier
except ImportError as exc:
    raise InstallError(
        "this torch has no torch.distributed.checkpoint._experimental, or keeps it elsewhere: "
        "cloudckpt.experimental was made for torch 2.13; cloudckpt.save and load need none of it",
        cause=exc,
    ) from exc

__all__ = ["CloudCheckpointReader", "CloudCheckpointWriter"]

logger = logging.getLogger("cloudckpt")


class CloudCheckpointWriter(CheckpointWriter):
    """Writes the state of one rank to a URI, whole or not at all.

    It can be given to torch's checkpointers as it is: as ``writer=`` of ``SyncCheckpointer``, and
    as ``checkpoint_writer_init_fn=`` of ``make_async_checkpointer`` or ``CheckpointProcess``. As in
    torch's writer, nothing ties the objects of the ranks together but the barrier: a rank that
    fails leaves those of the others in place, and they wait for it as long as the barrier does.

    Attributes:
        transferred: What was sent by the last ``write``.
    """

    def __init__(
        self,
        config: CheckpointWriterConfig | None = None,
        rank_info: RankInfo | None = None,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
        *,
        options: Config | None = None,
    ) -> None:
        """
        Args:
            config: torch's configuration of writers.
            rank_info: The rank; that of the default process group if it is not given.
            barrier: As in torch.
            commit_hook: As in torch.
            options: Options of cloudckpt.
        """
        super().__init__(
            config if config is not None else CheckpointWriterConfig(),
            rank_info if rank_info is not None else _rank_info(),
            barrier,
            commit_hook,
        )
        self.options = options if options is not None else Config()
        self.transferred: Transferred | None = None

    def write(self, path: str, state_dict: dict[str, Any], **kwargs: Any) -> Future[None] | None:
        """Sends the state, then calls ``pre_commit``, waits at the barrier, calls ``post_commit``.

        Besides the state it takes ``memory_budget`` (64 MiB by default).

        Raises:
            InvalidURIError: If ``path`` is no location.
            CheckpointError: If ``torch.save`` can't write the state.
            StoreError: If the store refuses or stays unreachable. As with any failure before the
                hooks, nothing changes at the location.
        """
        uri = _object_of(path, self._rank_info)
        rank = self._rank_info.global_rank
        self.transferred = write_torch_file(state_dict, uri, self.options, rank=rank)
        logger.debug("saved %s", uri)
        if self._commit_hook is not None:
            self._commit_hook.pre_commit(path, **kwargs)
        if self._barrier is not None:
            self._barrier.execute_barrier()
        if self._commit_hook is not None:
            self._commit_hook.post_commit(path, **kwargs)
        return None


class CloudCheckpointReader(CheckpointReader):
    """Reads the state of one rank from a URI; of a part of it, only the bytes of that part.

    Attributes:
        transferred: What was received by the last ``read``.
    """

    def __init__(
        self,
        rank_info: RankInfo | None = None,
        *,
        options: Config | None = None,
        trust_pickle: bool = False,
    ) -> None:
        """
        Args:
            rank_info: The rank; that of the default process group if it is not given.
            options: Options of cloudckpt.
            trust_pickle: Whether the file's pickle may run any code.
        """
        super().__init__(rank_info if rank_info is not None else _rank_info())
        self.options = options if options is not None else Config()
        self.trust_pickle = trust_pickle
        self.transferred: Transferred | None = None

    def read(
        self,
        path: str,
        state_dict: dict[str, Any] | None = None,
        *,
        map_location: Any = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], list[str]]:
        """Reads all, or the keys of ``state_dict``, into the tensors that it has for them.

        All takes one copy of the state and ``memory_budget`` (64 MiB by default), a part the
        tensors made for it and ``memory_budget``; of files that hold other than plain tensors, or
        were saved by torch before 2.7, the whole is read.

        Args:
            path: The location.
            state_dict: What to read: tensors are filled in place; None stands for whatever the file
                has.
            map_location: As in ``torch.load``. With "cpu" the whole is read over parallel
                connections at once, otherwise front to back. Tensors that are made for a part are
                on the CPU, unless this names another device.
            **kwargs: Not used, as in torch.

        Returns:
            The state, and the keys of ``state_dict`` that the file does not have.

        Raises:
            CheckpointNotFoundError: If there is no such file.
            CheckpointCorruptError: If it can't be read.
            CheckpointReplacedError: If it was replaced while it was read.
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            ShapeMismatchError: If a tensor of ``state_dict`` has another shape or type.
            UnsupportedTensorError: If it has another layout, such as sparse.
            CheckpointError: If something else is in the place of a value of ``state_dict``.
        """
        uri = _object_of(path, self._rank_info)
        rank = self._rank_info.global_rank
        with Span("load", str(uri), rank) as span:
            file = TorchFile(uri, self.options, trust_pickle=self.trust_pickle, rank=rank)
            try:
                if state_dict is None:
                    return file.load(map_location), []
                part = FilePart(file, map_location, str(uri))
                updated = part.merged(state_dict, file.skeleton())
                part.fetch()
            finally:
                self.transferred = file.transferred
                span.bytes = self.transferred.bytes
        if part.missing:
            more = f" and {len(part.missing) - 10} more" if len(part.missing) > 10 else ""
            logger.warning("%s lacks the keys %s%s", uri, part.missing[:10], more)
        return updated, part.missing


def _rank_info() -> RankInfo:
    if dist.is_available() and dist.is_initialized():
        return RankInfo(global_rank=dist.get_rank(), global_world_size=dist.get_world_size())
    return RankInfo(global_rank=0, global_world_size=1)


def _object_of(path: str, rank_info: RankInfo) -> CheckpointURI:
    return CheckpointURI.parse(path).join(f"checkpoint_{rank_info.global_rank}.pt")
