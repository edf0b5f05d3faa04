"""Loads a file of ``torch.save`` into the shards of all ranks: one reads, and sends to the rest."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import (
    DynamicMetaLoadPlanner as TorchDynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt.checkpoint.skeletons import NotPlainError, has_tensors
from cloudckpt.checkpoint.torch_file import TorchFile
from cloudckpt.config import Config
from cloudckpt.dcp.batches import (
    BatchReader,
    StoredTensor,
    Targets,
    batches,
    read_failure,
    write_failure,
)
from cloudckpt.dcp.portable import portable_errors
from cloudckpt.dcp.torch_private import (
    create_chunk_list,
    device_for_collectives,
    flatten_state_dict,
)
from cloudckpt.errors import (
    CheckpointError,
    CloudCheckpointError,
    ConfigError,
    InvalidURIError,
    MissingKeyError,
    UnsupportedTensorError,
)
from cloudckpt.transfer.stats import Transferred
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner"]


class DynamicMetaLoadPlanner(TorchDynamicMetaLoadPlanner):
    """torch's planner for sources without metadata, which also takes values that are no tensors.

    What is to be loaded, and how it is sharded, is taken from the state dict alone.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        DefaultLoadPlanner.set_up_planner(self, state_dict, metadata, is_coordinator)
        entries: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                properties = TensorProperties(dtype=value.dtype)
                entries[fqn] = TensorStorageMetadata(
                    properties, value.size(), create_chunk_list(value)
                )
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)


@dataclass(frozen=True)
class _Script:
    """What the reading rank will send to all, in this order.

    Attributes:
        tensors: The tensors.
        values: What is no tensor, as ``torch.save`` writes it.
        world: The ranks that take part.
    """

    tensors: tuple[StoredTensor, ...]
    values: Mapping[str, bytes]
    world: int


