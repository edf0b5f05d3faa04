"""One background save: its inputs, and how it reports its outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from cloudckpt import api
from cloudckpt.background.groups import exists
from cloudckpt.background.process import ProcessSender, SaveProcess
from cloudckpt.background.stager import StagedState
from cloudckpt.checkpoint.shard import send_here
from cloudckpt.dcp.failures import release_frames
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.errors import (
    CloudCheckpointError,
    ProcessGroupError,
    SaveInProgressError,
    StagingError,
)
from cloudckpt.events import Event, Timeline, Transferred, subscribe

__all__ = ["Save", "SaveFuture"]

logger = logging.getLogger("cloudckpt")


class SaveFuture(Future[Metadata | None]):
    """The future of an asynchronous save.

    ``result()`` returns the committed metadata, with the guarantees of :func:`cloudckpt.save`; or
    None if the save was skipped. A save can't be cancelled once requested, since other ranks take
    part in it: ``cancel()`` returns False.

    Attributes:
        skipped: Whether nothing was saved, since the previous save was still in progress.
        number: This save's number among those of its saver, the same on all ranks; -1 if skipped.
        transferred: The bytes and requests of this rank, once the save has succeeded; None before,
            and for a writer that is not a CloudStorageWriter.
        timeline: The events of this save on this rank.
    """

    skipped = False
    number = -1
    transferred: Transferred | None = None

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()


@dataclass(eq=False)
class Save:
    """A background save, from the call that starts it to its outcome.

    Attributes:
        number: This save's number among those of its saver, from 1.
        where: The destination, as events and errors name it.
        writer: The writer of the checkpoint.
        planner: As in torch.
        redirect: The location to which the writer is redirected first; None to keep its own.
        written: The future of the save's outcome.
        staged: Done when the trainer may change its tensors; its result is None.
        is_staged_in_background: Whether the call may return before ``staged`` is done.
        copy: The copy, if cloudckpt's stager made it; else None.
        made: The copy that a custom stager has made; else None.
        failure: The error that keeps this rank from taking part in the save; None if it can.
        is_reported: Whether no later call raises the save's failure, because a call has raised it
            already, or only the future reports it.
    """

    number: int
    where: str
    writer: OurWriter
    planner: SavePlanner
    redirect: str | None = None
    written: SaveFuture = field(default_factory=SaveFuture)
    staged: Future[None] = field(default_factory=Future)
    is_staged_in_background: bool = False
    copy: StagedState | None = None
    made: dict[str, Any] | None = None
    failure: CloudCheckpointError | None = None
    is_reported: bool = True
    _has_begun_writing: bool = False

    def __post_init__(self) -> None:
        self.written.number = self.number
        self.written.set_running_or_notify_cancel()
        self.staged.set_running_or_notify_cancel()  # waiting on a cancelled future would not end

    def prepared(self) -> api.ToSave:
        """Returns the writer and the planner of the save.

        Raises:
            CloudCheckpointError: If this rank can't take part.
        """
        if self.failure is not None:
            raise self.failure
        return api.ToSave(self.writer, self.planner)

    def fail(self, error: BaseException) -> None:
        """Records the error that keeps this rank from taking part in the save.

        The future ``staged`` also gets this error, unless it is done.
        """
        self.failure = _as_ours(error, self.where)
        if not self.staged.done():
            self.staged.set_exception(self.failure)

    def stage(self, made: dict[str, Any] | Future[dict[str, Any]]) -> None:
        """Takes the copy that a custom stager has made, or is making.

        Raises:
            StagingError: If the stager returned anything but a mapping or a future.
        """
        if not isinstance(made, Future):
            self.made = _checked(made)
            self.staged.set_result(None)
            return
        self.is_staged_in_background = True

        def take(done: Future[Any]) -> None:
            try:
                self.made = _checked(done.result())
            except BaseException as error:  # noqa: BLE001 - of a stager which has cancelled it, too
                self.staged.set_exception(error)
            else:
                self.staged.set_result(None)

        made.add_done_callback(take)

    def begin(self, *, commits: bool) -> None:
        """Starts the writer, unless it was started before.

        The commit may then replace only the checkpoint that is at the location now.

        Args:
            commits: Whether this rank commits.
        """
        if not self._has_begun_writing:
            self.writer.reset(self.redirect)
            self.writer.begin(commits=commits)
            self._has_begun_writing = True

    def skip(self, *, is_stuck: bool) -> None:
        """Marks the save, which has not begun, as skipped, and completes its futures.

        Args:
            is_stuck: Whether the reason is that the previous save makes no progress.
        """
        if is_stuck:
            logger.warning(
                "the save to %s was skipped: the store fails or does not answer, and the "
                "previous save is still in progress; the next save is tried as usual",
                self.where,
            )
        self.written.number = -1
        self.written.skipped = True
        self.staged.set_result(None)
        self.written.set_result(None)

    def carry_out(self, group: dist.ProcessGroup | None, process: SaveProcess | None) -> Metadata:
        """Saves the copy, together with the other ranks; returns the checkpoint's metadata.

        Args:
            group: The ranks; None if this process saves alone.
            process: The saving process; None to send from this process.

        Raises:
            ProcessGroupError: If the group was destroyed before, or a rank died.
            CloudCheckpointError: The other errors of :func:`cloudckpt.save`.
        """
        writer = self.writer if isinstance(self.writer, CloudStorageWriter) else None
        sender: ProcessSender | None = None
        if writer is not None and process is not None:
            sender = process.sender(None if self.copy is None else self.copy.arena)
            writer.sender = sender
        is_known = True
        try:
            if group is not None and not exists(group):
                raise ProcessGroupError(  # torch would save each rank alone, as if it were all
                    "the process group was destroyed before this save began; wait for all "
                    "saves before you destroy it",
                    uri=self.where,
                    committed=False,
                )
            content = self.made if self.copy is None else self.copy.state_dict
            metadata = api.save_prepared(
                cast(dict[str, Any], content),
                self.prepared,
                self.where,
                process_group=group,
                no_dist=group is None,
            )
        except ProcessGroupError as error:
            is_known = error.committed is not None
            raise
        finally:
            if sender is not None and is_known:
                sender.settle()
            if isinstance(self.planner, DefaultSavePlanner):
                self.planner.state_dict = {}  # the planner would keep the copy until its next plan
            if writer is not None:
                writer.sender = send_here
        if writer is not None:
            self.written.transferred = writer.transferred
        return metadata

    def run(self, carry_out: Callable[[Save], Any]) -> None:
        """Waits for the copy, calls ``carry_out`` to save it, and completes :attr:`written`."""
        own_failure = self.failure
        unsubscribe = subscribe(self.listen, progress=False)
        result, error = self._result_of(carry_out)
        unsubscribe()
        self._end()
        if error is None:
            self.written.set_result(result)
            return
        release_frames(error, apart_from=own_failure)
        if isinstance(error, CloudCheckpointError) and error.action is None:
            error.action = f"save to {self.where}"
        self.written.set_exception(error)
        if not isinstance(error, SaveInProgressError):  # save itself raises that
            # the future may never be read, as when the trainer ends
            ours = isinstance(error, CloudCheckpointError)
            logger.error("%s", error if ours else f"save to {self.where} failed: {error}")

    def _result_of(
        self, carry_out: Callable[[Save], Any]
    ) -> tuple[Any, None] | tuple[None, BaseException]:
        """Waits for the copy and calls ``carry_out``.

        Returns:
            The result of ``carry_out`` and None; or None and the error that was raised.
        """
        try:
            unstaged = self.staged.exception()  # waits for the copy
            if self.failure is None and unstaged is not None:
                self.fail(unstaged)
            return carry_out(self), None
        except BaseException as error:  # noqa: BLE001 - set on the future
            return None, error

    def listen(self, event: Event) -> None:
        """Records an event in the save's timeline, if it is about the save's destination."""
        if event.uri == self.where:
            self.written.timeline.add(event)

    def _end(self) -> None:
        """Releases the copy's memory."""
        self.made = None
        if self.copy is not None:
            self.copy.release()


def _checked(made: Any) -> dict[str, Any]:
    """Returns a custom stager's copy, after checking that it is a mapping.

    Raises:
        StagingError: If the copy is not a mapping.
    """
    if not isinstance(made, Mapping):
        raise StagingError(
            f"the stager's stage() returned a {type(made).__name__}: return a copy of the state "
            "dict, or a future of it"
        )
    return cast(dict[str, Any], made)


def _as_ours(error: BaseException, where: str) -> CloudCheckpointError:
    """Returns an error of cloudckpt unchanged; for any other error, a StagingError caused by it.

    Args:
        error: The error.
        where: The destination, which becomes the ``uri`` of an error that has none.
    """
    if isinstance(error, CloudCheckpointError):
        if error.uri is None and where:
            error.uri = where
        return error
    made = StagingError(
        "the state dict could not be built or copied for a background save; see the cause",
        uri=where or None,
        cause=error,
    )
    made.__cause__ = error
    return made
