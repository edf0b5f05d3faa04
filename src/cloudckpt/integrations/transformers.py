"""Hugging Face Trainer: a callback that takes each of its checkpoints to a run, and back.

>>> from cloudckpt.integrations.transformers import CloudCheckpointCallback  # doctest: +SKIP
>>> saved = CloudCheckpointCallback("s3://bucket/run", max_to_keep=3)  # doctest: +SKIP
>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[saved])  # doctest: +SKIP
>>> trainer.train(resume_from_checkpoint=saved.restore())  # doctest: +SKIP

The Trainer writes its checkpoints into ``output_dir``, which may be a scratch disk of each node;
all ranks save the files of one as ``<run>/step-<step>``, in one commit, each file as an item.
Tested with transformers 5.23.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt import api
from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    MissingDependencyError,
)
from cloudckpt.integrations.parts import keep_newest
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import StoredItem, inspect
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.uri import URILike

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.transformers needs the Trainer: pip install 'transformers[torch]'"
    ) from exc

__all__ = ["CloudCheckpointCallback"]

logger = logging.getLogger("cloudckpt")


class CloudCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves each checkpoint of a Trainer to a run, and restores the newest on a fresh node.

    It saves when the Trainer has saved: all of its files, whatever wrote them, FSDP's shards, the
    optimizer, random states and ``trainer_state.json`` among them. A failure is raised on every
    rank. ``save_total_limit=1`` is enough for the local disk.
    """

    def __init__(
        self,
        run: URILike,
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        step_name: str = DEFAULT_PATTERN,
        config: Config | None = None,
    ) -> None:
        """
        Args:
            run: The folder of the run, for example ``s3://bucket/run``.
            max_to_keep: How many checkpoints are kept in the run, the newest; None keeps all.
            keep_period: Steps that it divides are kept besides.
            step_name: What the folders of checkpoints are called.
            config: The options of saving and loading.

        Raises:
            ConfigError: If an option makes no sense.
            InvalidURIError: If ``run`` is no location.
        """
        self._run = Run(run, step_name=step_name, config=config)
        self._retention = Retention(max_to_keep=max_to_keep, keep_period=keep_period)
        self._restored: str | None = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves what the Trainer has just written; it calls this on all ranks.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        uri = self._run.uri(state.global_step)
        meeting = Meeting.of(None, False)
        meeting.begin(lambda: None)  # all have written
        sizes = meeting.gathered(meeting.begin(lambda: _sizes(folder)))
        if not any(sizes):
            raise ConfigError(f"the Trainer has written nothing to {folder}", uri=str(uri))

        def mine() -> dict[str, Any]:
            return {
                name: _mapped(os.path.join(folder, name), size)
                for name, size in sizes[meeting.rank].items()
                if _owner(name, sizes) == meeting.rank
            }

        api.save(meeting.begin(mine), checkpoint_id=uri, config=self._run.config)
        if meeting.rank == 0:
            keep_newest(self._run, self._retention)

    def restore(self, step: int | None = None) -> str | None:
        """Brings a checkpoint to the local disk of each node: the newest that is whole.

        All ranks call it, after the ``TrainingArguments`` were made, which connect them. The ranks
        of a node share the work. The copy is deleted when the Trainer has taken its first step, or
        when the process ends.

        Args:
            step: The step to restore instead of the newest.

        Returns:
            The folder, for ``resume_from_checkpoint``; None if nothing was saved yet.

        Raises:
            CheckpointNotFoundError: If ``step`` has no checkpoint.
            CheckpointCorruptError: If all that there are are damaged.
            ConfigError: If it was saved by something else, or the ranks are not connected.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise ConfigError("the ranks are not connected: make the TrainingArguments first")
        meeting = Meeting.of(None, False)
        if step is not None:
            return self._bring(meeting, step)
        damage: CheckpointCorruptError | None = None
        for found in meeting.told_by_first(lambda: list(self._run.committed_steps())):
            try:
                return self._bring(meeting, found)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                if isinstance(error, CheckpointCorruptError):
                    damage = damage or error
                logger.error("step %d can't be restored, an older one is: %s", found, error)
        if damage is not None:
            raise damage
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Deletes what was restored, which all ranks have read by then."""
        if self._restored is not None:
            shutil.rmtree(self._restored, ignore_errors=True)
            self._restored = None

    def _bring(self, meeting: Meeting, step: int) -> str:
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if meeting.size > 1 else 0
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if meeting.size > 1 else 1

        self._restored = meeting.begin(lambda: _own_folder() if local_rank == 0 else None)
        roots = meeting.gathered(self._restored)
        root = str(roots[meeting.rank - local_rank])
        folder = os.path.join(root, f"{PREFIX_CHECKPOINT_DIR}-{step}")

        def fetch() -> None:
            uri = str(self._run.uri(step))
            items = inspect(uri, config=self._run.config).items
            wanted = {item.name: _room(folder, item, uri) for item in items[local_rank::local_size]}
            options = CheckpointerConfig(config=self._run.config, no_dist=True)
            with make_sync_checkpointer(options) as checkpointer:
                checkpointer.load(uri, wanted, strict=True)

        meeting.begin(fetch)
        return folder


def _own_folder() -> str:
    made = tempfile.mkdtemp(prefix="cloudckpt-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _sizes(folder: str) -> dict[str, int]:
    """The files beneath a folder, by their paths in it."""
    return {
        os.path.relpath(path, folder): os.path.getsize(path)
        for where, _, names in os.walk(folder)
        for path in (os.path.join(where, name) for name in names)
    }


def _owner(name: str, sizes: list[dict[str, int]]) -> int:
    """The rank that saves a file, of those that see it: ranks of a node see the same files."""
    seen_by = [rank for rank, files in enumerate(sizes) if name in files]
    size = sizes[seen_by[0]][name]
    alike = [rank for rank in seen_by if sizes[rank][name] == size]
    return alike[sorted(sizes[seen_by[0]]).index(name) % len(alike)]


def _mapped(path: str, size: int) -> torch.Tensor:
    """The bytes of a file, which are read when they are sent."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


def _room(folder: str, item: StoredItem, uri: str) -> torch.Tensor:
    """A new file of an item's size, to load into.

    Raises:
        ConfigError: If the item is no file, or its name leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, item.name))
    is_file = item.dtype == "uint8" and item.shape is not None and len(item.shape) == 1
    if not is_file or not path.startswith(folder + os.sep):
        raise ConfigError(
            f"{item.name!r} is no file of a Trainer: this checkpoint was saved by something else",
            uri=uri,
            item=item.name,
        )
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if item.nbytes == 0:
        with open(path, "wb"):
            return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=True, size=item.nbytes, dtype=torch.uint8)
