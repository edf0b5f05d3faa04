"""Saves the checkpoints of a framework's training.

If the folder of a checkpoint is named like a step (``step-1000``), its parent folder is a run, and
saves follow the rules of :class:`~cloudckpt.CheckpointManager`:

- The first save of a job claims the run. From then on, saves and deletions by the job that had the
  claim before are refused.
- Each step notes which earlier steps its training continues, so that the next job resumes this
  training (:mod:`cloudckpt.runs.line`), and not an abandoned one.
- A job that has not resumed from a step of the run replaces none of its steps but its own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpointer import (
    Checkpointer,
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    CommitUnknownError,
    ProcessGroupError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.claim import OwnLine
from cloudckpt.runs.deleting import delete_at
from cloudckpt.runs.pruning import delete_steps
from cloudckpt.runs.restoring import notes_to_restore, restore_newest
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.uri import CheckpointURI

__all__ = ["Saves"]

logger = logging.getLogger("cloudckpt")


class Saves:
    """Saves one checkpoint after another; all ranks that save together must make the same calls.

    Only :meth:`remove` and :meth:`prune_run` are called by the first rank alone.

    There is at most one save in the background, in a thread: a saving process could often not
    import the framework's script. Deletions take place when the save is committed, so that there
    is always a committed checkpoint.

    Attributes:
        asynchronous: Whether saves run in the background.
    """

    def __init__(
        self,
        config: Config,
        *,
        asynchronous: bool = False,
        no_dist: bool = False,
        stager: AsyncStager | None = None,
        step_name: str = DEFAULT_PATTERN,
    ) -> None:
        """
        Args:
            config: Options.
            asynchronous: Whether saves run in the background.
            no_dist: Whether this process saves alone.
            stager: Stages the state for a background save; None for cloudckpt's own stager.
            step_name: The pattern of the steps' folder names.
        """
        self.asynchronous = asynchronous
        # a single rank needs no process groups, whose threads would outlive its saves
        is_alone = no_dist or (dist.is_initialized() and dist.get_world_size() == 1)
        self._options = CheckpointerConfig(
            config=config, no_dist=is_alone, kind=AsyncCheckpointerType.THREAD, stager=stager
        )
        self._step_name = step_name
        self._meeting = Meeting.of(None, no_dist)
        self._lines: dict[CheckpointURI, OwnLine] = {}
        self._resumed: dict[CheckpointURI, int] = {}  # the step of each run that was loaded
        self._checkpointer: Checkpointer | None = None
        self._saves_into: OwnLine | None = None  # the run that the checkpointer saves into
        self._after_commit: list[Callable[[], object]] = []
        self._begun: set[CheckpointURI] = set()  # saved, but perhaps not committed yet
        self._saved: set[CheckpointURI] = set()  # what this job may replace in any case

    def configure(self, config: Config) -> None:
        """Uses other options from now on; if they differ, first waits for the save in progress."""
        if config != self._options.config:
            self.close()
            self._options = replace(self._options, config=config)

    # ---- resuming

    def restore(self, run: Run, step: int | None, load: Callable[[int], object]) -> None:
        """Loads a step of a run, and makes later saves continue it.

        Args:
            run: The run.
            step: The step; None for the newest intact one of the run's training. If there is none,
                nothing is loaded.
            load: Loads a step; called on all ranks.

        Raises:
            CheckpointNotFoundError: If ``step`` is not committed.
            CheckpointCorruptError: If the step is damaged; without ``step``, if all are.
            CloudCheckpointError: The other errors of ``load``.
        """
        line = self._line_of(run)

        def load_step(step: int, notes: Notes) -> None:
            load(step)
            self._continue_from(line, step, notes)

        if step is not None:
            load_step(step, self._meeting.broadcast_from_first(lambda: notes_to_restore(run, step)))
        elif restore_newest(run, self._meeting, line, None, load_step) is None:
            line.go_on_from(None, None)

    def resumed(self, uri: str) -> None:
        """Makes later saves continue a checkpoint that the framework has loaded.

        Does nothing if it is neither a step of a run nor a copy of one in the run, such as
        ``last``. If the job may not read that run, a warning is logged.

        Raises:
            CloudCheckpointError: If the notes of the checkpoint can't be read.
        """
        location = CheckpointURI.parse(uri)
        run = Run(location.parent, step_name=self._step_name, config=self._options.config)

        def read() -> Notes | None:
            try:
                return read_notes(run.store, location, run.retrier)
            except CheckpointNotFoundError:
                return None

        notes = self._meeting.broadcast_from_first(read)
        step = run.names.step(location.folder)
        if step is None and notes is not None and notes.job:  # a copy of a step, such as "last"
            step = notes.step
        if notes is not None and step is not None:
            try:
                self._continue_from(self._line_of(run), step, notes)
            except AccessDeniedError as error:  # a job that does not save has no need of its run
                text = "%s can't be read, so steps saved there will not continue step %d: %s"
                logger.warning(text, run.root, step, error)

    def _continue_from(self, line: OwnLine, step: int, notes: Notes) -> None:
        line.go_on_from(step, notes)
        self._resumed[line.run.root] = step

    def _line_of(self, run: Run) -> OwnLine:
        """Returns the :class:`OwnLine` of a run; on first use, reads which job owns the run."""
        if run.root not in self._lines:
            self._lines[run.root] = OwnLine(run, self._meeting, None)
        return self._lines[run.root]

    # ---- saving

    def save(self, state: dict[str, Any], uri: str, *, step: int | None = None) -> None:
        """Saves a state dict, or begins a background save, after the previous save has ended.

        Args:
            state: The state dict.
            uri: The location of the checkpoint.
            step: The training's step, used if the location does not name it; None if unknown.

        Raises:
            CheckpointConflictError: If another job has begun to save into the run.
            CheckpointExistsError: If another training has saved this step, and this job has not
                resumed any step of the run.
            CloudCheckpointError: The errors of :func:`cloudckpt.save`, of this save or the previous
                one.
        """
        self.finish()
        location = CheckpointURI.parse(uri)
        run = Run(location.parent, step_name=self._step_name, config=self._options.config)
        named = run.names.step(location.folder)
        line = self._lines.get(run.root) if named is None else self._line_of(run)
        more: dict[str, Any] = {}
        if line is not None:
            more["notes"] = replace(line.claim(), step=step if named is None else named)
            more["base"], line.base = line.base, None
            is_others = named is not None and location not in self._saved
            more["keep_existing"] = is_others and not line.has_restored
        with self._saving({location}):
            self._checkpointer_for(line).save(uri, state, **more)
        self._begun.add(location)

    @contextlib.contextmanager
    def _saving(self, begun: set[CheckpointURI]) -> Iterator[None]:
        """Handles errors of a block that saves to the locations ``begun``, and raises them again.

        The message of a CheckpointExistsError is rewritten to say why ``overwrite`` had no effect.
        If the saves may be committed in spite of the error, later saves of this job may replace
        them.
        """
        try:
            yield
        except (CommitUnknownError, ProcessGroupError) as error:
            if isinstance(error, CommitUnknownError) or error.committed is not False:
                self._saved |= begun
            raise
        except CheckpointExistsError as error:
            if self._options.config.overwrite:
                error.message = (
                    "another training has saved this step, and this job has resumed no step of the "
                    "run: resume one, give the job its own folder, or delete the old steps"
                )
            raise

    def _checkpointer_for(self, line: OwnLine | None) -> Checkpointer:
        """Returns a checkpointer whose commits fail once another job has claimed the line's run.

        ``line`` is None for a location that is not in a run.
        """
        if self._checkpointer is None or self._saves_into is not line:
            if self._checkpointer is not None:
                self._checkpointer.close()
            make = make_async_checkpointer if self.asynchronous else make_sync_checkpointer
            self._checkpointer = make(replace(self._options, commit_hook=line))
            self._saves_into = line
        return self._checkpointer

    def then(self, act: Callable[[], object]) -> None:
        """Calls ``act`` when the last save is committed: now, or in a later call that waits for it.

        It is called in the thread of the training, so that a framework never lists files while
        ``act`` deletes them. If the save fails, ``act`` is not called.
        """
        if self.asynchronous and self._checkpointer is not None:
            self._after_commit.append(act)
        else:
            act()

    def finish(self) -> None:
        """Waits until the last save is committed, and calls the functions given to :meth:`then`.

        Raises:
            CloudCheckpointError: If the save failed; raised on all ranks, and the functions are not
                called.
        """
        acts, self._after_commit = self._after_commit, []
        begun, self._begun = self._begun, set()
        if self._checkpointer is not None:
            with self._saving(begun):
                self._checkpointer.wait()
        self._saved |= begun
        for act in acts:
            act()

    def close(self) -> None:
        """Waits until the last save is committed, and releases threads and memory.

        A later save begins anew, and continues the same training.

        Raises:
            CloudCheckpointError: If the save failed; it is only logged if another error is being
                raised.
        """
        is_failing = sys.exc_info()[1] is not None
        try:
            try:
                self.finish()
            finally:
                checkpointer, self._checkpointer = self._checkpointer, None
                if checkpointer is not None:
                    checkpointer.close()
        except CloudCheckpointError as failure:
            if not is_failing:
                raise
            logger.error("besides the error that is being raised, a save failed: %s", failure)

    # ---- deleting, on the first rank

    def remove(self, uri: str) -> None:
        """Deletes a checkpoint if it exists, when the last save is committed.

        An error is logged: only this rank would raise it, and the others would wait for it.
        """

        def act() -> None:
            try:
                location = CheckpointURI.parse(uri)
                with contextlib.suppress(CheckpointNotFoundError):
                    delete_at(location, self._options.config, self._check_of(location.parent))
            except CloudCheckpointError as error:
                logger.error("%s was not deleted, or not completely: %s", uri, error)

        self.then(act)

    def prune_run(self, run: Run, retention: Retention, kept: Collection[int | None] = ()) -> None:
        """Deletes the steps of this training that ``retention`` does not keep; logs errors.

        The step that this job resumed, steps that are saved anew meanwhile, and steps of other
        trainings stay. The next call tries again to delete steps that could not be deleted.

        Args:
            run: The run.
            retention: The rules by which steps are kept.
            kept: Other steps to keep.
        """
        if retention.keeps_all:
            return
        try:
            history, kept = run.history(), {*kept, self._resumed.get(run.root)}
            unneeded = [step for step in retention.unneeded(history.line, {}) if step not in kept]
            delete_steps(run, history, unneeded, self._check_of(run.root))
        except CloudCheckpointError as error:
            logger.error(
                "%s: not all old checkpoints could be deleted; the next save tries again: %s",
                run.root,
                error,
            )

    def _check_of(self, run: CheckpointURI) -> Callable[[], None]:
        """Returns a function that raises an error if another job has claimed a run of this job.

        For a run that this job has neither saved into nor resumed, the function does nothing.
        """
        line = self._lines.get(run)
        return (lambda: None) if line is None else line.check_claim
