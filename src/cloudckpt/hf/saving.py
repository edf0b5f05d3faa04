"""``save``: writes a model in safetensors files; and ``SafetensorsWriter``, which torch calls."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cloudckpt.api import ToSave, save_prepared
from cloudckpt.checkpoint.baseline import Beginning
from cloudckpt.checkpoint.objects import natural_order
from cloudckpt.checkpoint.shard import check_supported
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.meeting import Meeting, check_together, collective
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.dcp.writer import OurWriter
from cloudckpt.errors import IncompleteSaveError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.events import Span, Transferred
from cloudckpt.hf.commit import ModelCommit, find_older_model, model_location
from cloudckpt.hf.safetensors import Chunk, TensorPlan, bytes_of_size, plan_files, type_name
from cloudckpt.hf.sending import RankWork, plan_work, send_work
from cloudckpt.stores.base import ObjectInfo, Upload
from cloudckpt.transfer.memory import PLAIN, memory_of, settled
from cloudckpt.transfer.retry import open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["SafetensorsWriter", "save"]


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
    returns, the model is complete and visible. If it raises, it raises on every rank, and unless
    the error is a CommitUnknownError, the files of this save are deleted. An existing model then
    stays unchanged, unless the save fails while the new files are made visible: then there is no
    index, and readers see no model.

    Shards of a tensor that is divided along its first dimension are sent directly from tensor
    memory. Shards that are smaller than a part of an upload are handed over to one rank, which
    sends the part. The same applies to shards of a tensor that is divided along another dimension;
    a rank has one such tensor in memory at a time. Tied weights, which share their memory, are
    written once: the file's metadata has the other names, which :func:`load` reads.

    Args:
        state_dict: Tensors by name; the names of nested dicts are joined by dots. Replicated
            tensors are written once.
        uri: The folder of the model, for example ``s3://bucket/model``.
        max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or ``"4GiB"``; a
            larger tensor gets a file to itself.
        dtype: The type that floating-point tensors are converted to; None converts no tensor.
        fqn_to_file: The number of each tensor's file, from 1, by the tensor's name; None divides by
            ``max_shard_size``. It has to have all tensors.
        process_group: The ranks that save; None for all.
        no_dist: Whether this process saves alone.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location, or that of a single file.
        CheckpointExistsError: If the folder has a model, and ``overwrite`` is off.
        CheckpointConflictError: If another writer has written to the folder since the save began.
        ConfigError: If ``uri`` is the folder of a run, which can't be a model, too; or if
            ``max_shard_size`` or ``fqn_to_file`` is invalid.
        UnsupportedTensorError: If a value is not a tensor, or of a type that the format lacks.
        IncompleteSaveError: If the ranks that save do not have all of a tensor.
        ShapeMismatchError: If a tensor has different shapes or types on two ranks.
        CommitUnknownError: If the store did not say whether it carried out the last step.
        CloudCheckpointError: The cause, if all ranks that failed did so for the same reason.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    writer: SafetensorsWriter | None = None
    planner = CloudSavePlanner()

    def prepare() -> ToSave:
        nonlocal writer
        writer = SafetensorsWriter(
            uri,
            max_shard_size=max_shard_size,
            dtype=dtype,
            fqn_to_file=fqn_to_file,
            config=config,
            process_group=process_group,
            planner=planner,
        )
        return ToSave(writer, planner)

    try:
        save_prepared(state_dict, prepare, uri, process_group=process_group, no_dist=no_dist)
    except BaseException:
        if writer is not None:
            writer.discard()
        raise


class _Task(NamedTuple):
    """The work that the coordinator assigns to a rank, sent with the rank's plan.

    Attributes:
        ranks: The number of ranks that save.
        work: What the rank sends and hands over.
        uploads: The uploads of all files.
    """

    ranks: int
    work: RankWork
    uploads: Sequence[Upload]


class SafetensorsWriter(OurWriter):
    """Writes a model as safetensors files, and their index, from any number of ranks.

    Pass it to ``cloudckpt.save`` or torch's functions as ``storage_writer``; :func:`save` says what
    is guaranteed. The files become visible when all of them are complete, and then the index. If a
    save by torch's own functions fails, the store keeps invisible parts, until a lifecycle rule of
    the bucket deletes them; on a disk, ``cloudckpt.sweep`` does.

    Attributes:
        transferred: The bytes and requests that this rank sent in the last save; None before it.
    """

    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        fqn_to_file: Mapping[str, int] | None = None,
        config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        """Prepares to write a model; sends no request.

        Args:
            checkpoint_id: The folder of the model.
            max_shard_size: Maximum bytes of tensors in a file, as a number, ``"5GB"`` or
                ``"4GiB"``.
            dtype: The type that floating-point tensors are converted to; None converts no tensor.
            fqn_to_file: The number of each tensor's file, from 1, by the tensor's name; None
                divides by ``max_shard_size``. It has to have all tensors.
            config: Options; None reads them from the environment.
            process_group: The ranks that save; None for all.
            planner: The planner of the save; if given, tied weights are written once.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is not a valid location, or that of a single file.
            ConfigError: If another argument is invalid.
            UnsupportedTensorError: If the safetensors format lacks ``dtype``.
        """
        super().__init__()
        self.config = config_or_default(config)
        self.max_shard_size = bytes_of_size(max_shard_size)
        self.dtype = dtype
        if dtype is not None:
            type_name(dtype, "dtype")
        self.fqn_to_file = None if fqn_to_file is None else dict(fqn_to_file)
        self.transferred: Transferred | None = None
        self._group = process_group
        self._planner = planner
        self._commit: ModelCommit | None = None
        self.reset(str(CheckpointURI.parse(checkpoint_id)))

    @property
    def checkpoint_id(self) -> str:
        """The location of the model, as a string."""
        return str(self.uri)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the writer for another save, at another location if one is given."""
        if checkpoint_id:
            self.uri = model_location(checkpoint_id)
        self._commit = None
        self._there: Beginning[dict[str, ObjectInfo]] | None = None

    def begin(self, *, commits: bool) -> None:
        if commits and self._there is None:
            view = View(self.uri, self.config)
            self._there = Beginning(view, lambda: find_older_model(view))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        check_together(kwargs.get("use_collectives", True), str(self.uri))
        self.begin(commits=is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                raise UnsupportedTensorError(
                    f"{item.index.fqn} is not a tensor, and safetensors files can only contain "
                    "tensors: leave it out, or save it in a checkpoint",
                    uri=str(self.uri),
                    item=item.index.fqn,
                )
        return dataclasses.replace(plan, storage_data=_ties(plan, self._planner))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plans the files, and begins their uploads; called on the coordinator.

        Raises:
            CheckpointExistsError: If the folder has a model, and ``overwrite`` is off.
            ConfigError: If the folder is that of a run, or ``fqn_to_file`` is invalid.
            IncompleteSaveError: If the ranks do not have all of a tensor.
            ShapeMismatchError: If a tensor has different shapes or types on two ranks.
            StoreError: If the store refuses or stays unreachable.
            UnsupportedTensorError: If the format lacks a tensor's type.
        """
        ties = _ties_of_all_ranks([plan.storage_data for plan in plans])
        tensors = _tensors(plans, self.dtype, ties)
        files = plan_files(tensors, self.max_shard_size, self.fqn_to_file)
        assert self._there is not None
        commit = self._commit = ModelCommit(self.uri, self.config, files, self._there.answer())
        self._there = None  # the next save begins anew
        limits = open_store(self.uri, self.config).capabilities
        sizes, work = plan_work(
            files, len(plans), self.config, limits, by_position=not self.uri.is_cloud
        )
        try:
            uploads = commit.begin(sizes)
        except BaseException:
            self.discard()
            raise
        return [
            dataclasses.replace(plan, storage_data=_Task(len(plans), own, uploads))
            for plan, own in zip(plans, work, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Sends this rank's parts of the files, and returns a future that is done.

        All ranks must call it. The result of the future describes the sent parts for
        :meth:`finish`.

        Raises:
            CloudCheckpointError: If this rank can't open the store or send its parts, or another
                rank can't open the store.
            ShapeMismatchError: If the planner resolves a tensor to another shape than planned.
            UnsupportedTensorError: If a tensor can't be stored.
        """
        task = plan.storage_data
        assert isinstance(task, _Task)
        meeting = Meeting.of(self._group, no_dist=task.ranks == 1)
        stats = TransferStats(str(self.uri), meeting.rank)
        with portable_errors(str(self.uri)), Span("upload", str(self.uri), meeting.rank) as span:
            # a rank without a store would miss in the rounds of the others
            store = meeting.begin(lambda: open_store(self.uri, self.config))
            try:
                parts = send_work(
                    task.work,
                    task.uploads,
                    lambda item: _resolved(plan.items[item], planner),
                    store,
                    self.config,
                    stats,
                    meeting.group,
                )
            finally:
                self.transferred = stats.snapshot()
                span.nbytes = self.transferred.nbytes
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, parts)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the files and the index; called on the coordinator.

        Raises:
            CloudCheckpointError: The errors of :meth:`ModelCommit.complete`, such as a
                CheckpointConflictError if another writer was faster.
        """
        commit, self._commit = self._commit, None
        assert commit is not None
        of_files = zip(*(sent.storage_data for [sent] in results), strict=True)
        commit.complete([[*itertools.chain(*parts)] for parts in of_files])

    def discard(self) -> None:
        """Aborts the uploads of a save that was not committed; errors are only logged."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.abandon()


