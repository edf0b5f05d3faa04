"""``save``, ``load`` and ``exists``: checkpoints at a URI, with the interface of torch's
functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from cloudckpt._arguments import suggesting
from cloudckpt.checkpoint.objects import is_committed
from cloudckpt.checkpoint.structure import Flat
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.content import Content
from cloudckpt.dcp.load_loop import load_together
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.meeting import Meeting, check_together, collective
from cloudckpt.dcp.reader import CloudStorageReader, OurReader
from cloudckpt.dcp.report import LoadReport
from cloudckpt.dcp.save_loop import SaveLoop
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.errors import (
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    InvalidURIError,
    ProcessGroupError,
)
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = [
    "ToLoad",
    "ToSave",
    "content_of",
    "exists",
    "load",
    "load_prepared",
    "our_writer",
    "save",
    "save_prepared",
    "writer_for",
]

S = TypeVar("S")
T = TypeVar("T")

_WHAT_IS_COMMITTED = {
    True: "this save is committed all the same",
    False: "this save is not committed, and will not be",
    None: "it is unknown whether this save is committed, or will be later: check whether the new "
    "checkpoint is at this location before you go on. Data that a commit may need was kept",
}


@suggesting
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
    base: URILike | None = None,
) -> Metadata:
    """Saves a distributed state dict to a URI, as ``torch.distributed.checkpoint.save`` does.

    When this returns, the checkpoint is committed and complete. If it raises, it raises on every
    rank. After a CommitUnknownError, a ProcessGroupError or an interrupt, the new checkpoint may
    exist. After any other error no new checkpoint is visible, an existing one is unchanged, and the
    data that was sent is deleted.

    Args:
        state_dict: The state dict; of ``Stateful`` values, their ``state_dict()`` is saved.
        checkpoint_id: ``s3://bucket/path`` or another location; required without a writer.
        storage_writer: A writer of this package; it saves to ``checkpoint_id`` if that is given,
            too. None to make one with ``config`` and ``base``.
        planner: As in torch.
        process_group: As in torch.
        no_dist: As in torch.
        use_collectives: Must be True: all ranks commit together.
        config: Options; by default those of the environment. Not together with a writer.
        base: An earlier checkpoint in the same folder, which was saved with
            ``Config(incremental=True)`` or a base: data that it has already is referenced and not
            sent again. By default the newest step, if this save has ``Config(incremental=True)``.
            Not together with a writer.

    Returns:
        The committed metadata. On ranks other than the one that committed, it is read on first
        access; printing or comparing it reads nothing (unread metadata is equal to itself only).

    Raises:
        InvalidURIError: If the location is missing or invalid.
        CheckpointExistsError: If there is a checkpoint and ``overwrite`` is off.
        ConfigError: If the arguments contradict each other, if the writer is another package's, or
            if the location is the folder of a run, which can't be a checkpoint as well.
        CheckpointConflictError: If another writer committed first.
        CommitUnknownError: If the store did not report whether it carried out the commit; nothing
            is deleted then.
        CloudCheckpointError: The cause, if all ranks that failed did so for the same reason.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other; its ``committed`` says
            whether the save is committed, if known, and no data that may be needed is deleted.
    """

    def prepare() -> ToSave:
        check_together(use_collectives)
        return ToSave(writer_for(checkpoint_id, storage_writer, config, base), planner)

    return save_prepared(
        state_dict,
        prepare,
        checkpoint_id if storage_writer is None else storage_writer,
        process_group=process_group,
        no_dist=no_dist,
    )


@suggesting
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
    strict: bool = True,
) -> LoadReport:
    """Loads a checkpoint into a state dict in place, as ``torch.distributed.checkpoint.load`` does.

    When this returns, every byte that was read has matched its checksum, unless ``verify`` is off;
    checkpoints of other writers have no checksums. If it raises, the tensors of ``state_dict`` may
    hold some of the new values. Errors are raised on every rank, also those of the caller's own
    ``load_state_dict`` methods, which are called once all ranks have loaded. Only if such a method
    is a collective call, and fails on some of the ranks, may the others wait in it until the
    timeout of their process group. If a writer replaces the checkpoint meanwhile, all ranks start
    again with the newer one, a few times: everything loaded comes from one save.

    Args:
        state_dict: The state dict to load into: its keys select the entries, and its tensors
            receive the values, and determine how these are sharded.
        checkpoint_id: ``s3://bucket/path`` or another location; required without a reader.
        storage_reader: A reader of this package; it loads from ``checkpoint_id`` if that is given,
            too. None to make one with ``config`` and ``trust_pickle``.
        planner: As in torch.
        process_group: As in torch.
        no_dist: As in torch.
        config: Options; by default those of the environment. Not together with a reader.
        trust_pickle: Whether pickles in the checkpoint may run arbitrary code. Not together with a
            reader, which has its own setting.
        strict: Whether all keys of ``state_dict`` must be in the checkpoint and fit. If False, the
            entries that fit are loaded, the others keep their values, and the report names them;
            no ``planner`` may be given then.

    Returns:
        A report of what was loaded on this rank, and what was not. The first rank logs it if it
        contains more than loaded entries.

    Raises:
        InvalidURIError: If the location is missing or invalid.
        ConfigError: If the arguments contradict each other, or the reader is another package's.
        CheckpointNotFoundError: If there is no committed checkpoint.
        MissingKeyError: If ``strict`` and the checkpoint lacks a key (with the default planner).
        ShapeMismatchError: If ``strict`` and a shape differs (with the default planner).
        KeyCollisionError: If tensors that share memory have different values in the checkpoint.
        CheckpointCorruptError: If bytes are missing or damaged.
        CheckpointReplacedError: If the checkpoint was replaced repeatedly meanwhile.
        UntrustedPickleError: If a pickle would run code that is not on the allow-list.
        CloudCheckpointError: The cause, if all ranks that failed did so for the same reason.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
        Exception: In a process that loads alone, the error of a ``load_state_dict`` method. Its
            note, and the message of a RanksFailedError, name the entry.
    """

    def prepare() -> ToLoad:
        reader = _reader(checkpoint_id, storage_reader, config, trust_pickle)
        if strict:
            return ToLoad(reader, planner)
        if planner is not None:
            raise ConfigError(
                "strict=False contradicts planner=, as it configures the planner that load makes "
                "itself: leave planner= out, or pass strict=True"
            )
        return ToLoad(reader, CloudLoadPlanner(getattr(reader, "checkpoint_id", ""), strict=False))

    return load_prepared(
        state_dict,
        prepare,
        checkpoint_id if storage_reader is None else storage_reader,
        process_group=process_group,
        no_dist=no_dist,
    )


@contextlib.contextmanager
def _naming(action: str, target: object) -> Iterator[None]:
    """Sets the ``action`` of errors raised in the block, if ``target`` has a valid location.

    Args:
        action: The start of the text, such as ``save to``; the location follows.
        target: The location, or an object with a ``checkpoint_id``.
    """
    try:
        yield
    except CloudCheckpointError as error:
        location: Any = getattr(target, "checkpoint_id", target)
        if error.action is None and CheckpointURI.accepts(location):
            error.action = f"{action} {CheckpointURI.parse(location)}"
        raise


@dataclass(frozen=True)
class ToSave:
    """The writer and planner with which a rank saves; None as the planner means cloudckpt's own."""

    writer: OurWriter
    planner: SavePlanner | None = None


