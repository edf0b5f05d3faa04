"""The baseline of a save: the commit object that was at its location when it began.

The commit replaces nothing else. So a save asks for it first of all in its call, before its ranks
meet or its state is copied, in a thread of its own: what happens to the trainer later, and however
long it stands still, changes nothing. Only this first answer counts.
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
"""The longest time from the beginning of a save to its commit, in seconds. Leftovers are swept once
they are older than twice that."""

_LOOKS = 3  # for an existing checkpoint, if an answer takes long
_STORES_SECOND = 1.0  # what times in whole seconds leave open


def now() -> float:
    """Seconds since an arbitrary time, including time while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Baseline:
    """What was there when the save began.

    Attributes:
        key: The commit object.
        version: Its version, or None if there was none.
        began: When the save began, in seconds of :func:`now`.
    """

    key: str
    version: str | None
    began: float = field(default_factory=now, compare=False)

    def check_age(self, uri: str) -> None:
        """Checks that the save is young enough to commit.

        Objects of twice that age are swept as leftovers, so none of them may belong to a save that
        will commit. The commit is sent right after this check; docs/protocol.md says what happens
        if the machine is suspended in between.

        Raises:
            IncompleteSaveError: If the save began too long ago.
        """
        if now() - self.began > LONGEST_SAVE:
            raise IncompleteSaveError(
                f"the save took more than {LONGEST_SAVE / 3600:g} hours, so a sweep may have "
                "deleted its objects as leftovers; nothing was committed",
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
    """Looks for an existing checkpoint.

    The answer may be late: the store was silent, or this process stood still before it asked. A
    checkpoint that the store has had for a shorter time than this save has lasted is not one that
    was there when the save began.

    Args:
        look: Asks the store for the commit object.
        key: Its key.
        uri: Its URI, for errors.
        overwrite: Whether an existing checkpoint may be replaced.
        began: When the save began, if not now.

    Raises:
        CheckpointExistsError: If one exists that must not be overwritten.
        CheckpointConflictError: If one has come since the save began, as far as the store's times
            tell, which are in seconds.
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
            raise conflict(uri)  # it came between the two looks
        version = found.version
        if found.age is None or found.age + _STORES_SECOND >= now() - began:
            break  # it was there before
        if found.age + _STORES_SECOND < asked - began:
            raise conflict(uri)
        # it may have come before or while the store was asked: the next answer tells
    if version is not None and not overwrite:
        raise CheckpointExistsError(
            "Checkpoint already exists and overwrite is off: choose another location, or allow it "
            "with Config(overwrite=True)",
            uri=uri,
        )
    return Baseline(key, version, began)


def refuse_run(view: View, *, looks_inside: bool = False) -> None:
    """Refuses the folder of a run as the place of a new checkpoint: a folder is never both.

    A run has a claim, or folders that are named as steps. One listing of one page tells, and none
    is needed for a folder that is itself named as a step. Where it fails, as without the permission
    to list, or three times in a row, the folder passes: no save fails for want of it, or waits.

    Args:
        view: Its location is where nothing is yet.
        looks_inside: Whether each folder in it is asked for a checkpoint, whatever it is called.

    Raises:
        ConfigError: If it is the folder of a run.
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
            f"folder can't be a run and a checkpoint: save to a folder in it, such as "
            f"{location}/step-1",
            uri=str(location),
        )


class Beginning(Generic[T]):
    """What a save asks the store when it begins, in a thread of its own: its caller does not wait.

    Args:
        view: What the store is asked through; it ends with the question.
        ask: Asks, and returns the answer.
    """

    def __init__(self, view: View, ask: Callable[[], T]) -> None:
        self._view = view
        self._answer: Future[T] = Future()
        here = contextvars.copy_context()

        def run() -> None:
            try:
                self._answer.set_result(here.run(ask))
            except BaseException as error:  # noqa: BLE001 - raised where the save needs the answer
                self._answer.set_exception(error)

        # a program that ends without the answer does not wait for it
        threading.Thread(target=run, name="cloudckpt-begin", daemon=True).start()

    def answer(self) -> T:
        """Waits for the answer, and raises what the question has raised.

        An interrupt ends the question, too.
        """
        try:
            return self._answer.result()
        except BaseException:
            self._view.cancel()
            raise


def conflict(uri: str, cause: BaseException | None = None) -> CheckpointConflictError:
    """The error of a save whose location has another commit than when it began."""
    return CheckpointConflictError(
        "another writer has committed to this location since this save began; this save was "
        "discarded, and the other checkpoint was kept",
        uri=uri,
        cause=cause,
    )
