"""torch's format utilities on URIs: convert between DCP checkpoints and ``torch.save`` files.

They correspond to ``torch.distributed.checkpoint.format_utils``; sources and targets may be
``s3://``, ``gs://``, ``az://``, ``file://`` or plain paths.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.checkpoint.format_utils import (
    DynamicMetaLoadPlanner as TorchDynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.api import ToLoad, exists, load_prepared, save
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import beneath, is_committed, is_file
from cloudckpt.checkpoint.shard import check_shards
from cloudckpt.checkpoint.torch_private import create_chunk_list, whole_shape
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.load_plan import CloudLoadPlanner, EverythingPlanner
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidURIError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.torch_files.broadcast import BroadcastingTorchSaveReader
from cloudckpt.torch_files.torch_file import check_destination, load_torch_file, write_torch_file
from cloudckpt.transfer.retry import Retrier, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "Kind",
    "dcp_to_dcp",
    "dcp_to_torch_save",
    "kind_of",
    "torch_save_to_dcp",
]

Kind = Literal["dcp", "torch"]
"""The kind of content at a location: a DCP checkpoint, or a ``torch.save`` file."""


class DynamicMetaLoadPlanner(CloudLoadPlanner, TorchDynamicMetaLoadPlanner):
    """Plans loads from sources without metadata; values may have any type, unlike in torch's class.

    The state dict alone determines what is loaded and how it is sharded.
    """

    def __init__(
        self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True
    ) -> None:
        """Accepts the arguments of torch's class, and ignores them: it always flattens."""
        super().__init__("")

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                check_shards(value, fqn)
                properties, shape = TensorProperties(dtype=value.dtype), whole_shape(value)
                entries[fqn] = TensorStorageMetadata(
                    properties, torch.Size(shape), create_chunk_list(value)
                )
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)


def kind_of(uri: URILike, *, config: Config | None = None) -> Kind:
    """Returns ``"dcp"`` for the location of a checkpoint, ``"torch"`` for a ``torch.save`` file.

    The objects at the location decide, not its name. Any file that is not a checkpoint counts as a
    ``torch.save`` file: only reading it shows whether it is one.

    Raises:
        CheckpointNotFoundError: If there is neither a committed checkpoint nor a file.
        ConfigError: If an option is invalid.
        InvalidURIError: If `uri` is not a valid location.
        StoreError: If the store refuses the request or stays unreachable.
    """
    config = config_or_default(config)
    location, retrier = CheckpointURI.parse(uri), Retrier(config.retry)
    store = open_store(location, config)
    if is_committed(store, location, retrier):
        return "dcp"
    if is_file(lambda key: retrier.call(lambda: store.head(key)), location):
        return "torch"
    hint = beneath(store, location) or "Check the location"
    raise CheckpointNotFoundError(
        f"there is neither a committed checkpoint nor a file here. {hint}", uri=str(location)
    )


def dcp_to_torch_save(
    source: URILike,
    target: URILike,
    *,
    config: Config | None = None,
    trust_pickle: bool = False,
) -> Transferred:
    """Converts a DCP checkpoint into one file of ``torch.save``.

    The file appears, or replaces an existing one, when it is complete; if the conversion fails,
    nothing changes at ``target``, unless the answer to the last request was lost. This takes memory
    for one copy of the state, and ``memory_budget`` bytes (64 MiB by default; for files above 100
    GiB in a cloud store, 1/1500 of the file if that is more). Call it on one rank: it takes no part
    in collectives.

    Args:
        source: The checkpoint, of cloudckpt or of torch.
        target: The file to write, for example ``s3://bucket/run/model.pt``.
        config: Options, for both locations.
        trust_pickle: Whether pickles in the checkpoint may run any code.

    Returns:
        The bytes and requests that were sent.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If bytes of it are missing or damaged.
        CheckpointReplacedError: If the checkpoint was replaced repeatedly meanwhile.
        UntrustedPickleError: If a pickle in it would run code that is not on the allow-list.
        CheckpointExistsError: If there is a file and ``overwrite`` is off.
        CheckpointError: If ``torch.save`` can't write the content.
        ConfigError: If an option is invalid.
        InvalidURIError: If a location is not valid, both are the same, or ``target`` names no file,
            or one with the extension of another format.
        StoreError: If a store refuses a request or stays unreachable, or the disk is full.
    """
    config = config_or_default(config)
    uri, file = _both_ends(source, target)
    check_destination(file, config)
    reader = CloudStorageReader(uri, config=config, trust_pickle=trust_pickle)
    return write_torch_file(_content_of(reader), file, config)


