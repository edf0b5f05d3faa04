"""``load``: reads a model in safetensors files into tensors, sharded or not."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.model_folder import KeyMapping
from cloudckpt.config import Config
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.meeting import collective
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.report import LoadReport
from cloudckpt.uri import URILike

__all__ = ["load"]


@collective("cloudckpt.hf.load")
def load(
    state_dict: dict[str, Any],
    uri: URILike,
    *,
    key_mapping: KeyMapping | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Loads a model in safetensors files into a state dict, in place.

    All ranks must call it. Each rank reads only the bytes of its shards, directly into tensors that
    are contiguous in host memory, and converts types where they differ. The files have no checksums
    of their own: TLS and the store protect the bytes. This function checks that headers and index
    are valid, and that all ranges of a file are read from one version of the file.

    Args:
        state_dict: The state dict to load into: its keys are the tensors to load, and its tensors
            are filled in place, each with the shards that it has.
        uri: The folder of the model, or one safetensors file.
        key_mapping: Called with each name in the files; returns the tensor's name in the state
            dict, or None to leave the tensor out.
        strict: Whether it is an error if the model lacks a key, or a tensor does not fit. If False,
            such tensors keep their values, for example tied weights, which most models store once.
        process_group: The ranks that load; None for all.
        no_dist: Whether this process loads alone.
        config: Options.

    Returns:
        The names that were loaded, missing, unexpected, or converted.

    Raises:
        CheckpointNotFoundError: If there is no model at ``uri``.
        MissingKeyError: If the model lacks a key of the state dict, and ``strict`` is on.
        ShapeMismatchError: If a shape differs.
        KeyCollisionError: If ``key_mapping`` gives two tensors the same name.
        CheckpointCorruptError: If files are missing, truncated, or violate the format.
        CheckpointReplacedError: If the model was replaced meanwhile, again and again.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """

    def prepare() -> ToLoad:
        reader = CloudStorageReader(uri, config=config, key_mapping=key_mapping)
        return ToLoad(reader, CloudLoadPlanner(reader.checkpoint_id, strict=strict))

    return load_prepared(state_dict, prepare, uri, process_group=process_group, no_dist=no_dist)
