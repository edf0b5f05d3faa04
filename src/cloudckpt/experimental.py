"""torch's experimental checkpointers on URIs: one object for each rank.

:class:`CloudCheckpointWriter` and :class:`CloudCheckpointReader` take the place of torch's
``CheckpointWriter`` and ``CheckpointReader``, so that ``SyncCheckpointer``, ``AsyncCheckpointer``
and ``CheckpointProcess`` of ``torch.distributed.checkpoint._experimental`` save to object stores.
Rank ``n`` saves ``checkpoint_{n}.pt`` beneath the location, a plain file of ``torch.save``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.skeletons import NotPlainError, Place, has_tensors
from cloudckpt.checkpoint.torch_file import TorchFile, write_torch_file
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointError, InstallError, ShapeMismatchError
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
    fails leaves those of the others in place.

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
        self.transferred = write_torch_file(state_dict, uri, self.options)
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
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            ShapeMismatchError: If a tensor of ``state_dict`` has another shape or type.
            CheckpointError: If something else is in the place of a value of ``state_dict``.
        """
        uri = _object_of(path, self._rank_info)
        file = TorchFile(uri, self.options, trust_pickle=self.trust_pickle)
        try:
            if state_dict is None:
                return file.load(map_location), []
            part = _Part(file, map_location, str(uri))
            updated = part.merged(state_dict, file.skeleton())
            part.fetch()
        finally:
            self.transferred = file.transferred
        if part.missing:
            more = f" and {len(part.missing) - 10} more" if len(part.missing) > 10 else ""
            logger.warning("%s lacks the keys %s%s", uri, part.missing[:10], more)
        return updated, part.missing


class _Part:
    """The part of a file that a state dict names."""

    def __init__(self, file: TorchFile, map_location: Any, uri: str) -> None:
        self.missing: list[str] = []
        self._file = file
        self._uri = uri
        self._device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        self._pairs: list[tuple[Place, torch.Tensor]] = []
        self._others: list[tuple[_Path, torch.Tensor]] = []
        self._loaded: Any = None

    def merged(self, target: Any, source: Any, path: _Path = ()) -> Any:
        """``target`` with what the file has for it; tensors are noted, to be fetched together."""
        if target is not None and not _is_like(target, source):
            raise CheckpointError(
                f"{_text(path)} is a {type(target).__name__}, and the file has a "
                f"{type(source).__name__} there",
                uri=self._uri,
                item=_text(path),
            )
        if isinstance(source, torch.Tensor):
            return self._tensor(target, source, path)
        if isinstance(source, Mapping):
            target = dict.fromkeys(source) if target is None else target
            for key in list(target):
                below = (*path, key)
                if key in source:
                    target[key] = self.merged(target[key], source[key], below)
                else:
                    self.missing.append(_text(below))
            return target
        if type(source) in (list, tuple):
            wanted = list(target) if target is not None else []
            if len(wanted) > len(source):
                raise CheckpointError(
                    f"{_text(path)} has {len(wanted)} entries, and the file {len(source)}",
                    uri=self._uri,
                    item=_text(path),
                )
            wanted.extend([None] * (len(source) - len(wanted)))
            pairs = enumerate(zip(wanted, source, strict=True))
            return type(source)(self.merged(t, s, (*path, at)) for at, (t, s) in pairs)
        return self._value(source, path)

    def _value(self, source: Any, path: _Path) -> Any:
        try:
            hides_tensors = has_tensors(source)
        except NotPlainError:
            hides_tensors = True
        return self._whole(path) if hides_tensors else source

    def _tensor(
        self, target: torch.Tensor | None, source: torch.Tensor, path: _Path
    ) -> torch.Tensor:
        if target is None:
            target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        elif target.shape != source.shape or target.dtype != source.dtype:
            raise ShapeMismatchError(
                f"{_text(path)} has shape {tuple(source.shape)} and type {source.dtype} in the "
                f"file, and {tuple(target.shape)} and {target.dtype} in the state dict",
                uri=self._uri,
                item=_text(path),
            )
        place = self._file.place(source)
        if place is None:
            self._others.append((path, target))
        else:
            self._pairs.append((place, target))
        return target

    def fetch(self) -> None:
        """Fills the tensors."""
        self._file.read_into(self._pairs)
        with torch.no_grad():
            for path, target in self._others:
                target.copy_(self._whole(path))

    def _whole(self, path: _Path) -> Any:
        """What only ``torch.load`` can build, which builds all."""
        if self._loaded is None:
            self._loaded = self._file.load()
        value = self._loaded
        for key in path:
            value = value[key]
        return value


_Path = tuple[Any, ...]
"""Keys and indices that lead to an entry."""


def _text(path: _Path) -> str:
    """A path as torch's reader writes it."""
    text = ""
    for key in path:
        text += f"[{key}]" if type(key) is int else f".{key}" if text else str(key)
    return text or "the state dict"


def _is_like(target: Any, source: Any) -> bool:
    for kind in (torch.Tensor, Mapping, list, tuple):
        if isinstance(source, kind):
            return isinstance(target, kind)
    return isinstance(target, type(source))


def _rank_info() -> RankInfo:
    if dist.is_available() and dist.is_initialized():
        return RankInfo(global_rank=dist.get_rank(), global_world_size=dist.get_world_size())
    return RankInfo(global_rank=0, global_world_size=1)


def _object_of(path: str, rank_info: RankInfo) -> CheckpointURI:
    return CheckpointURI.parse(path).join(f"checkpoint_{rank_info.global_rank}.pt")
