"""torch's experimental checkpointers on URIs: one object for each rank.

:class:`CloudCheckpointWriter` and :class:`CloudCheckpointReader` take the place of torch's
``CheckpointWriter`` and ``CheckpointReader``, so that ``SyncCheckpointer``, ``AsyncCheckpointer``
and ``CheckpointProcess`` of ``torch.distributed.checkpoint._experimental`` save to object stores.
Rank ``n`` saves ``checkpoint_{n}.pt`` beneath the location, a plain file of ``torch.save``.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._experimental import (
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriterHook,
)
from torch.distributed.checkpoint._experimental.barriers import Barrier
from torch.distributed.checkpoint.metadata import MetadataIndex

from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.shared_memory import SharedMemory, in_memory
from cloudckpt.errors import CheckpointError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.events import Span, Transferred
from cloudckpt.torch_files.broadcast import check_fillable
from cloudckpt.torch_files.torch_file import load_torch_file, write_torch_file
from cloudckpt.transfer.landing import copy_into
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["CloudCheckpointReader", "CloudCheckpointWriter"]

logger = logging.getLogger("cloudckpt")


class CloudCheckpointWriter(CheckpointWriter):
    """Writes the state of one rank to a URI, completely or not at all.

    Give it to torch's checkpointers: as ``writer=`` of ``SyncCheckpointer``, or as
    ``checkpoint_writer_init_fn=`` of ``make_async_checkpointer`` or ``CheckpointProcess``. As with
    torch's writer, only the barrier connects the ranks: if a rank fails, the objects of the others
    stay, and the other ranks wait for it until the barrier times out.

    Attributes:
        transferred: The bytes and requests of the last ``write``; None before the first.
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
        """Creates a writer.

        Args:
            config: torch's configuration of writers.
            rank_info: The rank; by default that of the default process group.
            barrier: As in torch.
            commit_hook: As in torch.
            options: Options of cloudckpt; by default those of the environment.

        Raises:
            ConfigError: If `options` is not a Config, or a variable of the environment is invalid.
        """
        super().__init__(
            config if config is not None else CheckpointWriterConfig(),
            rank_info if rank_info is not None else _rank_info(),
            barrier,
            commit_hook,
        )
        self.options = config_or_default(options)
        self.transferred: Transferred | None = None

    def write(self, path: str, state_dict: dict[str, Any], **kwargs: Any) -> Future[None] | None:
        """Sends the state; then calls ``pre_commit``, waits at the barrier, calls ``post_commit``.

        The hook and the barrier are left out if none were given. Besides the state, a write needs
        ``memory_budget`` bytes of host memory (64 MiB by default; more for files above about 100
        GiB), and room for one storage at a time if the tensors are on an accelerator.

        Args:
            path: The location; the object is ``checkpoint_{rank}.pt`` beneath it.
            state_dict: The state of this rank.
            **kwargs: Passed to the commit hook.

        Returns:
            None, as the state is in the store by then.

        Raises:
            InvalidURIError: If ``path`` is not a valid location.
            ConfigError: If the options do not suit the store.
            MissingDependencyError: If a package for this kind of store is not installed.
            CheckpointExistsError: If the rank's file exists, and ``overwrite`` is off.
            CommitUnknownError: If a local file system does not confirm that the file is on disk.
            CheckpointError: If ``torch.save`` can't write the state.
            StoreError: If the store refuses or stays unreachable. As with any failure before the
                hooks, nothing changes at the location, unless the answer to the last request was
                lost.
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
    """Reads the state of one rank from a URI.

    Attributes:
        transferred: The bytes and requests of the last ``read``; None before the first.
    """

    def __init__(
        self,
        rank_info: RankInfo | None = None,
        *,
        options: Config | None = None,
        trust_pickle: bool = False,
    ) -> None:
        """Creates a reader.

        Args:
            rank_info: The rank; by default that of the default process group.
            options: Options of cloudckpt; by default those of the environment.
            trust_pickle: Whether the file's pickle may run any code.

        Raises:
            ConfigError: If `options` is not a Config, or a variable of the environment is invalid.
        """
        super().__init__(rank_info if rank_info is not None else _rank_info())
        self.options = config_or_default(options)
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
        """Reads the state of the rank, or the entries of ``state_dict``, filling tensors in place.

        The whole file is read, which takes memory for one copy of the state, and ``memory_budget``
        bytes (64 MiB by default).

        Args:
            path: The location; the object is ``checkpoint_{rank}.pt`` beneath it.
            state_dict: The entries to read: tensors are filled in place, and an entry that is None
                becomes the file's value. If the argument is None, everything is read.
            map_location: As in ``torch.load``; with a ``state_dict``, "cpu" by default.
            **kwargs: Ignored, as in torch.

        Returns:
            The state, and the keys of ``state_dict`` that the file lacks.

        Raises:
            InvalidURIError: If ``path`` is not a valid location.
            ConfigError: If the options do not suit the store.
            MissingDependencyError: If a package for this kind of store is not installed.
            CheckpointNotFoundError: If there is no such file.
            CheckpointCorruptError: If the file is damaged, or was not written by ``torch.save``.
            CheckpointReplacedError: If it was replaced while it was read.
            StoreError: If the store refuses or stays unreachable.
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            ShapeMismatchError: If a tensor of ``state_dict`` has another shape or type.
            UnsupportedTensorError: If a tensor has another layout, such as sparse, or no memory.
            KeyCollisionError: If tensors that share memory have different values in the file.
            CheckpointError: If the file has another kind of value than ``state_dict`` at some key;
                or, with a ``map_location`` other than "cpu", if the file is damaged, or a device
                does not exist.
        """
        uri = _object_of(path, self._rank_info)
        rank = self._rank_info.global_rank
        if state_dict is not None and map_location is None:
            map_location = "cpu"
        stats, part = TransferStats(str(uri), rank), _Part(str(uri), [], [])
        with Span("load", str(uri), rank) as span:
            try:
                state = load_torch_file(
                    uri,
                    self.options,
                    stats,
                    map_location=map_location,
                    trust_pickle=self.trust_pickle,
                )
                if state_dict is not None:
                    state = _merged(state_dict, state, "", part)
                    _fill(part)
            finally:
                self.transferred = stats.snapshot()
                span.nbytes = self.transferred.nbytes
        if part.missing:
            logger.warning(
                "%s: keys of the state dict are not in the file, so their values stay as they were "
                "(%d, such as %s)",
                uri,
                len(part.missing),
                part.missing[:10],
            )
        return state, part.missing


class _Part(NamedTuple):
    """Missing keys and tensors, noted while the values of a file are put into a state dict.

    Attributes:
        uri: The file.
        missing: The keys of the state dict that the file lacks.
        tensors: The path of each tensor of the state dict, the tensor, and the one in the file.
    """

    uri: str
    missing: list[str]
    tensors: list[tuple[str, torch.Tensor, torch.Tensor]]


def _merged(target: Any, source: Any, path: str, part: _Part) -> Any:
    """Returns ``target`` with the file's values in place of its own; tensors are filled later.

    Dicts are changed in place, and lists made anew. Any other value, also None, is replaced by the
    file's value.

    Args:
        target: A value of the state dict.
        source: The value in the file under the same keys.
        path: These keys, joined by dots, for messages; empty for the whole state.
        part: Takes the missing keys, and the tensors to fill.

    Raises:
        CheckpointError: If a value has another class than the file's.
        ShapeMismatchError: As in :func:`_check`.
        UnsupportedTensorError: As in :func:`_check`.
    """
    if target is None:
        return source
    types: tuple[type[Any], ...] = (torch.Tensor, dict, type(source))
    if not isinstance(target, next(one for one in types if isinstance(source, one))):
        raise CheckpointError(
            f"{path or 'the state'} is of class {type(target).__name__}, but in the file of class "
            f"{type(source).__name__}: put None there to load the file's value",
            uri=part.uri,
            item=path,
        )
    if isinstance(source, torch.Tensor):
        _check(target, source, path, part.uri)
        part.tensors.append((path, target, source))
        return target
    if isinstance(source, dict):
        for key in list(target):
            below = f"{path}.{key}" if path else str(key)
            if key in source:
                target[key] = _merged(target[key], source[key], below, part)
            else:
                part.missing.append(below)
        return target
    if isinstance(source, list):
        pairs = enumerate(itertools.zip_longest(target, source))
        return [_merged(ours, saved, f"{path}[{at}]", part) for at, (ours, saved) in pairs]
    return source


def _check(target: torch.Tensor, source: torch.Tensor, path: str, uri: str) -> None:
    """Checks that a tensor of the state dict can take a tensor of the file.

    Raises:
        ShapeMismatchError: If shape or dtype differ.
        UnsupportedTensorError: If the layout differs, or the target can't be filled in place.
    """
    for attribute in ("shape", "dtype", "layout"):
        ours, theirs = getattr(target, attribute), getattr(source, attribute)
        if ours != theirs:
            error = UnsupportedTensorError if attribute == "layout" else ShapeMismatchError
            raise error(
                f"{path or 'the state'} has the {attribute} {theirs} in the file, but {ours} in "
                "the state dict: put None in its place to load the file's tensor",
                uri=uri,
                item=path,
            )
    check_fillable(target, path, uri)


def _fill(part: _Part) -> None:
    """Copies the tensors of the file into those of the state dict.

    Raises:
        KeyCollisionError: If tensors that share memory have different values in the file.
    """
    entries = [(MetadataIndex(path), in_memory(target)) for path, target, _ in part.tensors]
    shared = SharedMemory(entries)
    for number, (_, target, source) in enumerate(part.tensors):
        copy_into(target, source)
        shared.note(number)
    shared.check(part.uri)


def _rank_info() -> RankInfo:
    if dist.is_available() and dist.is_initialized():
        return RankInfo(global_rank=dist.get_rank(), global_world_size=dist.get_world_size())
    return RankInfo(global_rank=0, global_world_size=1)


def _object_of(path: str, rank_info: RankInfo) -> CheckpointURI:
    return CheckpointURI.parse(path).join(f"checkpoint_{rank_info.global_rank}.pt")
