"""Hugging Face Trainer: a callback that saves its checkpoints to a run, and restores them.

>>> from cloudckpt.integrations.transformers import CloudCheckpointCallback  # doctest: +SKIP
>>> saved = CloudCheckpointCallback("s3://bucket/run", max_to_keep=3)  # doctest: +SKIP
>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[saved])  # doctest: +SKIP
>>> trainer.train(resume_from_checkpoint=saved.restore())  # doctest: +SKIP

The Trainer writes its checkpoints into ``output_dir``, which may be a scratch disk on each node;
all ranks save a checkpoint's files as ``<run>/step-<step>``, in one commit, each file as an item.
Tested with transformers 5.23 and 5.24.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.dcp.meeting import LOADING, Meeting, collective
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    MissingDependencyError,
    ProcessGroupError,
)
from cloudckpt.integrations.saves import Saves
from cloudckpt.integrations.state import map_files, map_new_file
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import StoredItem, inspect
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.uri import URILike

try:
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.transformers needs the Trainer: pip install 'transformers[torch]'"
    ) from exc

__all__ = ["CloudCheckpointCallback"]

logger = logging.getLogger("cloudckpt")


class CloudCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves each checkpoint of a Trainer to a run, and restores the newest on a fresh node.

    After each save of the Trainer it saves all files of the checkpoint's folder, including FSDP's
    shards, the optimizer, random states and ``trainer_state.json``. A failure is raised on every
    rank, unless ``on_failure`` is ``"log"``. On the local disk, ``save_total_limit=1`` is enough.
    """

    def __init__(
        self,
        run: URILike,
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        asynchronous: bool = False,
        keep_local: bool = True,
        on_failure: Literal["raise", "log"] = "raise",
        step_name: str = DEFAULT_PATTERN,
        config: Config | None = None,
    ) -> None:
        """
        Args:
            run: The folder of the run, for example ``s3://bucket/run``.
            max_to_keep: How many of the newest checkpoints are kept in the run; None keeps all. The
                Trainer's best checkpoint and the checkpoint that this job restored are also kept,
                and so are later steps, if this job went back to an earlier one.
            keep_period: Steps that are multiples of this number are also kept.
            asynchronous: Whether a checkpoint's files are sent while training continues. A failure
                is then raised when the next checkpoint is saved, or training ends.
            keep_local: Whether the Trainer's own folder stays after its files were saved; needed
                for ``load_best_model_at_end``.
            on_failure: Whether the error of a save is raised or logged. If it is logged, training
                continues, and the files stay on the local disk. If the ranks lose contact with each
                other, the error is always raised.
            step_name: The pattern of the checkpoints' folder names.
            config: Options for saving and loading; None uses those given to ``install``, or
                else the environment.

        Raises:
            ConfigError: If an option is invalid.
            InvalidURIError: If ``run`` is not a valid location.
        """
        if on_failure not in ("raise", "log"):
            raise ConfigError(f"on_failure={on_failure!r}: write 'raise' or 'log'")
        self._run = Run(run, step_name=step_name, config=config or chosen_config())
        self._retention = Retention(max_to_keep=max_to_keep, keep_period=keep_period)
        self._asynchronous = asynchronous
        self._keep_local = keep_local
        self._on_failure = on_failure
        self._newest: int | None = None  # the step that was saved last
        self._stopping_step: int | None = None  # the step at which the Trainer was told to stop
        self._args: Any = None
        self._restored: str | None = None  # on the first rank of a node: the local copy

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stores the Trainer's arguments, among them its ``output_dir``.

        Raises:
            ConfigError: If ``load_best_model_at_end`` is on, and ``keep_local`` off.
        """
        self._args = args
        if args.load_best_model_at_end and not self._keep_local:
            raise ConfigError(
                "keep_local=False deletes the local checkpoints, but load_best_model_at_end=True "
                "loads the best one from the local disk: leave keep_local on, or turn "
                "load_best_model_at_end off"
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves the files of the checkpoint that the Trainer has just written, on all ranks.

        With ``asynchronous`` it begins to save them.

        Raises:
            CloudCheckpointError: The errors of :func:`cloudckpt.save`, of this save or the previous
                one.
        """
        self._save(args, state, state.global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Makes later saves continue the step that the Trainer resumes, also from a local copy.

        Raises:
            CloudCheckpointError: If the run can't be read.
        """
        if state.global_step:
            uri = str(self._run.uri(state.global_step))
            self._raise_or_log(lambda: self._saves.resumed(uri))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Records the current step if the Trainer was told to stop training, for the last save.

        With ``enable_jit_checkpoint`` the Trainer then writes a checkpoint without calling
        :meth:`on_save`.
        """
        if control.should_training_stop and self._stopping_step is None:
            self._stopping_step = state.global_step

    on_pre_optimizer_step = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Deletes the local copy of the restored checkpoint, which all ranks have read by now.

        Then does the same as :meth:`on_step_begin`.
        """
        self._delete_restored()
        self.on_step_begin(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves a checkpoint that the Trainer wrote on stopping, and waits for the last commit.

        Raises:
            CloudCheckpointError: The errors of :meth:`on_save`.
        """
        self._delete_restored()
        step, self._stopping_step = self._stopping_step, None
        if getattr(args, "enable_jit_checkpoint", False) and step is not None:
            is_new = step != self._newest and os.path.isdir(_folder(args.output_dir, step))
            if any(Meeting.of(None, False).gathered(lambda: is_new)):
                self._save(args, state, step)
        if "_saves" in vars(self):
            self._raise_or_log(self._saves.close)

    @collective("CloudCheckpointCallback.restore")
    def restore(self, step: int | None = None) -> str | None:
        """Copies the newest intact checkpoint to the local disk of each node.

        All ranks must call it, after making the ``TrainingArguments``, which connect the ranks. The
        files are divided among the ranks of a node. The copy is in ``output_dir`` if the Trainer
        already has this callback, otherwise in a temporary folder; it is deleted after the
        Trainer's first step, or when the process ends. With ``load_best_model_at_end``, the best
        checkpoint is also copied to its folder in ``output_dir``, if the run still has it.

        Args:
            step: The step to restore instead of the newest.

        Returns:
            The local folder, for ``resume_from_checkpoint``; None if the run has no checkpoint.

        Raises:
            CheckpointNotFoundError: If ``step`` has no checkpoint.
            CheckpointCorruptError: If all checkpoints are damaged, or that of ``step`` is.
            ConfigError: If the checkpoint was not saved by this class, or the ranks are not
                connected.
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise ConfigError("the ranks are not connected yet: create the TrainingArguments first")
        meeting, folders = Meeting.of(None, False), list[str]()

        def load(step: int) -> None:
            folders.append(self._download(meeting, step))

        self._saves.restore(self._run, step, load)
        return folders[-1] if folders else None

    @functools.cached_property
    def _saves(self) -> Saves:
        """The :class:`Saves` of this job, made at first use: the ranks are connected by then."""
        return Saves(
            self._run.config,
            asynchronous=self._asynchronous,
            stager=_NoCopyStager(),
            step_name=self._run.names.pattern,
        )

    def _save(self, args: Any, state: Any, step: int) -> None:
        """Saves the folder of a step, or begins to save it, and deletes old steps afterwards."""
        meeting = Meeting.of(None, False)
        folder = _folder(args.output_dir, step)
        kept = _best_steps(state)

        def save() -> None:
            meeting.begin(lambda: None)  # waits until all ranks have written their files
            self._saves.save(map_files(folder, meeting), str(self._run.uri(step)))
            self._newest = step
            self._saves.then(clean)

        def clean() -> None:
            if not self._keep_local and _rank_on_node()[0] == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if meeting.rank == 0:
                self._saves.prune_run(self._run, self._retention, kept)

        self._raise_or_log(lambda: self._saves.finish())
        self._raise_or_log(save)

    def _raise_or_log(self, act: Callable[[], None]) -> None:
        """Calls ``act``; if ``on_failure`` is "log", logs its error instead of raising it.

        A ProcessGroupError, and an error that is not cloudckpt's, are always raised.
        """
        try:
            act()
        except ProcessGroupError:
            raise
        except CloudCheckpointError as error:
            if self._on_failure == "raise":
                raise
            logger.error("saving or resuming failed, and the job continues: %s", error)

    def _download(self, meeting: Meeting, step: int) -> str:
        """Copies a step to each node; returns the local folder of the step."""
        local_rank = _rank_on_node()[0]
        output_dir = None if self._args is None else self._args.output_dir

        def make() -> str | None:
            if local_rank != 0:
                return None
            if output_dir is None:
                made = tempfile.mkdtemp(prefix="cloudckpt-")
            else:  # a killed job's leftovers there go; pushing to a hub omits names with _
                made = os.path.join(output_dir, f"_restored-{meeting.rank}")
                shutil.rmtree(made, ignore_errors=True)
                os.makedirs(made)
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            return os.path.abspath(made)

        roots = meeting.gathered(make, during=LOADING)
        self._restored, root = roots[meeting.rank], str(roots[meeting.rank - local_rank])
        folder = _folder(root, step)
        self._fetch(meeting, step, folder)
        meeting.begin(lambda: _warn_of_random_states(folder, meeting), during=LOADING)
        if self._args is not None and self._args.load_best_model_at_end:
            self._download_best(meeting, folder, root)
        return folder

    def _download_best(self, meeting: Meeting, folder: str, root: str) -> None:
        """Copies the best checkpoint to each node, and writes its path into the Trainer's state.

        That state is a file in ``folder``. Does nothing if the run does not have the checkpoint any
        more; logs an error if it is damaged, or is deleted meanwhile.
        """
        file = os.path.join(folder, TRAINER_STATE_NAME)

        def best_saved_step() -> int | None:
            for best in _best_steps(TrainerState.load_from_json(file)):
                if best is not None and self._run.is_committed(best):
                    return best
            return None

        best = meeting.broadcast_from_first(best_saved_step)
        if best is None:
            return
        target = os.path.abspath(_folder(self._args.output_dir, best))
        copy = _folder(os.path.join(root, "best"), best)
        try:
            if not all(meeting.gathered(lambda: os.path.isdir(target), during=LOADING)):
                self._fetch(meeting, best, copy)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            text = "step %d has the best metric, but load_best_model_at_end can't load it: %s"
            logger.error(text, best, error)
            return

        def put() -> None:
            if _rank_on_node()[0] != 0:
                return
            if not os.path.isdir(target):
                os.rename(copy, target)
            state = TrainerState.load_from_json(file)
            state.best_model_checkpoint = target
            state.save_to_json(file)

        meeting.begin(put, during=LOADING)

    def _fetch(self, meeting: Meeting, step: int, folder: str) -> None:
        """Copies a checkpoint to a folder on each node, divided among the ranks of the node.

        The ranks load together, so that all files are of one save.
        """
        local_rank, local_size = _rank_on_node()
        uri, config = str(self._run.uri(step)), self._run.config
        items = meeting.broadcast_from_first(lambda: inspect(uri, config=config).items)
        own = items[local_rank::local_size]
        wanted = meeting.begin(
            lambda: {item.name: _file_of_item(folder, item, uri) for item in own}, during=LOADING
        )
        with make_sync_checkpointer(CheckpointerConfig(config=config)) as checkpointer:
            checkpointer.load(uri, wanted, strict=True)

    def _delete_restored(self) -> None:
        """Deletes the local copy of the restored checkpoint, if this rank made one."""
        if self._restored is not None:
            shutil.rmtree(self._restored, ignore_errors=True)
            self._restored = None


class _NoCopyStager(AsyncStager):
    """A stager that does not copy: a checkpoint's files never change.

    Files that are mapped into memory stay readable after they are deleted.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def _warn_of_random_states(folder: str, meeting: Meeting) -> None:
    """Logs a warning if the checkpoint has random states, but not those of this rank."""
    found = {name for name in os.listdir(folder) if name.startswith("rng_state")}
    own = "rng_state.pth" if meeting.size == 1 else f"rng_state_{meeting.rank}.pth"
    if found and own not in found:
        logger.warning(
            "rank %d keeps its random state: the restored checkpoint has no file %s, only %s",
            meeting.rank,
            own,
            sorted(found),
        )


def _folder(output_dir: str, step: int) -> str:
    return os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _best_steps(state: TrainerState) -> list[int | None]:
    """Returns the steps of the Trainer's best checkpoint and of its best metric.

    Each is None if the Trainer's state lacks it. They may differ if the Trainer has not saved
    a checkpoint at the step of the best metric.
    """
    folder = os.path.basename(state.best_model_checkpoint or "")
    step = folder.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return [int(step) if step.isdecimal() else None, state.best_global_step]


def _rank_on_node() -> tuple[int, int]:
    """Returns this rank's index on its node, and the number of ranks there.

    The launcher's environment variables have them; without a process group they are 0 and 1.
    """
    if not dist.is_initialized():
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _file_of_item(folder: str, item: StoredItem, uri: str) -> torch.Tensor:
    """Creates a local file, and returns it as a mapped tensor to load an item into.

    Raises:
        ConfigError: If the item is not a saved file.
    """
    if item.dtype != "uint8" or item.shape is None or len(item.shape) != 1:
        raise ConfigError(
            f"{item.name!r} is not a file that this callback has saved: load the checkpoint with "
            "cloudckpt.load",
            uri=uri,
            item=item.name,
        )
    return map_new_file(folder, item.name, item.nbytes, uri)
