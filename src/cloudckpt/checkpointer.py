"""Checkpointers: objects that save and load the checkpoints of a job, at once or in the
background.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from typing_extensions import Self

from cloudckpt import api
from cloudckpt.background.async_save import close_async_savers
from cloudckpt.background.save import SaveFuture
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.background.stager import Stager
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.load_plan import CloudLoadPlanner, EverythingPlanner
from cloudckpt.dcp.meeting import collective
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.report import LoadReport
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.dcp.writer import CloudStorageWriter, CommitHook
from cloudckpt.errors import ClosedError, CloudCheckpointError, ConfigError
from cloudckpt.uri import URILike

__all__ = [
    "AsyncCheckpointer",
    "Checkpointer",
    "CheckpointerConfig",
    "CommitHook",
    "SaveFuture",
    "Stager",
    "SyncCheckpointer",
    "close_async_savers",
    "make_async_checkpointer",
    "make_sync_checkpointer",
]

logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """The configuration of a checkpointer.

    Attributes:
        config: Options for saving and loading.
        process_group: The ranks that save and load together; None for all.
        no_dist: Whether this process saves and loads alone.
        kind: Whether an asynchronous checkpointer sends its saves from a separate process, or from
            a thread of the trainer.
        stager: Copies the state for an asynchronous save; None for cloudckpt's own.
        planner: A class or function that creates the planner, called once for all saves.
        commit_hook: Called on the coordinator around each commit.
        trust_pickle: Whether pickles in checkpoints may run arbitrary code.
    """

    config: Config = field(default_factory=Config)
    process_group: dist.ProcessGroup | None = None
    no_dist: bool = False
    kind: AsyncCheckpointerType = AsyncCheckpointerType.PROCESS
    stager: AsyncStager | None = None
    planner: Callable[[], SavePlanner] = CloudSavePlanner
    commit_hook: CommitHook | None = None
    trust_pickle: bool = False


def checked(given: object) -> CheckpointerConfig:
    """Returns a checkpointer's configuration, after checking its type.

    Raises:
        ConfigError: If it is not a CheckpointerConfig, or its ``config`` is not a Config.
    """
    if not isinstance(given, CheckpointerConfig):
        raise ConfigError(
            f"CheckpointerConfig expected, not {type(given).__name__}: write "
            "CheckpointerConfig(config=...)"
        )
    config_or_default(given.config)
    return given


class ClosedAtExit(ABC):
    """A context manager that calls :meth:`close` on exit.

    If the block has raised an error, an error of :meth:`close` is logged, and not raised.
    """

    @abstractmethod
    def close(self) -> None:
        """Ends the use of the object, and releases what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CloudCheckpointError as failure:
            if error is None:
                raise
            logger.error("%s.close() failed after another error: %s", type(self).__name__, failure)


