"""One background save: what it needs, and how it reports its outcome."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from cloudckpt.api import ToSave
from cloudckpt.background.stager import StagedState
from cloudckpt.dcp.failures import release_frames
from cloudckpt.dcp.writer import OurWriter
from cloudckpt.errors import (
    AsyncSaveError,
    ClosedError,
    CloudCheckpointError,
    SaveInProgressError,
    StagingError,
)
from cloudckpt.events import Event, Timeline, Transferred, subscribe

__all__ = ["Save", "SaveFuture", "as_ours"]

logger = logging.getLogger("cloudckpt")


class SaveFuture(Future[Metadata | None]):
    """The outcome of an asynchronous save.

    ``result()`` is the committed metadata, with the guarantees of :func:`cloudckpt.save`; or None
    if the save was skipped. A save can't be cancelled once requested, since other ranks take part
    in it: ``cancel()`` returns False.

    Attributes:
        skipped: Whether there was no save, since the previous one was still under way.
        number: This save's number among its saver's, the same on all ranks.
        transferred: What this rank sent, once it is done and has succeeded.
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
    """A save, from the call to its end.

    Attributes:
        number: This save's number in its saver.
        where: The destination, as events and errors name it.
        writer: Writes to it.
        redirect: Where to redirect the writer first, if not None.
        planner: As in torch.
        written: The save's outcome.
        staged: Done when the trainer may change its tensors; its result is None.
        is_staged_in_background: Whether ``staged`` may not be done when the call returns.
        state: The copy, if a custom stager made it.
        copy: The copy, if our stager made it.
        copying: The copy, if a custom stager is still making it.
        failure: Why this rank can't take part.
    """

    number: int
    where: str
    writer: OurWriter
    planner: SavePlanner
    redirect: str | None = None
    written: SaveFuture = field(default_factory=SaveFuture)
    staged: Future[None] = field(default_factory=Future)
    is_staged_in_background: bool = False
    state: dict[str, Any] | None = None
    copy: StagedState | None = None
    copying: Future[dict[str, Any]] | None = None
    failure: CloudCheckpointError | None = None
    _has_begun_writing: bool = False

    def __post_init__(self) -> None:
        self.written.number = self.number
        self.written.set_running_or_notify_cancel()
        self.staged.set_running_or_notify_cancel()  # waits on a cancelled one would not end

    @property
    def content(self) -> dict[str, Any]:
        """The copy."""
        if self.copy is not None:
            return self.copy.state_dict
        return self.state or {}

    def prepared(self) -> ToSave:
        """Where to save.

        Raises:
            CloudCheckpointError: If this rank can't take part.
        """
        if self.failure is not None:
            raise self.failure
        return ToSave(self.writer, self.planner)

    def stage(self, made: dict[str, Any] | Future[dict[str, Any]]) -> None:
        """Takes the copy that a custom stager has made, or is making.

        Raises:
            StagingError: If it has made something else.
        """
        if not isinstance(made, Future):
            self.state = _checked(made)
            self.staged.set_result(None)
            return
        self.copying, self.is_staged_in_background = made, True

        def pass_on(done: Future[Any]) -> None:
            try:
                done.result()
            except BaseException as error:  # noqa: BLE001 - of a stager which has cancelled it, too
                self.staged.set_exception(error)
            else:
                self.staged.set_result(None)

        made.add_done_callback(pass_on)

    def begin(self, *, commits: bool) -> None:
        """Has the writer begin, once: what is at the location from now on counts as there."""
        if not self._has_begun_writing:
            self.writer.reset(self.redirect)
            self.writer.begin(commits=commits)
            self._has_begun_writing = True

    def skip(self, *, is_stuck: bool) -> None:
        """Ends it before it has begun.

        Args:
            is_stuck: Whether the reason is that the save before it makes no progress.
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

    def run(self, carry_out: Callable[[Save], Any]) -> None:
        """Saves the copy once it is made, and sets the future's outcome."""
        if self.written.done():  # the thread has started after all, late
            return
        told = self.failure
        unsubscribe = subscribe(self.listen, progress=False)
        result, error = self._result_of(carry_out)
        unsubscribe()
        self._end()
        if error is None:
            self.written.set_result(result)
            return
        release_frames(error, apart_from=told)
        if isinstance(error, CloudCheckpointError) and error.action is None:
            error.action = f"save to {self.where}"
        self.written.set_exception(error)
        if not isinstance(error, SaveInProgressError):  # that is raised by save itself
            # nobody may ever read the future, as when the trainer ends
            ours = isinstance(error, CloudCheckpointError)
            logger.error("%s", error if ours else f"save to {self.where} failed: {error}")

    def _result_of(
        self, carry_out: Callable[[Save], Any]
    ) -> tuple[Any, None] | tuple[None, BaseException]:
        """The result, or the error; in a separate frame, which the error keeps alive."""
        try:
            concurrent.futures.wait([self.staged])
            if self.copying is not None:
                try:
                    self.state = _checked(self.copying.result())
                except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
                    self.failure = as_ours(error, "")
            return carry_out(self), None
        except BaseException as error:  # noqa: BLE001 - told by the future
            return None, error

    def refuse(self, cause: RuntimeError, *, closed: bool) -> None:
        """Drops the copy because there is no thread: :meth:`run` will only report the failure."""
        made: AsyncSaveError
        if closed:
            made = ClosedError(
                "the saver was closed, so it can't save: make a new one", uri=self.where
            )
        elif threading.main_thread().is_alive():
            made = AsyncSaveError(
                "can't start a thread for a background save; lower the number of threads, or "
                "raise the limit of the process (ulimit -u)",
                uri=self.where,
                cause=cause,
            )
        else:
            made = AsyncSaveError(
                "the interpreter is shutting down and can't start a background save; start the "
                "last one before the script ends, not in an atexit handler",
                uri=self.where,
            )
        made.__cause__ = cause
        self._end()
        self.failure = self.failure or made

    def listen(self, event: Event) -> None:
        """Records an event of this save."""
        if event.uri == self.where:
            self.written.timeline.add(event)

    def _end(self) -> None:
        """Releases the copy's memory."""
        self.state = self.copying = None
        if self.copy is not None:
            self.copy.release()


def _checked(made: object) -> dict[str, Any]:
    """What a custom stager has made, if it is a state dict: without one, nothing would be saved."""
    if not isinstance(made, Mapping):
        raise StagingError(
            f"the stager's stage() returned a {type(made).__name__}: return a copy of the state "
            "dict, or a future of it"
        )
    return cast(dict[str, Any], made)


def as_ours(error: BaseException, where: str) -> CloudCheckpointError:
    """The error, or one of ours that wraps it."""
    if isinstance(error, CloudCheckpointError):
        if error.uri is None and where:
            error.uri = where
        return error
    made: AsyncSaveError = StagingError(
        "the state dict could not be copied for a background save; see the cause, or use "
        "cloudckpt.save",
        cause=error,
    )
    made.uri = where or None
    made.__cause__ = error
    return made
