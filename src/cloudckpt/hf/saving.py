"""``save``: writes a model in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.api import ToSave, save_prepared
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import collective
from cloudckpt.dcp.save_plan import CloudSavePlanner
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
    fqn_to_file: Mapping[str, int] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
) -> None:
    """Saves tensors, sharded or not, as a model that transformers, vLLM and safetensors read.

    All ranks must call it. It writes ``model.safetensors``, or files named
    ``model-00001-of-00003.safetensors`` and so on with ``model.safetensors.index.json``. When this
    returns, the model is complete and visible. If it raises, it raises on every rank, and the files
    of this save are deleted. An existing model then stays unchanged, unless the store fails while
    the new files are made visible: then there is no index, and readers see no model.

    A rank sends its rows directly from tensor memory. Shards that are smaller than a part are
    handed to the rank that has most of the part; so are tensors that are divided in columns, of
    which a rank has one in memory at a time. Tied weights, which share their memory, are written
    once: the file's metadata has the other names, which :func:`load` reads.

    Args:
        state_dict: Tensors by name; the names of nested dicts are joined by dots. Replicated
            tensors are written once.
        uri: The folder of the model, for example ``s3://bucket/model``.
        max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``; a
            larger tensor gets a file to itself.
        dtype: The type that floating-point tensors are converted to; None converts no tensor.
        fqn_to_file: The number of each tensor's file, from 1, instead of a division by
            ``max_shard_size``.
        process_group: The ranks that save; None for all.
        no_dist: Whether this process saves alone.
        config: Options.

    Raises:
        CheckpointExistsError: If the folder has a model, and ``overwrite`` is off.
        CheckpointConflictError: If another writer has written to the folder meanwhile.
        ConfigError: If ``uri`` is the folder of a run, which can't be a model, too.
        UnsupportedTensorError: If a value is not a tensor, or of a type that the format lacks.
        IncompleteSaveError: If the ranks that save do not have all of a tensor.
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
