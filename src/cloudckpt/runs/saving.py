"""Saves the steps of a job, and records the outcome of each save."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cloudckpt.background.save import SaveFuture
from cloudckpt.checkpoint.notes import Notes, metrics_of
from cloudckpt.checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointerConfig,
    make_sync_checkpointer,
)
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import CloudCheckpointError, ConfigError
from cloudckpt.runs.own_line import OwnLine
from cloudckpt.runs.pruning import StepsInUse
from cloudckpt.runs.saves import Save, Saves

__all__ = ["Begun", "StepSaver", "saving_options"]

logger = logging.getLogger("cloudckpt")


def saving_options(
    given: CheckpointerConfig | None, config: Config | None, hook: CommitHook, *, incremental: bool
) -> CheckpointerConfig:
    """Merges the options given to a manager into those of its checkpointer.

    Raises:
        ConfigError: If both ``given`` and ``config`` are not None.
    """
    if given is not None and config is not None:
        raise ConfigError(
            "your CheckpointerConfig has its own options: pass config= to that instead"
        )
    options = given if given is not None else CheckpointerConfig()
    options = options if config is None else replace(options, config=config)
    if incremental:
        made = replace(config_or_default(options.config), incremental=True)
        options = replace(options, config=made)
    return replace(options, commit_hook=hook)


def _make_notes(
    step: int,
    metrics: Mapping[str, float] | None,
    notes: Mapping[str, Any] | None,
    job: str,
    continues: Mapping[str, int],
) -> Notes:
    """Makes the notes to store with a step.

    Raises:
        ConfigError: If metrics or notes have a value that can't be stored.
    """
    for name, given in (("metrics", metrics), ("notes", notes)):
        if not isinstance(given, (Mapping, type(None))):
            raise ConfigError(f"{name}={given!r}: give a dict")
    user = dict(notes or {})
    return Notes(step=step, metrics=metrics_of(metrics), user=user, job=job, continues=continues)


@dataclass(frozen=True)
class Begun:
    """A save that has begun, or is committed already.

    Attributes:
        ends: The future that a background save completes; None if the save is committed.
        notes: The notes stored with the step.
    """

    ends: SaveFuture | None
    notes: Notes


class StepSaver:
    """Saves steps in the background or synchronously; all ranks must make the same calls.

    Attributes:
        checkpointer: The checkpointer that saves all steps but the final one, and loads.
    """

    def __init__(
        self,
        options: CheckpointerConfig,
        saves: Saves,
        line: OwnLine,
        in_use: StepsInUse,
        *,
        in_background: bool,
    ) -> None:
        """
        Args:
            options: The options of the checkpointers.
            saves: The list of the job's saves.
            line: Claims the run, and knows whether existing steps may be replaced.
            in_use: Prevents the deletion of a step while it is saved.
            in_background: Whether a save returns once the state is staged.
        """
        self._saves, self._line, self._in_use = saves, line, in_use
        self._direct = make_sync_checkpointer(options)
        self.checkpointer: Checkpointer = self._direct
        if in_background:
            self.checkpointer = AsyncCheckpointer(
                options, on_failure=self._failed_earlier, when_busy="auto"
            )

    def save(
        self,
        step: int,
        uri: str,
        state: dict[str, Any],
        metrics: Mapping[str, float] | None,
        notes: Mapping[str, Any] | None,
        *,
        base: str | None,
        force: bool,
        is_last: bool,
    ) -> Begun | None:
        """Saves a step; returns None if it is skipped, or has failed with a tolerated error.

        Args:
            step: The number of the step.
            uri: The location of the step.
            state: The state dict to save.
            metrics: Numbers to store with the checkpoint.
            notes: Other values to store with it.
            base: The URI of the base of an incremental save, if it is not the newest step.
            force: Whether a step of another training may be replaced.
            is_last: Whether this is the final save before the job ends: it waits for the earlier
                saves, and is committed when this returns.

        Raises:
            CloudCheckpointError: The errors of a checkpointer's ``save``.
        """
        save = self._saves.begin(step)
        try:
            job, continues = self._line.for_save()
            # called by the save, which raises an invalid value's error on all ranks
            noted = functools.cache(partial(_make_notes, step, metrics, notes, job, continues))
            return self._begin(save, step, uri, state, noted, base, force, is_last)
        except CloudCheckpointError as error:
            self._line.explain(error)
            if error is self._saves.last_failure:  # the error of an earlier save, counted already
                self._saves.dropped(save)
                raise
            if not self._saves.tolerates(save, error):
                raise
            return None
        except BaseException:
            self._saves.dropped(save)
            raise

    def _begin(
        self,
        save: Save,
        step: int,
        uri: str,
        state: dict[str, Any],
        notes: Callable[[], Notes],
        base: str | None,
        force: bool,
        is_last: bool,
    ) -> Begun | None:
        """Begins the save of a step, in the background unless it is the final one.

        Returns None if the checkpointer skips the step.
        """
        saver = self.checkpointer
        if is_last:
            self._end_earlier_saves()
            saver = self._direct
        self._in_use.begin(step)
        try:
            futures = saver.save(
                uri,
                state,
                notes=notes,
                base=base,
                # a job that never called restore() may not know that the step exists
                keep_existing=not (self._line.has_restored or force),
                is_first=not self._saves.has_committed,
            )
        except BaseException:
            self._in_use.end(step)
            raise
        written = None if futures is None else futures[1]
        if written is not None and not written.skipped:
            save.number = written.number
            written.add_done_callback(functools.partial(self._note_end, save, step))
            return Begun(written, notes())
        self._in_use.end(step)
        if written is not None:
            self._saves.dropped(save)
            return None
        self._saves.committed(save)
        return Begun(None, notes())

    def _end_earlier_saves(self) -> None:
        """Waits for all earlier saves before the final one, and only logs their failures."""
        while True:
            try:
                self.checkpointer.wait()
            except CloudCheckpointError as error:
                logger.error("an earlier save failed; the final save continues: %s", error)
            else:
                return

    def _note_end(self, save: Save, step: int, written: SaveFuture) -> None:
        """Records the outcome of a background save; runs in the thread that saved."""
        self._in_use.end(step)
        if written.exception() is None:
            self._saves.committed(save)
        else:
            self._saves.ended(save)

    def _failed_earlier(self, numbers: Collection[int], error: CloudCheckpointError) -> None:
        """Counts failed background saves; raises their error unless it is tolerated."""
        self._line.explain(error)
        self._saves.failed_earlier(numbers, error)