class BroadcastingTorchSaveReader(StorageReader):
    """Reads a file of ``torch.save`` at a URI on one rank and broadcasts it to the others.

    Use it with :class:`DynamicMetaLoadPlanner` (ours or torch's), in ``cloudckpt.load`` or in
    ``torch.distributed.checkpoint.load``, to load the file into state dicts of any sharding. Only
    tensors that a state dict asks for are read. Each rank takes ``memory_budget`` (64 MiB by
    default) besides its state, and no rank holds the whole file; tensors that were saved with gaps
    between their elements are held one at a time by the reading rank.

    If the reading rank fails, the others are told, and raise too.

    Attributes:
        checkpoint_id: The location, as a string.
        transferred: What this rank received from the store in the last load.
    """

    def __init__(
        self,
        checkpoint_id: URILike | None = None,
        coordinator_rank: int = 0,
        *,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        trust_pickle: bool = False,
    ) -> None:
        """
        Args:
            checkpoint_id: The file; or name it in the call of ``load``.
            coordinator_rank: The global rank that reads. It must be the first of the group.
            process_group: The group that is given to ``load``, if one is.
            config: Options; the same on all ranks.
            trust_pickle: Whether the file's pickle may run any code.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is no location.
        """
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self.config = config if config is not None else Config()
        self.trust_pickle = trust_pickle
        self.transferred: Transferred | None = None
        self._group = process_group
        self._uri: CheckpointURI | None = None
        self.reset(None if checkpoint_id is None else str(checkpoint_id))

    @property
    def checkpoint_id(self) -> str | None:
        return None if self._uri is None else str(self._uri)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the location can be parsed."""
        try:
            CheckpointURI.parse(checkpoint_id)
        except CloudCheckpointError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Goes to another location, if one is given."""
        if checkpoint_id:
            self._uri = CheckpointURI.parse(checkpoint_id)
        self._forget()

    def _forget(self) -> None:
        self._file: TorchFile | None = None
        self._stored: Mapping[str, Any] = {}
        self._loaded: Mapping[str, Any] | None = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """No metadata: :class:`DynamicMetaLoadPlanner` makes it from the state dict."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Checks the arguments.

        Raises:
            InvalidURIError: If no location was given.
            ConfigError: If another rank than ``coordinator_rank`` coordinates the load.
        """
        if self._uri is None:
            raise InvalidURIError("no file was named: pass checkpoint_id")
        rank = dist.get_rank() if dist.is_initialized() else 0
        if is_coordinator and dist.is_initialized() and rank != self.coordinator_rank:
            raise ConfigError(
                f"rank {rank} coordinates this load, but coordinator_rank is "
                f"{self.coordinator_rank}: pass coordinator_rank={rank}, the first of the group",
                uri=self.checkpoint_id,
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Opens the file, and settles what will be sent; on the reading rank only.

        Raises:
            CheckpointNotFoundError: If there is no such file.
            CheckpointCorruptError: If it can't be read, or is not one of ``torch.save``.
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            MissingKeyError: If it lacks a key.
            UnsupportedTensorError: If an entry is a tensor in the file and none in the state dict,
                or the other way round, or is a kind of tensor that has no plain elements.
        """
        assert self._uri is not None
        with portable_errors(str(self._uri)):
            self._file = TorchFile(self._uri, self.config, trust_pickle=self.trust_pickle)
            self._stored = _entries(self._file.skeleton(), str(self._uri))
            script = self._script(plans)
        return [dataclasses.replace(plan, storage_data=script) for plan in plans]

    def _script(self, plans: list[LoadPlan]) -> _Script:
        kinds = {item.storage_index.fqn: item.type for plan in plans for item in plan.items}
        missing = [fqn for fqn in kinds if fqn not in self._stored]
        if missing:
            raise MissingKeyError(
                f"{len(missing)} keys are not in the file, the first: {missing[:5]}. It has "
                f"{list(self._stored)[:5]}…; remove them from the state dict",
                uri=self.checkpoint_id,
                item=missing[0],
            )
        tensors, values = [], {}
        for fqn, kind in kinds.items():
            stored = self._stored[fqn]
            if isinstance(stored, torch.Tensor) != (kind != LoadItemType.BYTE_IO):
                raise UnsupportedTensorError(
                    f"{fqn} is a {type(stored).__name__} in the file, and the state dict has "
                    f"{'none' if kind == LoadItemType.BYTE_IO else 'a tensor'} for it",
                    uri=self.checkpoint_id,
                    item=fqn,
                )
            if isinstance(stored, torch.Tensor):
                tensors.append(StoredTensor(fqn, stored.dtype, tuple(stored.shape)))
            else:
                values[fqn] = self._pickled(fqn, stored)
        return _Script(tuple(tensors), values, len(plans))

    def _pickled(self, fqn: str, value: Any) -> bytes:
        try:
            holds_tensors = has_tensors(value)
        except NotPlainError:  # an object, which may hide tensors that have no data yet
            holds_tensors, value = False, self._whole()[fqn]
        if holds_tensors:
            raise UnsupportedTensorError(
                f"{fqn} holds tensors in the file, and the planner asks for it as one value: use "
                "a planner that flattens the state dict, and give it the same structure",
                uri=self.checkpoint_id,
                item=fqn,
            )
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def _whole(self) -> Mapping[str, Any]:
        """All of the file, in memory."""
        assert self._file is not None
        if self._loaded is None:
            self._loaded = _entries(self._file.load(), str(self._uri))
        return self._loaded

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads or receives what the ranks need, a batch of at most ``memory_budget`` at a time.

        Raises:
            ShapeMismatchError: If a tensor has another shape in the file than in the state dict.
            CheckpointError: If the reading rank failed; of the same type as there.
        """
        script = plan.storage_data
        assert isinstance(script, _Script)
        uri = str(self._uri)
        with portable_errors(uri):
            try:
                self._receive(script, plan, planner)
            finally:
                if self._file is not None:
                    self.transferred = self._file.transferred
                self._forget()
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    value = script.values[item.storage_index.fqn]
                    planner.load_bytes(item, io.BytesIO(value))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _receive(self, script: _Script, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Takes part in every broadcast even after a failure: the other ranks wait for it."""
        uri, alone = str(self._uri), script.world == 1
        device = "cpu" if alone else device_for_collectives(self._group)
        file, failure = self._file, None
        reader = None if file is None else BatchReader(file, self._stored, self._whole, uri)
        targets = Targets(planner)
        try:
            targets.add_all(plan, script.tensors, uri)
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        for batch in batches(script.tensors, self.config.memory_budget // 2):
            room = batch.room()
            if reader is not None:
                failure = failure or _failure_of(lambda: reader.fill(batch, room))  # noqa: B023
                if failure is not None:
                    write_failure(room, failure, uri)
            if not alone:
                room = room.to(device)
                dist.broadcast(room, src=self.coordinator_rank, group=self._group)
            if (sent := read_failure(room)) is not None:
                raise failure or sent
            failure = failure or _failure_of(lambda: targets.deliver(batch, room))  # noqa: B023
        if failure is not None:
            raise failure
        targets.commit()


def _failure_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - raised when no other rank waits for this one
        return error
    return None


def _entries(state: Any, uri: str) -> dict[str, Any]:
    """The entries of a file by the names that planners give them, flattened and not."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the file holds a {type(state).__name__}, and only a dict can be loaded by key",
            uri=uri,
        )
    try:
        flattened, _ = flatten_state_dict(state)
    except ValueError as exc:
        raise CheckpointError(
            "two entries of the file have the same name when it is flattened", uri=uri, cause=exc
        ) from exc
    return {**{str(key): value for key, value in state.items()}, **flattened}
