"""Saves the steps of a job, and records the outcome of each save."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
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
from cloudckpt.errors import CloudCheckpointError, ConfigError
from cloudckpt.runs.own_line import OwnLine
from cloudckpt.runs.pruning import StepsInUse
from cloudckpt.runs.saves import Save, Saves

__all__ = ["StepSaver", "saving_options"]

logger = logging.getLogger("cloudckpt")


def saving_options(
    given: CheckpointerConfig | None, config: Config | None, *, incremental: bool
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
    return options


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
        state: dict[str, Any],
        metrics: Mapping[str, float] | None,
        notes: Mapping[str, Any] | None,
        *,
        force: bool,
        is_last: bool,
    ) -> tuple[Notes, SaveFuture | None] | None:
        """Saves a step, in the background unless it is the final one.

        Args:
            step: The number of the step.
            state: The state dict to save.
            metrics: Numbers to store with the checkpoint.
            notes: Other values to store with it.
            force: Whether a step of another training may be replaced.
            is_last: Whether this is the final save before the job ends: it waits for the earlier
                saves, and is committed when this returns.

        Returns:
            The notes stored with the step, and the future of the save, or None if it is committed
            already. None if the step is skipped, or has failed with a tolerated error.

        Raises:
            CloudCheckpointError: The errors of a checkpointer's ``save``.
        """
        save, line = self._saves.begin(step), self._line
        try:
            job, continues = line.for_save()
            # called by the save, which raises an invalid value's error on all ranks
            noted = functools.cache(partial(_make_notes, step, metrics, notes, job, continues))
            if is_last:
                self._end_earlier_saves()
            with contextlib.ExitStack() as in_use:
                in_use.enter_context(self._in_use.kept(step))
                futures = (self._direct if is_last else self.checkpointer).save(
                    line.run.uri(step),
                    state,
                    notes=noted,
                    base=line.base,
                    # a job that never called restore() may not know that the step exists
                    keep_existing=not (line.has_restored or force),
                    is_first=not self._saves.has_committed,
                )
                written = None if futures is None else futures[1]
                if written is None:
                    self._saves.end(save, "committed")
                elif written.skipped:
                    self._saves.end(save, "dropped")
                    return None
                else:
                    save.number = written.number
                    written.add_done_callback(partial(self._note_end, save, in_use.pop_all()))
            line.base = None
            return noted(), written
        except CloudCheckpointError as error:
            line.explain(error)
            if error is self._saves.last_failure:  # the error of an earlier save, counted already
                self._saves.end(save, "dropped")
                raise
            if not self._saves.tolerates(save, error):
                raise
            return None
        except BaseException:
            self._saves.end(save, "dropped")
            raise

    def _end_earlier_saves(self) -> None:
        """Waits for all earlier saves before the final one, and only logs their failures."""
        while True:
            try:
                self.checkpointer.wait()
            except CloudCheckpointError as error:
                logger.error("an earlier save failed; the final save continues: %s", error)
            else:
                return

    def _note_end(self, save: Save, in_use: contextlib.ExitStack, written: SaveFuture) -> None:
        """Records the outcome of a background save; runs in the thread that saved."""
        in_use.close()
        self._saves.end(save, "committed" if written.exception() is None else "ended")

    def _failed_earlier(self, numbers: Collection[int], error: CloudCheckpointError) -> None:
        """Counts failed background saves; raises their error unless it is tolerated."""
        self._line.explain(error)
        self._saves.failed_earlier(numbers, error)