def _ties(plan: SavePlan, planner: SavePlanner | None) -> dict[str, str]:
    """Maps the name of each tensor with elements on this rank to the name under which it is saved.

    Tensors that share their memory are saved under the first of their names in natural order. The
    result is empty without a planner.
    """
    memory: dict[str, list[Any]] = {}
    for item in plan.items if planner is not None else ():
        assert planner is not None
        tensor, data = planner.resolve_data(item), item.tensor_data
        assert isinstance(tensor, torch.Tensor)
        assert data is not None
        if tensor.numel():
            key = _memory(tensor) or item.index.fqn  # tied to nothing
            memory.setdefault(item.index.fqn, []).append((key, data.size, data.chunk.offsets))
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: first.setdefault(tuple(memory[name]), name)
        for name in sorted(memory, key=natural_order)
    }


def _memory(tensor: torch.Tensor) -> Any:
    """Returns a key that is equal for two tensors only if they are the same elements in memory.

    Returns None if the tensor's memory is unknown, as for an unusual class or layout.
    """
    usual = type(tensor) in PLAIN and tensor.layout == torch.strided
    if not usual or (of := memory_of(tensor)) is None:
        return None
    flags = tensor.is_neg(), tensor.is_conj()
    return of[0].data_ptr(), of[1:], tensor.dtype, tensor.shape, tensor.stride(), flags


