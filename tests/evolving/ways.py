"""By what a state is saved: each way of the public API, kept for the time of a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.checkpoint.object_plan import Destination
from cloudckpt.checkpoint.objects import WrittenObject, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.shard import Layout, send_here
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig, CommitHook, SaveFuture
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import CloudCheckpointError, IncompleteSaveError, StoreError
from cloudckpt.runs import adopting
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import clear_away
from dcp.places import Place

__all__ = ["KEPT_STEPS", "Ways"]

PATIENCE = 60.0  # seconds that a save may take
KEPT_STEPS = 2  # of a manager
_KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


class Ways:
    """What saves; checkpointers and managers are made when they are first asked for.

    Args:
        root: Beneath which all is saved.
    """

    def __init__(self, root: Place) -> None:
        self._root = root
        self._open = contextlib.ExitStack()
        self._open.callback(cloudckpt.checkpointer.close_async_savers)
        self._made: dict[object, Any] = {}

    def place_of(self, to: str, by: str, step: int, *, incremental: bool) -> Place:
        """Where a save goes, and with which options."""
        root = self._root.having(incremental=incremental)
        return root.at(f"{_run(by, root)}/step-{step}" if by.endswith("manager") else to)

    def save(self, by: str, state: dict[Any, Any], place: Place, step: int) -> Callable[[], None]:
        """Begins a save; what it returns waits for the end. Both raise what has failed."""
        kind = by.split()[-1] if by.startswith("async") else by.split()[0]
        given: dict[str, Any] = {"checkpoint_id": place.uri, "config": place.config}
        if by == "save":
            cloudckpt.save(state, **given)
        elif by in _PLANNERS:
            cloudckpt.save(state, planner=_PLANNERS[by](), **given)
        elif by == "by one planner":
            cloudckpt.save(state, planner=self._kept(by, CloudSavePlanner), **given)
        elif by == "by one writer":
            writer = self._kept((by, place.config), place.writer)
            cloudckpt.save(state, checkpoint_id=place.uri, storage_writer=writer)
        elif by == "adopted":
            _adopted(state, place)
        elif by == "dcp.save":
            dcp.save(state, storage_writer=place.writer())
        elif by == "dcp.save of a URI":
            cloudckpt.install(config=place.config)
            try:
                dcp.save(state, checkpoint_id=place.uri)
            finally:
                cloudckpt.uninstall()
        elif by.startswith("async"):
            future = cloudckpt.async_save(state, async_checkpointer_type=_KINDS[kind], **given)
            return lambda: future.result(PATIENCE)
        elif by.endswith("manager"):
            manager = self._once((by, place.config), lambda: self._manager(by, kind, place))
            manager.save(step, state, force=True)
            return manager.wait_until_finished
        else:
            checkpointer = self._once((by, place.config), lambda: _checkpointer(kind, place))
            saved = checkpointer.save(place.uri, state)
            if saved is not None:
                return lambda: _end(saved[1], checkpointer)
        return lambda: None

    def close(self) -> None:
        """Ends all of them, on all ranks."""
        self._open.close()

    def _kept(self, key: object, make: Callable[[], Any]) -> Any:
        return self._made.setdefault(key, make())

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = self._open.enter_context(make())
        return self._made[key]

    def _manager(self, by: str, kind: str, place: Place) -> CheckpointManager:
        manager = CheckpointManager(
            self._root.at(_run(by, place)).uri,
            max_to_keep=KEPT_STEPS,
            asynchronous=kind in _KINDS,
            checkpointer=_config(kind, place),
        )
        manager.restore({})  # the job goes on with the line of the one before
        return manager


def _run(by: str, place: Place) -> str:
    """That of a manager; two in one would be two jobs."""
    return by.replace(" ", "-") + "-of-changes" * place.config.incremental


class _OwnPlanner(DefaultSavePlanner):
    """A planner of a user's own, whose saves are planned each time."""


_PLANNERS: Mapping[str, Callable[[], SavePlanner]] = {
    "by torch's planner": DefaultSavePlanner,
    "by a planner of one's own": _OwnPlanner,
    "by cached plans": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "to the lowest rank": lambda: CloudSavePlanner(dedup_save_to_lowest_rank=True),
}


class _EndedError(CloudCheckpointError):
    """Stands for the end of the trainers, just before the commit."""


class _Ending(CommitHook):
    def before_commit(self, uri: str, metadata: object) -> None:
        raise _EndedError("here the trainers end")


def _adopted(state: dict[Any, Any], place: Place) -> None:
    """A save whose trainers end before the commit, and which another job commits.

    Saved as ever is what is to replace something, and what no saving process can say.
    """
    if not _by_first(lambda: cloudckpt.exists(place.uri, config=place.config)):
        writer = place.writer()
        writer.commit_hook = _Ending()
        writer.sender = _SendAndLeave()
        discard, asked = writer.discard, list[bool]()
        writer.discard = lambda: asked.append(True)  # who has ended deletes nothing
        try:
            cloudckpt.save(state, storage_writer=writer)
        except _EndedError:
            if _by_first(lambda: _is_adopted(place)):
                return
        except BaseException:
            if asked:
                discard()
            raise
    cloudckpt.save(state, checkpoint_id=place.uri, config=place.config)


def _by_first(look: Callable[[], bool]) -> bool:
    """What the first rank finds."""
    told: list[bool | BaseException] = [False]
    if dist.get_rank() == 0:
        try:
            told = [look()]
        except CloudCheckpointError as error:
            told = [error]
    dist.broadcast_object_list(told)
    if isinstance(told[0], BaseException):
        raise told[0]
    return told[0]


def _is_adopted(place: Place) -> bool:
    try:
        adopting.adopt(place.uri, wait=0.0, config=place.config)
    except IncompleteSaveError as error:
        if "no saving process has left anything" not in str(error):
            raise
        cloudckpt.sweep(place.uri, older_than=0.0, config=place.config)
        return False
    return True


class _SendAndLeave:
    """Sends as a saving process does whose trainer ends before the commit."""

    outlives = True

    def __call__(
        self,
        destination: Destination,
        store: ObjectStore,
        layout: Layout,
        stats: TransferStats,
        pending: Pending | None,
    ) -> tuple[WrittenObject, ...]:
        objects = send_here(destination, store, layout, stats)
        if pending is not None:
            data = memoryview(layout.pending(pending).finished(objects).to_bytes())
            name = pending_name(destination.rank, destination.attempt)
            checksum = store.capabilities.checksum.of(data)
            try:
                store.put(destination.uri.key(name), [data], checksum=checksum)
            except StoreError:
                keys = [destination.uri.key(one) for one in (*(o.name for o in objects), name)]
                clear_away(store, keys, destination.config.retry)
                raise
        return objects


def _checkpointer(kind: str, place: Place) -> Any:
    if kind in _KINDS:
        return cloudckpt.checkpointer.make_async_checkpointer(_config(kind, place))
    return cloudckpt.checkpointer.make_sync_checkpointer(_config(kind, place))


def _config(kind: str, place: Place) -> CheckpointerConfig:
    return CheckpointerConfig(
        config=place.config, kind=_KINDS.get(kind, AsyncCheckpointerType.THREAD)
    )


def _end(future: SaveFuture, checkpointer: AsyncCheckpointer) -> None:
    try:
        future.result(PATIENCE)
    finally:
        with contextlib.suppress(CloudCheckpointError):  # it tells the same once more
            checkpointer.wait()
