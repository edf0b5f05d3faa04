"""``AsyncSaver``: stages a state dict and saves the copy in the background."""

from __future__ import annotations

import concurrent.futures
import contextvars
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import api
from cloudckpt.background.groups import START_TIMEOUT, give_back, open_group
from cloudckpt.background.process import SaveProcess
from cloudckpt.background.save import Save
from cloudckpt.background.stager import Stager
from cloudckpt.config import BackgroundOptions
from cloudckpt.dcp.failures import release_frames
from cloudckpt.dcp.meeting import Consensus, Meeting, RankStatus, all_expected
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.errors import (
    AsyncSaveError,
    ClosedError,
    CloudCheckpointError,
    ConfigError,
    ProcessGroupError,
    SaveInProgressError,
)
from cloudckpt.events import Span, subscribe
from cloudckpt.stores.registry import checkpoint_location
from cloudckpt.uri import URILike
from cloudckpt.waiting import is_stuck

__all__ = ["AsyncSaver", "status_of"]


class AsyncSaver:
    """Saves one state dict after another in the background, in the order of the calls.

    The ranks that save together get their own process groups (gloo): the saver's collectives never
    mix with the trainer's, whatever backend those use. Constructing a saver is therefore a
    collective call.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        stager: AsyncStager | None = None,
        options: BackgroundOptions | None = None,
        tells_failures: bool = False,
        on_failure: Callable[[Collection[int], CloudCheckpointError], None] | None = None,
        have_met: bool = False,
    ) -> None:
        """Makes a saver; a collective call.

        Args:
            process_group: The ranks that save together; None for all.
            no_dist: Whether this process saves alone.
            kind: Whether a thread of the trainer or a separate process saves.
            stager: A custom stager, which the saver does not close; None for cloudckpt's own.
            options: The options of background saves; default: ``BackgroundOptions()``.
            tells_failures: Whether a save's failure is also raised by the next call of
                :meth:`save`, on all ranks, besides being set on its future.
            on_failure: With ``tells_failures``, a function that the next :meth:`save` or
                :meth:`wait` calls instead of raising the failure of an earlier save. Its arguments
                are the numbers of the failed saves and the error, the same on all ranks. If it
                raises an error, it must do so on all ranks.
            have_met: Whether the ranks come straight from a meeting.

        Raises:
            ConfigError: If this rank is not in the group, or ``kind`` is invalid, or ``kind`` or
                ``when_busy`` differ between ranks.
            ProcessGroupError: If the ranks do not meet within five minutes.
            SaveProcessError: If a saving process can't be started.
            AsyncSaveError: If a thread can't be started.
        """
        self._options = options if options is not None else BackgroundOptions()
        self._policy = self._options.when_busy or "wait"
        self._knows_no_ranks = not (no_dist or _has_ranks())
        self._tells_failures = tells_failures
        self._on_failure = on_failure
        self._group: dist.ProcessGroup | None = None
        self._meeting = Meeting(None)
        self._stager = stager
        self._own_stager: Stager | None = None
        self._process: SaveProcess | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-async")
        self._pid = os.getpid()
        self._number = 0
        # the save that all ranks begin, and that this rank has not given to its thread
        self._agreed: Save | None = None
        self._is_broken = False  # whether a collective of a save may still be in progress on a rank
        self._last: Save | None = None  # the last one given to the thread
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()  # set when closing is complete
        try:
            if not (no_dist or self._knows_no_ranks):
                self._group = self._new_group(process_group, have_met)
                # the saving thread uses the other group, and both may be in use at once
                self._meeting = Meeting(self._new_group(process_group, have_met=True))
            self._meeting.begin(lambda: self._make(kind), lambda _: status_of(kind, self._options))
        except BaseException:
            self.close()  # it could not be made on all ranks
            raise

    def _make(self, kind: AsyncCheckpointerType) -> None:
        try:
            self._thread.submit(int)  # starts the thread now, where the other ranks hear of it
        except RuntimeError as exc:
            raise _ended_error(False, "", exc) from exc
        if self._stager is None:
            self._own_stager = Stager(
                pin_memory={"auto": None, "on": True, "off": False}[self._options.pin_memory],
            )
        if kind == AsyncCheckpointerType.PROCESS:
            self._process = SaveProcess(self._options)

    def _new_group(self, parent: dist.ProcessGroup | None, have_met: bool) -> dist.ProcessGroup:
        with all_expected(parent if parent is not None else dist.group.WORLD):
            return open_group(
                parent,
                start_timeout=START_TIMEOUT,
                collective_timeout=_COLLECTIVE_TIMEOUT,
                have_met=have_met,
            )

    def save(
        self,
        state_dict: dict[str, Any],
        writer: OurWriter | Callable[[], OurWriter],
        *,
        checkpoint_id: URILike | None = None,
        planner: SavePlanner | None = None,
        stager: AsyncStager | None = None,
    ) -> Save:
        """Stages a state dict and begins to save the copy; a collective call.

        It returns when the copy is made, or only begun if the stager is asynchronous. Before the
        copy the ranks meet: if a rank can't begin, all ranks raise an error, and nothing is saved.
        The futures report later failures, on all ranks.

        Args:
            state_dict: The state dict; the ``state_dict()`` of each ``Stateful`` value is saved.
            writer: The writer; or its factory, which is called when it is this save's turn.
            checkpoint_id: The location to which the writer is redirected, once no earlier save uses
                it; None keeps its own.
            planner: As in torch.
            stager: A custom stager for this save only.

        Returns:
            The save, with its futures; it may have been skipped, as
            ``BackgroundOptions(when_busy=...)`` says.

        Raises:
            AsyncSaveError: If no thread can be started, as the interpreter is ending or a limit of
                the process is reached.
            ClosedError: If the saver was closed, or this process was forked from the saver's.
            ConfigError: If the saver was made before this rank's process group, or has a saving
                process, which can't work with this writer.
            DifferentCheckpointsError: If the locations differ between ranks.
            SaveInProgressError: If the previous save does not end within ``patience`` seconds on
                some rank.
            CloudCheckpointError: The failure of an earlier save, if this saver raises failures; or
                the error of ``writer``, on whichever rank it was raised.
        """
        if not self.belongs_here:
            raise ClosedError(
                f"this checkpointer belongs to process {self._pid}, from which this process was "
                "forked: make a new checkpointer in this process"
            )
        with self._lock:
            if self._closed:
                raise _ended_error(True, "", None)
        if self._knows_no_ranks and _has_ranks():
            raise ConfigError(
                "this checkpointer or manager was made before torch.distributed was initialized, "
                "and would save only this rank; make it afterwards, or with no_dist=True"
            )
        try:
            with all_expected(self._group):
                save = self._begin(writer, checkpoint_id, planner or CloudSavePlanner())
            if not save.written.skipped:
                self._hand_over(state_dict, save, stager)
            return save
        except BaseException as error:
            if (owed := self._agreed) is not None:
                # the other ranks would wait, or pair their save with the next
                owed.fail(error)
                self._submit(owed)
            raise

    def _hand_over(
        self,
        state_dict: dict[str, Any],
        save: Save,
        stager: AsyncStager | None,
    ) -> None:
        """Copies the state dict, and queues the save; if the copy fails, all ranks' saves fail.

        Raises:
            SaveInProgressError: If a save still reads the previous copy, and there is no
                ``on_failure``.
            CloudCheckpointError: The error of the save, if the saving thread has ended.
        """
        raised: BaseException | None = None
        unsubscribe = subscribe(save.listen, progress=False)
        try:
            content = api.content_of(state_dict, self._meeting.rank)
            state = content.for_planner(save.planner)
            with Span("stage", save.where, self._meeting.rank) as span:
                self._stage(state, save, stager or self._stager)
                span.nbytes = 0 if save.copy is None else save.copy.size
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            save.fail(error)
            if isinstance(error, SaveInProgressError) and self._on_failure is None:
                raised = error
        finally:
            unsubscribe()
        if save.failure is not None:
            release_frames(save.failure, apart_from=sys.exc_info()[1])
        raised = self._submit(save) or raised
        if raised is not None:
            raise raised
        save.is_reported = not self._tells_failures

    def _submit(self, save: Save) -> BaseException | None:
        """Queues a save that all ranks have begun for the saving thread.

        If the saving thread has ended, the save fails, and the calling thread tells the other
        ranks, which would otherwise wait for this rank.

        Returns:
            The save's error if the thread has ended; else None.
        """
        here = contextvars.copy_context()  # with the caller's span, the parent of the save's spans
        ended: BaseException | None = None
        try:
            with self._lock:
                self._thread.submit(here.run, save.run, self._carry_out)
                self._last = save
        except RuntimeError as exc:
            if save.failure is None:
                save.failure = _ended_error(self._closed, save.where, exc)
            # a closed saver may have given back its groups
            save.run(Save.prepared if self._closed else self._carry_out)
            ended = save.written.exception()
        self._agreed = None
        return ended

    def _begin(
        self,
        writer: OurWriter | Callable[[], OurWriter],
        checkpoint_id: URILike | None,
        planner: SavePlanner,
    ) -> Save:
        """Waits for this save's turn and meets the other ranks; the save may be skipped.

        Either all ranks begin the save, or none does.

        Raises:
            BaseException: See :meth:`Consensus.objection`. The failure of an earlier save is not
                raised if ``on_failure`` was given and does not raise it.
        """
        save: Save | None = None
        try:
            made, where = self._target_of(writer, checkpoint_id)
            redirect = None if checkpoint_id is None else str(checkpoint_id)
            save = Save(self._number + 1, where, made, planner, redirect)
            is_ours = isinstance(made, CloudStorageWriter)
            status = RankStatus(location=where if is_ours else "")
        except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
            status = RankStatus(failure=error)
        consensus = self._meet(status, save)
        is_skipped = consensus.any_is_busy
        if consensus.objection() is None and not is_skipped:
            self._agreed = save
            self._number += 1
        if self._last is not None and self._last.number in consensus.earlier:
            self._last.is_reported = True  # even if it has not ended yet: all ranks know of it
        try:
            consensus.raise_on_all_ranks()
        except CloudCheckpointError as error:
            if not consensus.earlier or self._on_failure is None:
                raise
            self._on_failure(consensus.earlier, error)
            return self._begin(writer, checkpoint_id, planner)
        assert save is not None  # otherwise it has raised
        if is_skipped:
            save.skip(is_stuck=consensus.any_is_stuck)
        return save

    def _meet(self, status: RankStatus, save: Save | None) -> Consensus:
        """Meets the other ranks, and decides with them whether this save is skipped.

        With ``when_busy="auto"``, they meet repeatedly until the previous save has ended on all
        ranks, or is stuck on some rank.

        Returns:
            The result of the last meeting.
        """
        deadline = time.monotonic() + self._options.patience
        pause = math.inf if self._policy == "wait" else 0.0
        while True:
            is_busy = True
            try:
                is_busy = not self._has_ended(pause, deadline)
                if save is not None and not is_busy:
                    save.begin(commits=self._meeting.rank == 0)
            except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
                status = RankStatus(failure=error)
            busy = status._replace(is_busy=is_busy, is_stuck=is_busy and self._is_stuck)
            if busy.failure is None and (failed := self._failed()) is not None:
                busy = busy._replace(earlier=failed.number, failure=failed.written.exception())
            consensus = self._meeting.exchange(busy)
            is_waiting = consensus.any_is_busy and not consensus.any_is_stuck
            if self._policy != "auto" or not is_waiting or consensus.objection() is not None:
                return consensus
            pause = _BETWEEN_MEETINGS

    def _has_ended(self, pause: float, deadline: float) -> bool:
        """Waits up to ``pause`` seconds for the previous save; returns whether it has ended.

        Raises:
            SaveInProgressError: If it has not ended at the deadline.
        """
        last = self._last
        if last is None:
            return True
        left = max(0.0, deadline - time.monotonic())
        concurrent.futures.wait([last.written], min(pause, left))
        if not last.written.done() and pause >= left:
            raise SaveInProgressError(
                f"the previous save has not finished within {self._options.patience:g} s: wait "
                "for it, save less often, or raise BackgroundOptions(patience=...)",
                uri=last.where,
            )
        return last.written.done()

    @property
    def _is_stuck(self) -> bool:
        """Whether this rank's requests fail or are not answered, here or in the saving process."""
        return is_stuck() or (self._process is not None and self._process.is_stuck)

    def _target_of(
        self, writer: OurWriter | Callable[[], OurWriter], checkpoint_id: URILike | None
    ) -> tuple[OurWriter, str]:
        """Returns the writer, and its destination as events and errors name it.

        Raises:
            ConfigError: If a saving process is used, and can't work with this writer.
        """
        made = writer if isinstance(writer, OurWriter) else writer()
        if isinstance(made, CloudStorageWriter):
            if checkpoint_id is None:
                return made, made.checkpoint_id
            return made, str(checkpoint_location(checkpoint_id))
        if self._process is not None:
            raise ConfigError(
                "a saving process works with a CloudStorageWriter, not with a "
                f"{type(made).__name__}; save in a thread (AsyncCheckpointerType.THREAD)"
            )
        return made, f"writer {id(made)}"

    def _failed(self) -> Save | None:
        """Returns the last save if it has failed and no call has raised its error; else None."""
        last = self._last
        if last is None or last.is_reported or not last.written.done():
            return None
        last.is_reported = last.written.exception() is None
        return None if last.is_reported else last

    def _stage(self, state: dict[str, Any], save: Save, stager: AsyncStager | None) -> None:
        """Copies a state dict, or begins the copy if the stager works in the background."""
        if stager is None:
            assert self._own_stager is not None
            save.copy = self._own_stager.begin(state, self._options.patience)
            save.staged.set_result(None)
            return
        save.stage(stager.stage(state))
        must_wait = getattr(stager, "should_synchronize_after_execute", False)
        if must_wait and not save.is_staged_in_background:
            stager.synchronize_staging()  # until then, the copy may be incomplete

    def _carry_out(self, save: Save) -> Metadata:
        """Saves a copy; runs in the saving thread."""
        try:
            return save.carry_out(self._group, self._process)
        except BaseException as error:
            if isinstance(error, ProcessGroupError) or not isinstance(error, Exception):
                self._is_broken = True
            raise

    def close(self) -> None:
        """Waits up to ``patience`` seconds for saves in progress, and releases memory and groups.

        A saving process is then ended, which fails unfinished saves; a thread continues. Failures
        are reported by the futures only. Closing again does nothing, or finishes an interrupted
        close. In a process forked from the saver's, it does nothing.
        """
        if not self.belongs_here:
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._closed = True
        futures = [] if self._last is None else [self._last.written]
        concurrent.futures.wait(futures, self._options.patience)
        idle = all(future.done() for future in futures)
        if self._process is not None:
            self._process.close(_SHUTDOWN_TIMEOUT if idle else 0)
            # saves that fail by this learn the reason
            concurrent.futures.wait(futures, _SHUTDOWN_TIMEOUT)
        self._thread.shutdown(wait=idle)
        if self._own_stager is not None:
            self._own_stager.close()
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        if idle and not self._is_broken and not self._meeting.is_broken:
            for group in {self._group, self._meeting.group}:
                if group is not None:
                    give_back(group)

    def raise_pending_failure(self) -> None:
        """Raises the failure of the last save, or calls ``on_failure`` if given.

        Does nothing if the failure was reported before, or if only the futures report failures
        (``tells_failures`` is False).

        Raises:
            CloudCheckpointError: The failure.
            SaveInProgressError: If the last save has not ended.
        """
        last = self._last
        if last is not None and not last.is_reported and not last.written.done():
            raise SaveInProgressError(
                f"the save has not finished within {self._options.patience:g} s: wait for its "
                "future, or increase BackgroundOptions(patience=...)",
                uri=last.where,
            )
        if (failed := self._failed()) is None:
            return
        failed.is_reported = True
        error = failed.written.exception()
        if self._on_failure is None or not isinstance(error, CloudCheckpointError):
            failed.written.result()
        else:
            self._on_failure([failed.number], error)

    def wait(self) -> None:
        """Waits for the last save, and raises its failure, or calls ``on_failure`` if given.

        Returns at once if only the futures report failures (``tells_failures`` is False), or the
        failure was reported before.

        Raises:
            CloudCheckpointError: The failure, if no call has raised it yet.
        """
        if self._last is not None and not self._last.is_reported:
            concurrent.futures.wait([self._last.written])
            self.raise_pending_failure()

    @property
    def is_idle(self) -> bool:
        """Whether no save is in progress."""
        return self._last is None or self._last.written.done()

    @property
    def belongs_here(self) -> bool:
        """Whether this process made the saver, and was not forked from the process that did."""
        return self._pid == os.getpid()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_BETWEEN_MEETINGS = 0.1  # seconds
