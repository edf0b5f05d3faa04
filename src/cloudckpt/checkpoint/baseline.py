"""The baseline of a save: the commit object that was at its location when the save began.

The commit may replace that object and no other. So a save requests it first of all, before its
ranks meet or its state is copied, and in a thread of its own: later delays of the trainer, however
long, can't change the answer. Only this first answer counts.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cloudckpt.checkpoint.objects import CLAIM, find_commit, is_step_name
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointExistsError,
    ConfigError,
    IncompleteSaveError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = [
    "LONGEST_SAVE",
    "Baseline",
    "Beginning",
    "begin",
    "conflict",
    "now",
    "refuse_run",
]

T = TypeVar("T")

LONGEST_SAVE = 12 * 3600.0
"""Maximum seconds from the beginning of a save to its commit.

Objects left behind by failed saves are swept once they are older than twice this time.
"""

_LOOKS = 3  # requests for the existing commit object, if an answer takes long
_STORES_SECOND = 1.0  # seconds by which an age may be wrong, as stores give times in whole seconds


def now() -> float:
    """Returns seconds of a clock that, on Linux, also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Baseline:
    """The commit object at a save's location when the save began.

    Attributes:
        key: The key of the commit object.
        version: The version of the commit object; None if it did not exist.
        began: When the save began, in seconds of :func:`now`.
    """

    key: str
    version: str | None
    began: float = field(default_factory=now, compare=False)

    def check_age(self, uri: str) -> None:
        """Checks that the save began at most ``LONGEST_SAVE`` seconds ago, so that it may commit.

        Objects of twice that age are swept as leftovers, so none of them may belong to a save that
        will commit. The commit is sent right after this check; docs/protocol.md says what happens
        if the machine is suspended in between.

        Raises:
            IncompleteSaveError: If the save began too long ago.
        """
        if now() - self.began > LONGEST_SAVE:
            raise IncompleteSaveError(
                f"the save took more than {LONGEST_SAVE / 3600:g} hours, the limit: a sweep may "
                "soon delete its objects as leftovers. Nothing was committed: find out what "
                "delayed the save, and save again",
                uri=uri,
            )


def begin(
    look: Callable[[], ObjectInfo],
    key: str,
    uri: str,
    *,
    overwrite: bool,
    began: float | None = None,
) -> Baseline:
    """Requests the commit object at a save's location, and returns the baseline of the save.

    The answer may be late, because the store or this process was slow. A checkpoint that is younger
    than this save was not there when the save began, and is a conflict.

    Args:
        look: Returns the version and age of the commit object, from the store; raises
            ObjectNotFoundError if there is none.
        key: The key of the commit object.
        uri: The URI of the commit object, for errors.
        overwrite: Whether an existing checkpoint may be replaced.
        began: When the save began, in seconds of :func:`now`; None for now.

    Raises:
        CheckpointExistsError: If a checkpoint exists and must not be overwritten.
        CheckpointConflictError: If another save has committed since this one began, as far as the
            store's times, in whole seconds, show it.
        StoreError: If the store refuses the request or stays unreachable.
    """
    began = now() if began is None else began
    version: str | None = None
    for _ in range(_LOOKS):
        asked = now()
        try:
            found = look()
        except ObjectNotFoundError:
            break
        if version not in (None, found.version):
            raise conflict(uri)  # it was committed between two requests
        version = found.version
        if found.age is None or found.age + _STORES_SECOND >= now() - began:
            break  # it is older than the save
        if found.age + _STORES_SECOND < asked - began:
            raise conflict(uri)
        # it may have been committed before the save began or during this request: ask once more
    if version is not None and not overwrite:
        raise CheckpointExistsError(
            "Checkpoint already exists and overwrite is off: choose another location, or set "
            "Config(overwrite=True) to replace it",
            uri=uri,
        )
    return Baseline(key, version, began)


def refuse_run(view: View, *, looks_inside: bool = False) -> None:
    """Raises an error if a location is the folder of a run, as it can't be a checkpoint as well.

    A folder belongs to a run if it contains ``.cloudckpt-job.json``, the object that names the
    run's job, or folders with the names of steps. This lists one page; a folder that itself has the
    name of a step is accepted without a listing, unless ``looks_inside``. If the listing is
    forbidden or keeps failing, the folder is accepted: this check must not fail a save.

    Args:
        view: The view of the location, where nothing was committed yet.
        looks_inside: Whether a folder is refused as well if any of its subfolders is a committed
            checkpoint, whatever its name.

    Raises:
        ConfigError: If the location is the folder of a run.
    """
    location, below = view.location, view.location.key("")
    if is_step_name(location.folder) and not looks_inside:
        return
    try:
        level = view.level(below, is_patient=looks_inside)
        folders = [one for one in level if isinstance(one, str)]
        steps = [location.join(name) for name in folders if is_step_name(name)]
        if looks_inside and not steps:
            uris = [f"{location}/{name}" for name in folders]
            inside = [CheckpointURI.parse(uri) for uri in uris if CheckpointURI.accepts(uri)]
            found = view.each(lambda uri: find_commit(view.look, uri), inside)
            steps = [uri for uri, commit in zip(inside, found, strict=True) if commit is not None]
    except StoreError:
        return
    names = {one.key.removeprefix(below) for one in level if isinstance(one, ObjectInfo)}
    if steps or CLAIM in names:
        raise ConfigError(
            f"this is the folder of a run{f', which contains {steps[0]}' if steps else ''}, and a "
            "folder can't be a run and a checkpoint: give the folder of one checkpoint in it (to "
            "save or convert, a folder that does not exist yet)",
            uri=str(location),
        )


class Beginning(Generic[T]):
    """Runs the first request of a save in a thread, so that the caller of the save does not wait.

    Args:
        view: The view that the request goes through; cancelled if there is no answer, because the
            request failed or waiting for it was interrupted.
        ask: Sends the request, and returns the answer.

    Attributes:
        future: The future of the answer.
    """

    def __init__(self, view: View, ask: Callable[[], T]) -> None:
        self._view = view
        self.future: Future[T] = Future()
        here = contextvars.copy_context()

        def run() -> None:
            try:
                self.future.set_result(here.run(ask))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is needed
                self.future.set_exception(error)

        # a daemon: the program may end before the answer arrives
        threading.Thread(target=run, name="cloudckpt-begin", daemon=True).start()

    def answer(self) -> T:
        """Waits for the answer, and returns it or raises the error of the request.

        An interrupt while waiting cancels the request.
        """
        try:
            return self.future.result()
        except BaseException:
            self._view.cancel()
            raise


def conflict(uri: str, cause: BaseException | None = None) -> CheckpointConflictError:
    """Returns the error of a save during which another writer has changed the same location."""
    return CheckpointConflictError(
        "another writer committed or deleted a checkpoint here since this save began, so this save "
        "was discarded: let only one job at a time save here",
        uri=uri,
        cause=cause,
    )