def dcp_to_dcp(
    source: URILike,
    target: URILike,
    *,
    config: Config | None = None,
    trust_pickle: bool = False,
) -> Metadata:
    """Saves the content of a DCP checkpoint again, as a new checkpoint that one rank writes.

    This adds checksums to a checkpoint of torch's own writers, and packs a checkpoint of many ranks
    into few objects. Its notes are saved too. The new checkpoint is committed when it is complete.
    This takes memory for one copy of the state, and ``memory_budget`` bytes (64 MiB by default).
    Call it on one rank: it takes no part in collectives.

    Args:
        source: The checkpoint, of cloudckpt or of torch.
        target: The location of the new checkpoint.
        config: Options, for both locations.
        trust_pickle: Whether pickles in the checkpoint may run any code.

    Returns:
        The committed metadata.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If bytes of it are missing or damaged.
        CheckpointReplacedError: If the checkpoint was replaced repeatedly meanwhile.
        UntrustedPickleError: If a pickle in it would run code that is not on the allow-list.
        CheckpointExistsError: If there is a checkpoint at ``target`` and ``overwrite`` is off.
        CheckpointConflictError: If another writer commits at ``target`` meanwhile.
        CommitUnknownError: If the store did not report whether it carried out the commit.
        ConfigError: If an option is invalid, or ``target`` is the folder of a run.
        InvalidURIError: If a location is not valid, or both are the same.
        StoreError: If a store refuses a request or stays unreachable, or the disk is full.
    """
    config = config_or_default(config)
    uri, to = _both_ends(source, target)
    check_target(to, config)
    reader = CloudStorageReader(uri, config=config, trust_pickle=trust_pickle)
    state = _content_of(reader)
    assert reader.commit is not None  # the load above has read it
    notes = Notes.from_json(reader.commit.notes, str(uri))  # of the same save as the data
    writer = CloudStorageWriter(to, config=config, notes=notes)
    return save(state, storage_writer=writer, no_dist=True)


def _content_of(reader: CloudStorageReader) -> dict[Any, Any]:
    planner = EverythingPlanner(reader.checkpoint_id)
    load_prepared({}, lambda: ToLoad(reader, planner), reader, no_dist=True)
    return planner.content(reader.structure)


def _both_ends(source: URILike, target: URILike) -> tuple[CheckpointURI, CheckpointURI]:
    uri, to = CheckpointURI.parse(source), CheckpointURI.parse(target)
    if uri == to:
        raise InvalidURIError(f"{uri} is both the source and the target: choose another target")
    return uri, to


def check_target(to: CheckpointURI, config: Config) -> None:
    """Checks, before a source is read, that the target has no checkpoint if ``overwrite`` is off.

    Raises:
        CheckpointExistsError: If the target has one.
    """
    if not config.overwrite and exists(to, config=config):
        raise CheckpointExistsError(
            "a checkpoint already exists here and overwrite is off: choose another target, or "
            "replace it with Config(overwrite=True), on the command line with --overwrite",
            uri=str(to),
        )


def torch_save_to_dcp(
    source: URILike,
    target: URILike,
    *,
    config: Config | None = None,
    trust_pickle: bool = False,
) -> Metadata:
    """Converts a file of ``torch.save`` into a DCP checkpoint.

    The checkpoint is committed when it is complete, as by ``cloudckpt.save``. This takes memory for
    one copy of the state, and ``memory_budget`` bytes (64 MiB by default). Call it on one rank: it
    takes no part in collectives.

    Args:
        source: The file; it must contain a dict.
        target: The location of the new checkpoint.
        config: Options, for both locations.
        trust_pickle: Whether the file's pickle may run any code.

    Returns:
        The committed metadata.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointCorruptError: If the file is truncated, damaged, or not one of ``torch.save``.
        CheckpointReplacedError: If the file was replaced repeatedly meanwhile.
        CheckpointError: If the file does not contain a dict.
        UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
        CheckpointExistsError: If there is a checkpoint and ``overwrite`` is off.
        CheckpointConflictError: If another writer commits at ``target`` meanwhile.
        CommitUnknownError: If the store did not report whether it carried out the commit.
        ConfigError: If an option is invalid, or ``target`` is the folder of a run.
        InvalidURIError: If a location is not valid, both are the same, or ``source`` can't be a
            file, such as a bucket.
        StoreError: If a store refuses a request or stays unreachable, or the disk is full.
    """
    config = config_or_default(config)
    uri, to = _both_ends(source, target)
    check_target(to, config)

    def load() -> Any:
        stats = TransferStats(str(uri))
        with Span("load", str(uri), 0) as span:
            try:
                return load_torch_file(uri, config, stats, trust_pickle=trust_pickle)
            finally:
                span.nbytes = stats.snapshot().nbytes

    state = retry_if_replaced(load)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the file contains an object of class {type(state).__name__}, but only a dict can be "
            "converted to a checkpoint: save a state_dict() instead",
            uri=str(uri),
        )
    return save(state, checkpoint_id=to, no_dist=True, config=config)