def _ties_of_all_ranks(ties: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Maps the name of each tied tensor that is not written to the name under which it is written.

    A name is in the result only if all ranks that have elements of the tensor report that it shares
    memory with the tensor of the same other name.
    """
    of: dict[str, set[str]] = {}
    for ties_of_rank in ties:
        for name, first in ties_of_rank.items():
            of.setdefault(name, set()).add(first)
    return {name: first for name, (first, *others) in of.items() if first != name and not others}


def _tensors(
    plans: Sequence[SavePlan], dtype: torch.dtype | None, ties: Mapping[str, str]
) -> list[TensorPlan]:
    """Returns the tensors of all ranks' plans, in the natural order of their names.

    Args:
        plans: The plans, by rank.
        dtype: The type that floating-point tensors are converted to; None converts no tensor.
        ties: The result of :func:`_ties_of_all_ranks`; its names become aliases.

    Raises:
        IncompleteSaveError: If the ranks do not have all of a tensor.
        ShapeMismatchError: If a tensor has different shapes or types on two ranks.
        UnsupportedTensorError: If the format lacks a tensor's type.
    """
    chunks: dict[str, list[Chunk]] = {}
    stored_as: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            data, name = item.tensor_data, item.index.fqn
            assert data is not None  # see prepare_local_plan
            stored_dtype = data.properties.dtype
            if dtype is not None and stored_dtype.is_floating_point:
                stored_dtype = dtype
            type_name(stored_dtype, name)
            found = stored_as.setdefault(name, (stored_dtype, tuple(data.size)))
            if found != (stored_dtype, tuple(data.size)):
                raise ShapeMismatchError(
                    f"{name} has a different type or shape on rank {rank} than on a lower rank: "
                    "give it the same on all ranks",
                    item=name,
                )
            box = tuple(zip(data.chunk.offsets, data.chunk.sizes, strict=True))
            chunks.setdefault(name, []).append(Chunk(rank, number, box, stored_dtype))
    for name, (stored_dtype, shape) in stored_as.items():
        elements = sum(chunk.nbytes for chunk in chunks[name]) // stored_dtype.itemsize
        # planners refuse shards that overlap, but accept gaps if a rank saves alone
        if elements != math.prod(shape):
            raise IncompleteSaveError(
                f"the shards of {name} have {elements} elements, but the whole tensor has "
                f"{math.prod(shape)}: save on all ranks that have parts of it, and each part once",
                item=name,
            )
    aliases: dict[str, list[str]] = {}
    for name, first in ties.items():
        aliases.setdefault(first, []).append(name)
    return [
        TensorPlan(name, *stored_as[name], chunks[name], aliases.get(name, ()))
        for name in sorted(stored_as.keys() - ties.keys(), key=natural_order)
    ]


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    assert item.tensor_data is not None
    tensor = settled(data).detach()
    check_supported(tensor, item.index.fqn)
    if tensor.shape != item.tensor_data.chunk.sizes:
        raise ShapeMismatchError(
            f"the planner planned {item.index.fqn} with shape "
            f"{tuple(item.tensor_data.chunk.sizes)}, but resolve_data returned a tensor of shape "
            f"{tuple(tensor.shape)}: correct the planner",
            item=item.index.fqn,
        )
    with contextlib.suppress(RuntimeError):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.as_subclass(torch.Tensor)
