"""``save`` and ``load``: torch's own, on a URI."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.objects import is_committed
from cloudckpt.checkpoint.torch_private import errors_gathered_as
from cloudckpt.config import Config
from cloudckpt.dcp.failures import portable
from cloudckpt.dcp.load_loop import load_together, loads_together
from cloudckpt.dcp.meeting import TORCHS_WAY, Meeting, Stance, break_off, one_error
from cloudckpt.dcp.planners import CloudLoadPlanner, CloudSavePlanner
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.save_loop import SaveLoop
from cloudckpt.dcp.torch_log import told_once
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import (
    CheckpointReplacedError,
    CommitUnknownError,
    ConfigError,
    InvalidURIError,
    KeyCollisionError,
    ProcessGroupError,
)
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.retry import Retrier, begun_anew, open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = [
    "ToLoad",
    "ToSave",
    "content_of",
    "exists",
    "load",
    "load_prepared",
    "save",
    "save_prepared",
    "writer_for",
]

S = TypeVar("S")
T = TypeVar("T")

_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
_LOST = "the ranks lost each other: look which one ended first and why, and start them again"
_WHAT_IS_COMMITTED = {
    True: "this save is committed all the same",
    False: "this save is not committed, and will not be",
    None: "whether this save is committed is not known: it was not when this rank looked, if it "
    "could look, and it may still be; look for the checkpoint before you go on. Its data was kept",
}


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
        The committed metadata. Ranks that have not committed them read them when somebody looks
        into them; to print or to compare them (two are equal if of the same save) reads nothing.

    Raises:
        CheckpointExistsError: If there is a checkpoint and ``overwrite`` is off.
        CheckpointConflictError: If another writer committed first.
        CommitUnknownError: If the store itself did not say whether it carried out the commit;
            nothing is deleted then.
        CloudCheckpointError: The cause, if the ranks that failed did so for the same reason.
        RanksFailedError: If they failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other; its ``committed`` says what
            is known of the commit, and nothing is deleted that may be needed.
    """

    def prepare() -> ToSave:
        writer = writer_for(checkpoint_id, storage_writer, config)
        return ToSave(writer, planner)

    return save_prepared(
        state_dict,
        prepare,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


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
    tensors of ``state_dict`` may hold a part of the new values. If a writer replaces the checkpoint
    meanwhile, all ranks begin anew with the newer one, a few times: what was loaded is of one save.

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
        CheckpointReplacedError: If writers replaced it again and again meanwhile.
        UntrustedPickleError: If a pickle would run code that is not on the allow-list.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """

    def prepare() -> ToLoad:
        reader = _reader(checkpoint_id, storage_reader, config, trust_pickle)
        return ToLoad(reader, planner)

    load_prepared(state_dict, prepare, process_group=process_group, no_dist=no_dist)


@dataclass(frozen=True)
class ToSave:
    """Where a rank saves to, and as planned by what."""

    writer: StorageWriter
    planner: SavePlanner | None = None


@dataclass(frozen=True)
class ToLoad:
    """Where a rank loads from, and as planned by what."""

    reader: StorageReader
    planner: LoadPlanner | None = None


def save_prepared(
    state_dict: dict[str, Any],
    prepare: Callable[[], ToSave],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves to what ``prepare`` returns; if it raises on one rank, none begins.

    Arguments, result and errors are those of :func:`save`.
    """
    meeting = Meeting.of(process_group, no_dist)

    loops: list[SaveLoop] = []

    def begin() -> tuple[ToSave, dict[str, Any]]:
        made, state = _both(prepare, lambda: content_of(state_dict))
        planner = made.planner or CloudSavePlanner()
        if use_collectives:
            loops.extend(SaveLoop.of(state, made.writer, planner, process_group, no_dist))
        return replace(made, planner=planner), state

    def stance(begun: tuple[ToSave, dict[str, Any]]) -> Stance:
        own = _stance_of_save(begun[0].writer, begun[0].planner, use_collectives)
        return replace(own, plan=loops[0].plan) if loops else own

    plan = TORCHS_WAY
    try:
        (made, state), plan = meeting.begin_planned(begin, stance)
    finally:
        if plan == TORCHS_WAY:
            for loop in loops:
                loop.give_up()
    writer = made.writer
    save_it: Callable[[], Metadata]
    if plan != TORCHS_WAY:
        save_it = functools.partial(loops[0].run, plan)
    else:
        save_it = functools.partial(
            state_dict_saver.save,
            state,
            storage_writer=writer,
            planner=made.planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    uri = _location(writer)
    try:
        return cast(Metadata, _each_alone(meeting, save_it, lambda: not use_collectives, uri))
    except (CheckpointException, RuntimeError) as exc:
        if _is_of_group(exc):
            break_off(meeting.group)
        raise _settle(exc, writer, _rank(process_group, no_dist)) from exc
    finally:
        forget_listings()


def load_prepared(
    state_dict: dict[str, Any],
    prepare: Callable[[], ToLoad],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads from what ``prepare`` returns; if it raises on one rank, none begins.

    Arguments and errors are those of :func:`load`.
    """

    def content() -> dict[str, Any]:
        # torch sorts the keys, which it could not do if there were integers beside strings
        named = {str(key): value for key, value in state_dict.items()}
        if len(named) < len(state_dict):
            raise KeyCollisionError(
                "two keys of the state dict have the same text, by which they are loaded"
            )
        return content_of({name: named[name] for name in sorted(named)})

    meeting = Meeting.of(process_group, no_dist)
    made, state = meeting.begin(
        lambda: _both(prepare, content), lambda both: _stance_of_load(both[0])
    )
    reader, planner = made.reader, made.planner
    if isinstance(reader, CloudStorageReader):
        planner = planner if planner is not None else CloudLoadPlanner(reader.checkpoint_id)
    if loads_together(reader, planner):
        assert isinstance(reader, CloudStorageReader)
        assert isinstance(planner, DefaultLoadPlanner)
        load_it = functools.partial(load_together, state, reader, planner, meeting)
        begun_anew(lambda: _reset_if_replaced(load_it, reader))
    else:
        load_it = functools.partial(
            state_dict_loader.load,
            state,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        rank = _rank(process_group, no_dist)
        begun_anew(
            lambda: _reset_if_replaced(lambda: _load_once(load_it, reader, meeting, rank), reader)
        )
    for key, value in list(state_dict.items()):
        if isinstance(value, Stateful):
            value.load_state_dict(state[str(key)])
        else:
            state_dict[key] = state[str(key)]


def _both(prepare: Callable[[], T], content: Callable[[], S]) -> tuple[T, S]:
    """What both return; the second is called even if the first raises.

    ``state_dict()`` of a sharded model may be a collective call, in which the other ranks would
    wait for one that has gone to tell them of its bad location.
    """
    try:
        made = prepare()
    except Exception:
        with contextlib.suppress(Exception):
            content()
        raise
    return made, content()


def _reset_if_replaced(load_it: Callable[[], None], reader: StorageReader) -> None:
    """Loads; if a writer has overtaken it, the reader may begin anew."""
    try:
        load_it()
    except CheckpointReplacedError:
        reader.reset()
        raise


def _load_once(
    load_it: Callable[[], None], reader: StorageReader, meeting: Meeting, rank: int
) -> None:
    """Loads with torch's loader; all ranks raise the same."""
    ours, uri = reader if isinstance(reader, CloudStorageReader) else None, _location(reader)
    try:
        with told_once():
            _each_alone(meeting, load_it, lambda: ours is not None and ours.reads_alone, uri)
    except (CheckpointException, RuntimeError) as exc:
        if _is_of_group(exc):
            break_off(meeting.group)
        raise _cause(exc, rank, uri) from exc


def exists(checkpoint_id: URILike, *, config: Config | None = None) -> bool:
    """Whether there is a committed checkpoint at a location, by one or two small requests.

    It is for scripts that resume if they can. Only the store's own word that there is none makes it
    False: a script that takes an outage for it would start anew over a good checkpoint. Ranks that
    ask by themselves may be told different things beside a writer; let one ask, and tell the rest.
    A model in safetensors files can be loaded, too, but is no checkpoint, and does not count.

    Args:
        checkpoint_id: ``s3://bucket/path`` or another location.
        config: Options.

    Raises:
        InvalidURIError: If it is no location.
        BucketNotFoundError: If there is no such bucket.
        StoreError: If the store refuses or stays unreachable.
    """
    uri = CheckpointURI.parse(checkpoint_id)
    config = config if config is not None else Config()
    return is_committed(open_store(uri, config), uri, Retrier(config.retry))


def _each_alone(
    meeting: Meeting, run: Callable[[], T], applies: Callable[[], bool], uri: str | None
) -> T:
    """Runs a save or load of torch; without collectives, too, its ranks raise alike.

    They meet only in a barrier at its end then. A rank that fails before would leave the others
    there until its time limit, and they would never hear of it. So it comes, too, and then all tell
    each other how they fared.

    Args:
        meeting: Of the ranks.
        run: What they do.
        applies: Whether that was without collectives.
        uri: The checkpoint, for messages.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        with errors_gathered_as(lambda error: portable(error, uri)):
            result = run()
    except Exception as error:
        if meeting.group is None or not applies() or _is_of_group(error):
            raise
        failure = error
        with contextlib.suppress(RuntimeError):  # told by the meeting, too
            dist.barrier(group=meeting.group)
    if meeting.group is not None and applies():
        meeting.hold(Stance(failure=failure), has_begun=True).raise_alike("without collectives")
    return cast(T, result)


def content_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with what its ``Stateful`` values return, which are asked one by one."""
    return {
        # tensors first: whether a class has the methods of a protocol is slow to tell
        key: value
        if type(value) in _TENSORS or not isinstance(value, Stateful)
        else value.state_dict()
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
    failure says so, or this is the rank that commits and it has not done so. After an interrupt or
    an uncertain commit the checkpoint may be visible, or become so.
    """
    committed = None
    if isinstance(writer, CloudStorageWriter):
        committed = writer.look_whether_committed() if _is_of_group(exc) else None
        certain = writer.committed is False
        if isinstance(exc, CheckpointException):
            certain = certain or all(
                isinstance(error, Exception) and not isinstance(error, CommitUnknownError)
                for error, _ in exc.failures.values()
            )
        if certain:
            writer.discard()
    if _is_of_group(exc):
        message = f"{_LOST}; {_WHAT_IS_COMMITTED[committed]}"
        return ProcessGroupError(message, committed=committed, uri=_location(writer), cause=exc)
    return _cause(exc, rank, _location(writer))


def _stance_of_save(
    writer: StorageWriter, planner: SavePlanner | None, use_collectives: bool
) -> Stance:
    """What ranks must have in common to save together: on it depends where they meet next.

    All else may differ: the options of the coordinator decide what is committed and on which
    condition, those of each rank how it sends its own objects.
    """
    keeps_plans = isinstance(planner, DefaultSavePlanner) and bool(planner._enable_plan_caching)
    location = _location(writer) if use_collectives else None
    return Stance(
        location=location or "",
        options=f"{use_collectives=} and enable_plan_caching={keeps_plans}",
    )


def _stance_of_load(made: ToLoad) -> Stance:
    reader = made.reader
    if not isinstance(reader, CloudStorageReader):
        return Stance()
    planner = made.planner or CloudLoadPlanner(reader.checkpoint_id)
    loader = "cloudckpt's" if loads_together(reader, planner) else "torch's, for other planners"
    return Stance(
        location=reader.checkpoint_id,
        options=f"shared_reads={reader.config.shared_reads!r} and the loader {loader}",
    )


def _location(storage: StorageWriter | StorageReader | None) -> str | None:
    if isinstance(storage, (CloudStorageWriter, CloudStorageReader)):
        return storage.checkpoint_id
    return None


def _cause(exc: CheckpointException | RuntimeError, rank: int, uri: str | None) -> BaseException:
    """The error that a user can act on; ``rank`` is that of this process."""
    if isinstance(exc, RuntimeError):
        if not _is_of_group(exc):
            return exc
        return ProcessGroupError(_LOST, uri=uri, cause=exc)
    failures = {rank: error for rank, (error, _) in exc.failures.items()}
    return one_error(failures, rank, f"in step {exc.args[0]!r}", uri)


def _is_of_group(exc: BaseException) -> bool:
    """Whether a collective raised it; gloo raises plain RuntimeErrors."""
    if isinstance(exc, dist.DistError):
        return True
    if not isinstance(exc, RuntimeError):
        return False
    traceback = exc.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    return traceback.tb_frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"


def _rank(process_group: dist.ProcessGroup | None, no_dist: bool) -> int:
    """The rank of this process as torch's saver and loader count it."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank(process_group)