@dataclass(frozen=True)
class ToLoad:
    """The reader and planner with which a rank loads; None as the planner means cloudckpt's own."""

    reader: OurReader
    planner: LoadPlanner | None = None


@collective("cloudckpt.save")
def save_prepared(
    state_dict: dict[str, Any],
    prepare: Callable[[], ToSave],
    target: object,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Saves with the writer that ``prepare`` returns; if it raises on one rank, no rank begins.

    Arguments, result and errors not described here are those of :func:`save`.

    Args:
        state_dict: As in :func:`save`.
        prepare: Creates the writer and planner.
        target: The location, or an object with a ``checkpoint_id``, for messages.
        process_group: As in :func:`save`.
        no_dist: As in :func:`save`.
    """
    with _naming("save to", target):
        meeting = Meeting.of(process_group, no_dist)

        def prepare_to_write() -> ToSave:
            made = prepare()
            made.writer.begin(commits=meeting.rank == 0)
            return made

        def begin() -> SaveLoop:
            made, content = _prepare_with_content(
                prepare_to_write, lambda: content_of(state_dict, meeting.rank)
            )
            planner = made.planner or CloudSavePlanner()
            return SaveLoop(content.for_planner(planner), made.writer, planner, meeting)

        loop, consensus = meeting.agreed(begin, lambda loop: loop.status)
        try:
            return loop.run(consensus.plan)
        except BaseException as error:  # noqa: BLE001 - raised again
            raise _after_clean_up(error, loop.writer) from error.__cause__
        finally:
            forget_listings()


@collective("cloudckpt.load")
def load_prepared(
    state_dict: dict[str, Any],
    prepare: Callable[[], ToLoad],
    target: object,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Loads with the reader that ``prepare`` returns; if it raises on one rank, no rank begins.

    Arguments, result and errors not described here are those of :func:`load`.

    Args:
        state_dict: As in :func:`load`.
        prepare: Creates the reader and planner.
        target: The location, or an object with a ``checkpoint_id``, for messages.
        process_group: As in :func:`load`.
        no_dist: As in :func:`load`.
    """
    with _naming("load from", target):
        meeting = Meeting.of(process_group, no_dist)

        def content() -> Content:
            _check_dict(state_dict)
            # in one order on all ranks, as in torch: methods of a Stateful may be collective calls
            named = {str(key): state_dict[key] for key in sorted(state_dict, key=str)}
            if len(named) < len(state_dict):
                Flat(state_dict)  # names two keys that become the same string
            return Content(named, meeting.rank)

        def begin() -> tuple[StorageReader, LoadPlanner | None, Content]:
            made, content_to_load = _prepare_with_content(prepare, content)
            return made.reader, made.planner, content_to_load

        return load_together(meeting, state_dict, begin)


def _prepare_with_content(prepare: Callable[[], T], content: Callable[[], S]) -> tuple[T, S]:
    """Returns the results of both functions; calls the second even if the first raises an error.

    The second calls ``state_dict()`` methods, which may be collective calls: if a rank left them
    out, for example because of an invalid location, the other ranks would wait for it.
    """
    try:
        made = prepare()
    except Exception:
        with contextlib.suppress(Exception):
            content()
        raise
    return made, content()


def exists(uri: URILike, *, config: Config | None = None) -> bool:
    """Returns whether there is a committed checkpoint at a location, with one small request.

    For scripts that resume if they can. The result is False only if the store itself reports that
    there is no checkpoint: a script that mistook an outage for that would start over and overwrite
    a good checkpoint. During a save, ranks that ask separately may get different answers; ask on
    one rank and broadcast the result. A model in safetensors files can be loaded too, but does not
    count as a checkpoint.

    Args:
        uri: ``s3://bucket/path`` or another location.
        config: Options; by default those of the environment.

    Returns:
        True if the checkpoint exists; False if the store reports that it does not.

    Raises:
        InvalidURIError: If `uri` is not a valid location.
        ConfigError: If an option is invalid.
        MissingDependencyError: If a package for this kind of store is not installed.
        BucketNotFoundError: If the bucket does not exist.
        StoreError: If the store refuses the request or stays unreachable.
    """
    location = CheckpointURI.parse(uri)
    config = config_or_default(config)
    return is_committed(open_store(location, config), location, Retrier(config.retry))


def content_of(state_dict: dict[str, Any], rank: int) -> Content:
    """Returns the :class:`Content` of a state dict, its form in a save; the dict is not changed.

    Each ``Stateful`` is replaced by the result of its ``state_dict()``, and each ``per_rank`` by a
    dict with this rank's value under ``rank_<rank>``.

    Args:
        state_dict: The state dict.
        rank: This rank, in the group that saves.

    Raises:
        ConfigError: If `state_dict` is not a dict.
        UnsupportedValueError: If a container contains itself or is nested too deeply, or a tuple
            holds a ``Stateful`` or a ``per_rank``.
    """
    _check_dict(state_dict)
    return Content(state_dict, rank)


def _check_dict(state_dict: object) -> None:
    if not isinstance(state_dict, Mapping):
        class_name = type(state_dict).__name__
        example = "model" if isinstance(state_dict, torch.nn.Module) else "name"
        raise ConfigError(
            f"a state dict must be a dict, not a {class_name}: pass {{'{example}': ...}} with the "
            "value in it"
        )


def writer_for(
    checkpoint_id: URILike | None,
    writer: StorageWriter | None,
    config: Config | None,
    base: URILike | None = None,
) -> OurWriter:
    """Returns the caller's writer, set to the location if one is given, or a new writer.

    Raises:
        InvalidURIError: If the location is invalid, or there is neither a location nor a writer.
        ConfigError: If the writer is another package's; if options or a base are given besides a
            writer; or if they are invalid.
    """
    if writer is None:
        if checkpoint_id is None:
            raise InvalidURIError(
                "a save needs a location: pass checkpoint_id, a URI or a path, or a storage_writer"
            )
        return CloudStorageWriter(checkpoint_id, config=config, base=base)
    ours = our_writer(writer)
    if config is not None or base is not None:
        raise ConfigError(
            "config= and base= contradict storage_writer=, which has its own options: pass them to "
            "the writer when you create it"
        )
    ours.reset(None if checkpoint_id is None else str(checkpoint_id))
    return ours


def our_writer(writer: StorageWriter) -> OurWriter:
    """Returns the writer, if it is one of this package.

    Raises:
        ConfigError: If it is another package's, which would give none of cloudckpt's guarantees.
    """
    if not isinstance(writer, OurWriter):
        raise _foreign(writer, "save", "writer")
    return writer


def _reader(
    checkpoint_id: URILike | None,
    reader: StorageReader | None,
    config: Config | None,
    trust_pickle: bool,
) -> OurReader:
    if reader is None:
        if checkpoint_id is None:
            raise InvalidURIError(
                "a load needs a location: pass checkpoint_id, a URI or a path, or a storage_reader"
            )
        return CloudStorageReader(checkpoint_id, config=config, trust_pickle=trust_pickle)
    if not isinstance(reader, OurReader):
        raise _foreign(reader, "load", "reader")
    if config is not None or trust_pickle:
        raise ConfigError(
            "config= and trust_pickle= contradict storage_reader=, which has its own: pass them to "
            "the reader when you create it"
        )
    reader.reset(None if checkpoint_id is None else str(checkpoint_id))
    return reader


def _foreign(storage: object, verb: str, noun: str) -> ConfigError:
    class_name = type(storage).__name__
    return ConfigError(
        f"cloudckpt can't {verb} with a {class_name}, which is not a cloudckpt {noun}: pass it to "
        "torch.distributed.checkpoint's function of the same name, or leave it out and pass a URI "
        "or a path as checkpoint_id"
    )


def _after_clean_up(error: BaseException, writer: OurWriter) -> BaseException:
    """Deletes what this rank has sent in a failed save, unless the save may be committed.

    The committing rank knows whether it is; other ranks infer it from the failures of all ranks.
    After an interrupt or an uncertain commit, the data is kept.

    Returns:
        The error to raise: the given one or, if the ranks lost each other, a ProcessGroupError that
        says whether the save is committed.
    """
    cause, uri, committed = error.__cause__, writer.checkpoint_id, None
    # has the failures of all ranks; None if the error was raised outside of their steps
    failed = cause if isinstance(cause, CheckpointException) else None
    if failed is None and not isinstance(error, Exception):
        return error  # this rank was interrupted, and the others do not know it
    lost = error if isinstance(error, ProcessGroupError) and failed is None else None
    certain = True
    if isinstance(writer, CloudStorageWriter):
        committed = writer.look_whether_committed() if lost is not None else None
        certain = writer.committed is False
        if failed is not None and not writer.commits:
            certain = all(
                isinstance(failure, Exception) and not isinstance(failure, CommitUnknownError)
                for failure, _ in failed.failures.values()
            )
    if certain:
        writer.discard()
    if lost is None:
        return error
    message = f"{lost.message}; {_WHAT_IS_COMMITTED[committed]}"
    return ProcessGroupError(message, committed=committed, uri=uri, cause=cause)