class Checkpointer(ClosedAtExit):
    """Saves and loads the checkpoints of a job; use it as a context manager.

    Saving and loading are collective calls: all ranks of the process group make them in the same
    order.

    Attributes:
        load_report: The report of the last load; None before the first.
    """

    def __init__(self, config: CheckpointerConfig) -> None:
        self._config = checked(config)
        given: object = config.planner
        if not callable(given):
            raise ConfigError(
                f"planner={given!r}: give a class or a function that makes a planner; to use "
                "a planner for one save only, pass it to save()"
            )
        self._planner = config.planner()
        self._closed = False
        self.load_report: LoadReport | None = None

    @abstractmethod
    def save(
        self, uri: URILike, state_dict: dict[str, Any], **kwargs: Any
    ) -> tuple[Future[None], SaveFuture] | None:
        """Saves a state dict to a URI.

        Args:
            uri: The location of the checkpoint: ``s3://bucket/run/step-1000`` or another.
            state_dict: The state dict; of ``Stateful`` values, their ``state_dict()`` is saved.
            **kwargs: ``planner``: used instead of the configured planner; ``notes``: kept with the
                checkpoint, or a function that returns them; ``base``: the earlier checkpoint of an
                incremental save, as in the writer; ``keep_existing``: whether a checkpoint at the
                location must not be replaced, whatever the options say; ``is_first``: whether
                values that a load would refuse fail the save, if ``unloadable`` is ``"auto"``.

        Returns:
            None if the checkpoint is committed; otherwise two futures: the first is done when the
            trainer may change its tensors, the second when the save has ended.

        Raises:
            ClosedError: If the checkpointer was closed.
            CloudCheckpointError: As in :func:`cloudckpt.save`; an asynchronous checkpointer also
                raises the failure of the previous save.
        """

    @collective("Checkpointer.load")
    def load(
        self,
        uri: URILike,
        state_dict: dict[str, Any] | None = None,
        *,
        default_map_location: str | torch.device | None = None,
        strict: bool = False,
        leave_misfits: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint, on all ranks; sharded tensors are resharded.

        Args:
            uri: The location of the checkpoint.
            state_dict: The entries to load, in place: only the bytes that its tensors need are
                read. None loads the whole checkpoint, as whole tensors on every rank.
            default_map_location: The device of the tensors created if there is no ``state_dict``;
                by default the host.
            strict: Whether each key of ``state_dict`` must be in the checkpoint. If False, missing
                keys keep their values and are named in :attr:`load_report`.
            leave_misfits: Whether, without ``strict``, a tensor whose shape differs from the
                checkpoint's keeps its values and is reported too; if False, it is an error, as in
                torch.

        Returns:
            The state dict.

        Raises:
            MissingKeyError: If ``strict`` and keys are missing; the message names them.
            ShapeMismatchError: If a tensor has another shape than in the checkpoint, unless
                ``leave_misfits`` applies.
            CheckpointNotFoundError: If there is no committed checkpoint.
            ClosedError: If the checkpointer was closed.
            ConfigError: If ``default_map_location`` is given with a ``state_dict``, or ``strict``
                without one.
            CloudCheckpointError: As in :func:`cloudckpt.load`.
        """
        self._check_open()
        everything: list[tuple[CloudStorageReader, EverythingPlanner]] = []

        def prepare() -> api.ToLoad:
            reader = CloudStorageReader(
                uri, config=self._config.config, trust_pickle=self._config.trust_pickle
            )
            location = reader.checkpoint_id
            if state_dict is not None:
                if default_map_location is not None:
                    raise ConfigError(
                        "default_map_location= and a state_dict contradict each other, as tensors "
                        "are loaded into those of the state_dict: leave one of them out"
                    )
                is_strict = strict or not leave_misfits
                planner = CloudLoadPlanner(location, strict=is_strict, partial=not strict)
                return api.ToLoad(reader, planner)
            if strict:
                raise ConfigError(
                    "strict=True compares the keys of a state_dict, and none is given: pass "
                    "state_dict=, or leave strict= out"
                )
            everything.append((reader, EverythingPlanner(location, default_map_location)))
            return api.ToLoad(*everything[0])

        self.load_report = api.load_prepared(
            {} if state_dict is None else state_dict,
            prepare,
            uri,
            process_group=self._config.process_group,
            no_dist=self._config.no_dist,
        )
        if state_dict is not None:
            return state_dict
        [(reader, planner)] = everything
        return planner.content(reader.structure)

    def wait(self) -> None:
        """Waits until all saves are committed, or have failed.

        Raises:
            ClosedError: If the checkpointer was closed.
            CloudCheckpointError: The first failure that no earlier call has raised.
        """
        self._check_open()

    def close(self) -> None:
        """Waits for saves in progress, and releases memory and processes."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the checkpointer was closed: make a new one")

    def _writer(
        self, uri: URILike, state_dict: object, kwargs: dict[str, Any]
    ) -> CloudStorageWriter:
        self._check_open()
        known = {"planner", "notes", "base", "keep_existing", "is_first"}
        if unknown := sorted(set(kwargs) - known):
            raise ConfigError(f"save() accepts only the keywords {sorted(known)}, not {unknown}")
        if isinstance(state_dict, (str, os.PathLike)):
            raise ConfigError(
                "save() needs the location as its first argument: save(uri, state_dict)"
            )
        hook = self._config.commit_hook
        notes = kwargs.get("notes")
        if callable(notes):
            notes = notes()
        config, base = config_or_default(self._config.config), kwargs.get("base")
        if kwargs.get("keep_existing"):
            config = replace(config, overwrite=False)
        if kwargs.get("is_first") and config.unloadable == "auto":
            config = replace(config, unloadable="refuse")
        return CloudStorageWriter(uri, config=config, commit_hook=hook, notes=notes, base=base)


