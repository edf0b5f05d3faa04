"""``load``: reads a model in safetensors files into tensors, sharded or not."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.model_folder import KeyMapping
from cloudckpt.config import Config
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.planners import CloudLoadPlanner
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

    All ranks call it. Each fetches only the bytes of its shards, straight into tensors that are
    contiguous in host memory, and converts types where they differ. The files have no checksums of
    their own: TLS and the store guard the bytes; this checks that headers and index are sound, and
    that all ranges of a file are of one version of it.

    Args:
        state_dict: What to load: its keys say what, its tensors say where and how sharded.
        uri: The folder of the model, or one safetensors file.
        key_mapping: Returns a tensor's name in the state dict, or None to leave it out; called with
            each name in the files.
        strict: Whether a key that the model lacks, or a tensor that does not fit, is an error;
            otherwise it keeps its value, such as tied weights, which most models store once.
        process_group: The ranks that load; all if not given.
        no_dist: Whether this process loads alone.
        config: Options.

    Returns:
        What was loaded, and what was not.

    Raises:
        CheckpointNotFoundError: If there is no model.
        MissingKeyError: If the model lacks a key of the state dict, and ``strict`` is on.
        ShapeMismatchError: If a shape differs.
        KeyCollisionError: If ``key_mapping`` gives two tensors the same name.
        CheckpointCorruptError: If files are missing, cut off, or not what the format says.
        CheckpointReplacedError: If writers replaced it again and again meanwhile.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """

    def prepare() -> ToLoad:
        reader = CloudStorageReader(uri, config=config, key_mapping=key_mapping)
        return ToLoad(reader, CloudLoadPlanner(reader.checkpoint_id, strict=strict))

    return load_prepared(state_dict, prepare, uri, process_group=process_group, no_dist=no_dist)
