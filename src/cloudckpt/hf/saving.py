"""``save``: a model in safetensors files."""

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
    so on with ``model.safetensors.index.json``. When it returns, the model is there and whole. If
    it raises, it does so on every rank, and what was sent is deleted; what was there before is
    untouched, unless the store fails while the files, all of them sent, are made to appear: then
    there is no index, and nobody takes what is there for a model.

    Tensors go from memory to the store. None is gathered: what several ranks have of one part of a
    file they hand to one of them, part after part, in bounded memory.

    Args:
        state_dict: Tensors by name, in dicts if you like: then their names are joined by dots.
            What is replicated is written once.
        uri: The folder: ``s3://bucket/model`` or another location.
        max_shard_size: Most bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``; a
            tensor that has more is alone in its file.
        dtype: What floating-point tensors are converted to; as they are by default.
        fqn_to_file: The file of each tensor instead, by its name or by its number from 1.
        process_group: The ranks that save, if these are not all.
        no_dist: This process alone saves what it has.
        config: Options.

    Raises:
        CheckpointExistsError: If there is a model and ``overwrite`` is off.
        CheckpointConflictError: If another writer wrote there meanwhile.
        UnsupportedTensorError: If something is no tensor, or of a type that the format has not.
        CommitUnknownError: If the store did not say whether it has carried out the last step.
        CloudCheckpointError: The cause, if the ranks that failed did so for the same reason.
        RanksFailedError: If they failed for different reasons, or outside of cloudckpt.
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
        save_prepared(state_dict, prepare, process_group=process_group, no_dist=no_dist)
    except BaseException:
        for writer in made:
            writer.discard()
        raise
