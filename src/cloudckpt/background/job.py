"""One asynchronous save: what it needs, and what is told of it."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt.api import ToSave
from cloudckpt.background.stager import StagedState
from cloudckpt.errors import AsyncSaveError, ClosedError, CloudCheckpointError, StagingError
from cloudckpt.events import Event, Timeline
from cloudckpt.transfer.stats import Transferred

__all__ = [
    "PendingSave",
    "PickledResult",
    "SaveFuture",
    "SaveJob",
    "as_ours",
    "never_to_begin",
    "pass_on",
    "skipped",
]


class SaveFuture(Future[Metadata | None]):
    """The outcome of an asynchronous save.

    ``result()`` is the committed metadata, with the guarantees of :func:`cloudckpt.save`; or None
    if the save was skipped. A save can't be cancelled once it was asked for, since other ranks take
    part in it: ``cancel()`` returns False.

    Attributes:
        skipped: Whether there was no save, because the one before was still under way.
        transferred: What this rank sent, once it is done and has succeeded.
        timeline: The events of this save on this rank.
    """

    skipped = False
    transferred: Transferred | None = None

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()

    def result(self, timeout: float | None = None) -> Metadata | None:
        content: Any = super().result(timeout)
        if isinstance(content, PickledResult):
            return content.load()
        return cast("Metadata | None", content)


class PickledResult:
    """Metadata as the saving process sent it: of no use to most trainers, and slow to unpickle."""

    def __init__(self, data: bytes) -> None:
        """
        Args:
            data: A pickle of the pickled metadata, and of what was sent.
        """
        self._pickled: bytes
        self._sent: Transferred | None
        self._pickled, self._sent = pickle.loads(data)  # noqa: S301 - from our own child
        self._metadata: Metadata | None = None

    def load(self) -> Metadata:
        """The metadata."""
        if self._metadata is None:
            self._metadata = pickle.loads(self._pickled)  # noqa: S301 - as above
        assert self._metadata is not None
        return self._metadata

    def transferred(self) -> Transferred | None:
        """What the saving process sent."""
        return self._sent


@dataclass(frozen=True)
class PendingSave:
    """An asynchronous save under way.

    Attributes:
        staged: Done when the trainer may change its tensors; None is its result.
        written: Done when the save is.
        is_staged_in_background: Whether ``staged`` may not be done yet.
    """

    staged: Future[None]
    written: SaveFuture
    is_staged_in_background: bool = False


@dataclass
class SaveJob:
    """A save, from the call to its end.

    Attributes:
        number: Counted alike on all ranks.
        where: The place, as events and errors name it.
        writer: Writes to it.
        planner: As in torch.
        use_collectives: As in torch.
        written: Its outcome.
        state: The copy, if a stager of the caller's made it.
        staged: The copy, if ours did.
        copying: The copy, if a stager of the caller's is still at it.
        failure: Why this rank can't take part.
    """

    number: int
    where: str
    writer: StorageWriter
    planner: SavePlanner
    use_collectives: bool
    written: SaveFuture
    state: dict[str, Any] | None = None
    staged: StagedState | None = None
    copying: Future[dict[str, Any]] | None = None
    failure: CloudCheckpointError | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The copy."""
        if self.staged is not None:
            return self.staged.state_dict
        return self.state or {}

    def prepared(self) -> ToSave:
        """Where to save.

        Raises:
            CloudCheckpointError: If this rank can't take part.
        """
        if self.failure is not None:
            raise self.failure
        self.writer.reset(None)
        return ToSave(self.writer, self.planner)

    def listen(self, event: Event) -> None:
        """Notes what this save is doing."""
        if event.uri == self.where:
            self.written.timeline.add(event)

    def take_copy(self) -> None:
        """The result of a stager of the caller's that made its copy in the background."""
        if self.copying is None:
            return
        try:
            self.state = self.copying.result()
        except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
            self.failure = as_ours(error, "")

    def end(self) -> None:
        """Gives the copy's memory back."""
        self.state = self.copying = None
        if self.staged is not None:
            self.staged.release()


def as_ours(error: BaseException, where: str) -> CloudCheckpointError:
    """The error, or one of ours that tells of it."""
    if isinstance(error, CloudCheckpointError):
        if error.uri is None and where:
            error.uri = where
        return error
    made: AsyncSaveError = StagingError("the state dict could not be copied", cause=error)
    made.uri = where or None
    made.__cause__ = error
    return made


def never_to_begin(job: SaveJob, cause: RuntimeError, *, closed: bool) -> AsyncSaveError:
    """Settles a save for which there is no thread, with the error that it returns."""
    made: AsyncSaveError
    if closed:
        made = ClosedError("the saver was closed", uri=job.where)
    elif threading.main_thread().is_alive():
        made = AsyncSaveError("no thread can be started to save in", uri=job.where, cause=cause)
    else:
        made = AsyncSaveError(
            "the interpreter is shutting down and begins no save in the background any more; "
            "begin the last one before the script ends, not in an atexit handler",
            uri=job.where,
        )
    made.__cause__ = cause
    job.end()
    job.written.set_exception(made)
    return made


def skipped() -> PendingSave:
    """A save that did not take place."""
    staged: Future[None] = Future()
    staged.set_result(None)
    written = SaveFuture()
    written.skipped = True
    written.set_result(None)
    return PendingSave(staged, written)


def pass_on(done: Future[Any], staged: Future[None]) -> None:
    """Tells of the end of a copy that a stager of the caller's has made."""
    try:
        done.result()
    except BaseException as error:  # noqa: BLE001 - that of a stager which has cancelled it, too
        staged.set_exception(error)
    else:
        staged.set_result(None)