class SyncCheckpointer(Checkpointer):
    """Saves synchronously: when :meth:`save` returns, the checkpoint is committed."""

    @collective("SyncCheckpointer.save")
    def save(self, uri: URILike, state_dict: dict[str, Any], **kwargs: Any) -> None:
        def prepare() -> api.ToSave:
            writer = self._writer(uri, state_dict, kwargs)
            return api.ToSave(writer, kwargs.get("planner") or self._planner)

        api.save_prepared(
            state_dict,
            prepare,
            uri,
            process_group=self._config.process_group,
            no_dist=self._config.no_dist,
        )


class AsyncCheckpointer(Checkpointer):
    """Saves in the background: in a process beside the trainer, or in a thread of the trainer.

    The process and the memory of the copy are kept from one save to the next. Making the
    checkpointer starts the process, which becomes ready while the trainer goes on.
    """

    @collective("AsyncCheckpointer()")
    def __init__(
        self,
        config: CheckpointerConfig,
        *,
        on_failure: Callable[[Collection[int], CloudCheckpointError], None] | None = None,
        when_busy: Literal["wait", "auto"] = "wait",
    ) -> None:
        """Creates a checkpointer, on all ranks, and starts its saving process or thread.

        Args:
            config: The configuration.
            on_failure: Called instead of raising the failure of an earlier save, on all ranks
                alike, with the numbers of the saves that failed (:attr:`SaveFuture.number`) and the
                error. An exception that it raises is raised by the checkpointer.
            when_busy: What a save does while an earlier one is in progress: ``"wait"`` for it; or
                with ``"auto"``, wait for as long as it makes progress, and otherwise leave this
                save out. ``BackgroundOptions(when_busy=...)`` takes precedence.

        Raises:
            ConfigError: If ``config`` or a field of it is not valid; if ``kind`` or ``when_busy``
                differs between ranks; or if this rank is not in the process group.
            ProcessGroupError: If the ranks do not meet within five minutes.
            SaveProcessError: If the saving process can't be started.
            AsyncSaveError: If the saving thread can't be started.
        """
        super().__init__(config)
        options = config.config.background
        self._saver = AsyncSaver(
            process_group=config.process_group,
            no_dist=config.no_dist,
            kind=config.kind,
            stager=config.stager,
            options=replace(options, when_busy=options.when_busy or when_busy),
            tells_failures=True,
            on_failure=on_failure,
        )
        self._ended = False

    @collective("AsyncCheckpointer.save")
    def save(
        self, uri: URILike, state_dict: dict[str, Any], **kwargs: Any
    ) -> tuple[Future[None], SaveFuture]:
        self._check_open()

        def prepare() -> CloudStorageWriter:
            return self._writer(uri, state_dict, kwargs)

        planner = kwargs.get("planner") or self._planner
        pending = self._saver.save(state_dict, prepare, planner=planner)
        return pending.staged, pending.written

    def wait(self) -> None:
        super().wait()
        self._saver.wait()

    def close(self) -> None:
        """Waits for saves in progress, and raises the first failure that no call has raised yet.

        A second call does nothing, or finishes a close that was interrupted. In a process forked
        from the checkpointer's, it does nothing.

        Raises:
            CloudCheckpointError: If a save failed and no call has raised its error.
            SaveInProgressError: If a save has not ended within ``patience`` seconds; its future
                reports how it ends.
        """
        super().close()
        if self._ended or not self._saver.belongs_here:
            return
        self._saver.close()
        self._ended = True
        self._saver.raise_pending_failure()


def make_sync_checkpointer(config: CheckpointerConfig | None = None) -> SyncCheckpointer:
    """Returns a checkpointer that saves synchronously.

    Args:
        config: The configuration; default: ``CheckpointerConfig()``.

    Raises:
        ConfigError: If the configuration or its ``config`` has another class, or its ``planner``
            is not callable.
    """
    return SyncCheckpointer(config if config is not None else CheckpointerConfig())


def make_async_checkpointer(config: CheckpointerConfig | None = None) -> AsyncCheckpointer:
    """Returns a checkpointer that saves in the background; a collective call.

    Args:
        config: The configuration; default: ``CheckpointerConfig()``.

    Raises:
        CloudCheckpointError: As :class:`AsyncCheckpointer`.
    """
    return AsyncCheckpointer(config if config is not None else CheckpointerConfig())
