"""``save`` and ``load``: torch's own, on a URI."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from cloudckpt.config import Config
from cloudckpt.dcp.planners import CloudLoadPlanner, CloudSavePlanner
from cloudckpt.dcp.quiet import told_once
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.refusal import RefusingReader, RefusingWriter
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import (
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    InvalidURIError,
    ProcessGroupError,
    RanksFailedError,
)
from cloudckpt.uri import URILike

__all__ = ["content_of", "load", "save", "writer_for"]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: URILike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    config: Config | None = None,
) -> Metadata:
    """Saves a distributed state dict; as ``torch.distributed.checkpoint.save``, to a URI.

    When it returns, the checkpoint is committed and whole. If it raises, it does so on every rank,
    nothing new is visible, what was there is untouched, and what the attempt had sent is deleted.

    Args:
        state_dict: The state dict; ``Stateful`` values are asked for theirs.
        checkpoint_id: ``s3://bucket/path`` or another location.
        storage_writer: A writer of the caller's instead of one for ``checkpoint_id``.
        planner: As in torch.
        process_group: As in torch.
        no_dist: As in torch.
        use_collectives: As in torch: whether ranks commit together.
        config: Options, if no writer is given.

    Returns:
        The committed metadata.

    Raises:
        CheckpointExistsError: If there is a checkpoint and ``overwrite`` is off.
        CheckpointConflictError: If another writer committed first.
        CloudCheckpointError: The cause, if the ranks that failed did so for the same reason.
        RanksFailedError: If they failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    writer: StorageWriter
    try:
        writer = writer_for(checkpoint_id, storage_writer, config)
        state = content_of(state_dict)
    except Exception as error:
        if not _has_others(process_group, no_dist, use_collectives):
            raise
        writer, state = RefusingWriter(error), {}
    try:
        return cast(
            Metadata,
            state_dict_saver.save(
                state,
                storage_writer=writer,
                planner=planner or CloudSavePlanner(),
                process_group=process_group,
                no_dist=no_dist,
                use_collectives=use_collectives,
            ),
        )
    except (CheckpointException, RuntimeError) as exc:
        raise _settle(exc, writer, _rank(process_group, no_dist)) from exc


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: URILike | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
    trust_pickle: bool = False,
) -> None:
    """Loads a checkpoint into a state dict, in place; as ``torch.distributed.checkpoint.load``.

    When it returns, every byte was verified. If it raises, it does so on every rank, and the
    tensors of ``state_dict`` may hold a part of the new values.

    Args:
        state_dict: What to load: its keys say what, its tensors say where to and how sharded.
        checkpoint_id: ``s3://bucket/path`` or another location.
        storage_reader: A reader of the caller's instead of one for ``checkpoint_id``.
        planner: As in torch.
        process_group: As in torch.
        no_dist: As in torch.
        config: Options, if no reader is given.
        trust_pickle: Whether pickles in the checkpoint may run any code.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        MissingKeyError: If the checkpoint lacks a key (with the default planner).
        ShapeMismatchError: If a shape differs (with the default planner).
        CheckpointCorruptError: If bytes are missing or damaged.
        UntrustedPickleError: If a pickle would run code that is not on the allow-list.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    reader: StorageReader
    try:
        reader = _reader(checkpoint_id, storage_reader, config, trust_pickle)
        # torch sorts the keys, which it could not do if there were integers beside strings
        state = content_of({str(key): state_dict[key] for key in sorted(state_dict, key=str)})
    except Exception as error:
        if not _has_others(process_group, no_dist):
            raise
        reader, state = RefusingReader(error), {}
    if planner is None and isinstance(reader, CloudStorageReader):
        planner = CloudLoadPlanner(reader.checkpoint_id)
    try:
        with told_once():
            state_dict_loader.load(
                state,
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )
    except (CheckpointException, RuntimeError) as exc:
        # torch passes on why the metadata could not be read only as a text
        local = reader.failure if isinstance(reader, CloudStorageReader) else None
        rank = _rank(process_group, no_dist)
        raise (local or _cause(exc, rank, _location(reader))) from exc
    for key in sorted(state_dict, key=str):
        if isinstance(value := state_dict[key], Stateful):
            value.load_state_dict(state[str(key)])
        else:
            state_dict[key] = state[str(key)]


def content_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with what its ``Stateful`` values return, which are asked one by one."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


def writer_for(
    checkpoint_id: URILike | None, writer: StorageWriter | None, config: Config | None
) -> StorageWriter:
    """The caller's writer, led to a location; or a new one.

    Raises:
        InvalidURIError: If there is neither a location nor a writer.
        ConfigError: If options are given for a writer that has its own.
    """
    if writer is None:
        if checkpoint_id is None:
            raise InvalidURIError("neither checkpoint_id nor storage_writer was given")
        return CloudStorageWriter(checkpoint_id, config=config)
    if config is not None:
        raise ConfigError("config= is for the writer made here; give it to your storage_writer")
    writer.reset(None if checkpoint_id is None else str(checkpoint_id))
    return writer


def _reader(
    checkpoint_id: URILike | None,
    reader: StorageReader | None,
    config: Config | None,
    trust_pickle: bool,
) -> StorageReader:
    if reader is None:
        if checkpoint_id is None:
            raise InvalidURIError("neither checkpoint_id nor storage_reader was given")
        return CloudStorageReader(checkpoint_id, config=config, trust_pickle=trust_pickle)
    if config is not None or trust_pickle:
        raise ConfigError(
            "config= and trust_pickle= are for the reader made here; give them to your "
            "storage_reader"
        )
    reader.reset(None if checkpoint_id is None else str(checkpoint_id))
    return reader


def _settle(
    exc: CheckpointException | RuntimeError, writer: StorageWriter, rank: int
) -> BaseException:
    """Cleans up after a failed save and returns its cause.

    What this rank has written is deleted only if there was certainly no commit: every rank's
    failure says so, or this is the rank that commits and it has not begun to. After an interrupt
    or a lost answer the checkpoint may be visible.
    """
    if isinstance(writer, CloudStorageWriter):
        certain = writer.commits and not writer.commit_begun
        if isinstance(exc, CheckpointException):
            certain = certain or all(
                isinstance(error, Exception) and not isinstance(error, CommitUnknownError)
                for error, _ in exc.failures.values()
            )
        if certain:
            writer.discard()
    return _cause(exc, rank, _location(writer))


def _location(storage: StorageWriter | StorageReader) -> str | None:
    if isinstance(storage, (CloudStorageWriter, CloudStorageReader)):
        return storage.checkpoint_id
    return None


def _cause(exc: CheckpointException | RuntimeError, rank: int, uri: str | None) -> BaseException:
    """The error that a user can act on; ``rank`` is that of this process."""
    if isinstance(exc, RuntimeError):
        if not _is_of_process_group(exc):
            return exc
        return ProcessGroupError(
            "the ranks lost each other: look which one ended first and why, and start them again",
            uri=uri,
            cause=exc,
        )
    failures = {rank: error for rank, (error, _) in sorted(exc.failures.items())}
    own = failures.get(rank)
    if own is not None and not isinstance(own, Exception):
        return own  # an interrupt of this process stays one
    first = next(iter(failures.values()))
    if isinstance(first, CloudCheckpointError) and len({type(e) for e in failures.values()}) == 1:
        return first
    texts = {rank: f"{type(error).__name__}: {error}" for rank, error in failures.items()}
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in list(texts.items())[:8])
    more = f"; and {len(texts) - 8} more ranks" if len(texts) > 8 else ""
    return RanksFailedError(
        f"{len(texts)} ranks failed in step {exc.args[0]!r}: {listed}{more}",
        failures=texts,
        uri=uri,
    )


def _is_of_process_group(exc: RuntimeError) -> bool:
    """Whether a collective raised it; gloo raises plain RuntimeErrors."""
    if isinstance(exc, dist.DistError):
        return True
    traceback = exc.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    return traceback.tb_frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"


def _has_others(
    process_group: dist.ProcessGroup | None, no_dist: bool, use_collectives: bool = True
) -> bool:
    """Whether other ranks wait for this one in torch's first step."""
    if no_dist or not use_collectives or not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(process_group) > 1


def _rank(process_group: dist.ProcessGroup | None, no_dist: bool) -> int:
    """The rank of this process as torch's saver and loader count it."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank(process_group)