_COLLECTIVE_TIMEOUT = 1800.0  # seconds that a rank of a save waits for others
_SHUTDOWN_TIMEOUT = 10.0  # seconds for an idle saving process to end


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ended_error(closed: bool, where: str, cause: RuntimeError | None) -> AsyncSaveError:
    """Returns the error of a save that can't run, as the saver is closed or no thread can start."""
    error = AsyncSaveError(
        "no thread can be started for a background save. If the interpreter is shutting down, "
        "start the last save before the script ends, not in an atexit handler; else lower the "
        "number of threads, or raise the limit of the process (ulimit -u)",
        cause=cause,
    )
    if closed:
        error = ClosedError("the checkpointer was closed: make a new one")
    error.uri, error.__cause__ = where or None, cause
    return error


def status_of(kind: AsyncCheckpointerType, options: BackgroundOptions) -> RankStatus:
    """Returns a status with the settings on which ranks must agree to share a saver.

    Raises:
        ConfigError: If ``kind`` is not an ``AsyncCheckpointerType``.
    """
    given: object = kind
    if not isinstance(given, AsyncCheckpointerType):
        raise ConfigError(
            f"async_checkpointer_type={given!r} is not valid: give "
            "AsyncCheckpointerType.PROCESS or AsyncCheckpointerType.THREAD, of "
            "torch.distributed.checkpoint.state_dict_saver"
        )
    return RankStatus(options=(str(kind), f"when_busy={options.when_busy!r}"))
