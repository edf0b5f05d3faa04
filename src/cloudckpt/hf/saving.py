"""``save``: writes a model in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.api import ToSave, save_prepared
from cloudckpt.config import Config
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.hf.writer import SafetensorsWriter
from cloudckpt.uri import URILike

__all__ = ["save"]


@collective("cloudckpt.hf.save")
def save(
    state_dict: dict[str, Any],
    uri: URILike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    fqn_to_file: Mapping[str, str | int] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
) -> None:
    """Saves tensors, sharded or not, as a model that transformers, vLLM and safetensors read.

    All ranks call it. It writes ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and
    so on with ``model.safetensors.index.json``. When this returns, the model is there and complete.
    If it raises, it raises on every rank, and what was sent is deleted; what was there before is
    untouched, unless the store fails after all files are sent, while they are made visible: then
    there is no index, and readers find no model.

    A rank sends its rows straight from memory. What is smaller than a part, and tensors that are
    cut in columns, go through the rank that has most of the file, which holds one such tensor at a
    time. Tied weights, which are one memory at the call, are written once: a file has the other
    names in its metadata, where :func:`load` finds them.

    Args:
        state_dict: Tensors by name; nested dicts are allowed, whose names are joined by dots.
            Replicated tensors are written once.
        uri: The folder: ``s3://bucket/model`` or another location.
        max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``; a
            larger tensor gets a file to itself.
        dtype: The type that floating-point tensors are converted to; by default none are.
        fqn_to_file: Instead, the file of each tensor, by its name or by its number from 1.
        process_group: The ranks that save; all if not given.
        no_dist: Whether this process alone saves what it has.
        config: Options.

    Raises:
        CheckpointExistsError: If there is a model and ``overwrite`` is off.
        CheckpointConflictError: If another writer wrote there meanwhile.
        ConfigError: If it is the folder of a run, which is never a model, too.
        UnsupportedTensorError: If a value is not a tensor, or of a type that the format lacks.
        IncompleteSaveError: If the ranks that save have only parts of a tensor.
        CommitUnknownError: If the store did not say whether it carried out the last step.
        CloudCheckpointError: The cause, if all ranks that failed did so for the same reason.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    made: list[SafetensorsWriter] = []
    planner = CloudSavePlanner()

    def prepare() -> ToSave:
        writer = SafetensorsWriter(
            uri,
            max_shard_size=max_shard_size,
            dtype=dtype,
            fqn_to_file=fqn_to_file,
            config=config,
            process_group=process_group,
            planner=planner,
        )
        made.append(writer)
        return ToSave(writer, planner)

    try:
        save_prepared(state_dict, prepare, uri, process_group=process_group, no_dist=no_dist)
    except BaseException:
        for writer in made:
            writer.discard()
        raise
