"""Loads a ``torch.save`` file into the shards of all ranks: one rank reads and broadcasts it."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from cloudckpt.checkpoint.shard import travels_as_bytes
from cloudckpt.checkpoint.torch_private import device_for_collectives, flatten_state_dict
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.load_plan import check_types, conversions
from cloudckpt.dcp.meeting import LOADING, Meeting
from cloudckpt.dcp.reader import OurReader
from cloudckpt.dcp.shared_memory import SharedMemory, in_memory
from cloudckpt.errors import (
    CheckpointError,
    ConfigError,
    InvalidURIError,
    MissingKeyError,
    ShapeMismatchError,
    UnsupportedTensorError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.torch_files.torch_file import load_torch_file
from cloudckpt.transfer.landing import copy_into
from cloudckpt.transfer.memory import PLAIN, settled, why_not_filled
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["BroadcastingTorchSaveReader", "check_fillable"]

_BATCH = 16 * 1024 * 1024  # bytes

_Target = tuple[ReadItem, torch.Tensor]
"""torch's description of a part of a tensor in the file, and the tensor of this rank to fill."""


class _Script(NamedTuple):
    """The entries of a file, which the reading rank sends to the others before the tensors.

    Attributes:
        tensors: The element type and shape of each tensor, by name, in the order of the broadcasts.
        values: All values that are not tensors, pickled by ``torch.save``.
        world: The number of ranks that take part.
        reader: The rank that reads the file.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    values: dict[str, bytes]
    world: int
    reader: int


class BroadcastingTorchSaveReader(OurReader):
    """Reads a ``torch.save`` file at a URI on one rank and broadcasts it to the others.

    Use it with :class:`~cloudckpt.format_utils.DynamicMetaLoadPlanner` (or torch's), in
    ``cloudckpt.load`` or in ``torch.distributed.checkpoint.load``, to load the file into state
    dicts of any sharding. Besides their state, the reading rank needs host memory for the whole
    file, and each rank needs memory for a batch of up to 16 MiB of it, or for one larger tensor, on
    the device that broadcasts.

    If a rank fails, all ranks stop before the next batch, and raise. All ranks of the default
    process group must load.

    Attributes:
        checkpoint_id: The location of the file, as a string; None if none was given.
        transferred: The bytes and requests of this rank's last read of the file; None on ranks that
            did not read it.
    """

    def __init__(
        self,
        checkpoint_id: URILike | None = None,
        coordinator_rank: int = 0,
        *,
        config: Config | None = None,
        trust_pickle: bool = False,
    ) -> None:
        """
        Args:
            checkpoint_id: The location of the file, if it is not passed to ``load``.
            coordinator_rank: Not used: the rank that coordinates the load reads the file.
            config: Options; None reads them from the environment.
            trust_pickle: Whether the file's pickle may run any code.

        Raises:
            ConfigError: If ``config`` is not a Config.
            InvalidURIError: If ``checkpoint_id`` is not a valid location.
        """
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self.config = config_or_default(config)
        self.trust_pickle = trust_pickle
        self.transferred: Transferred | None = None
        self._uri: CheckpointURI | None = None
        self.reset(None if checkpoint_id is None else str(checkpoint_id))

    @property
    def checkpoint_id(self) -> str | None:
        return None if self._uri is None else str(self._uri)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the reader for another load, from another location if one is given."""
        if checkpoint_id:
            self._uri = CheckpointURI.parse(checkpoint_id)
        self.transferred = None
        self._content: dict[str, Any] = {}  # the content of the file; empty on other ranks

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Returns empty metadata: the planner makes it from the state dict."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Checks the location.

        Raises:
            InvalidURIError: If no location was given.
        """
        if self._uri is None:
            raise InvalidURIError("a load needs a location: pass checkpoint_id")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Reads the file, and adds the list of entries to broadcast to the ranks' plans.

        Called on the reading rank only.

        Raises:
            CheckpointNotFoundError: If the file does not exist.
            CheckpointCorruptError: If the file is truncated, damaged, or was not written by
                ``torch.save``.
            CheckpointReplacedError: If the file was replaced or deleted meanwhile.
            InvalidURIError: If the location can't be that of a file.
            StoreError: If the store refuses or stays unreachable.
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            CheckpointError: If the file has no dict, or two of its entries get the same name.
            MissingKeyError: If the file lacks a key of the state dict.
            UnsupportedTensorError: If an entry is a tensor in the file but not in the state dict,
                or vice versa, or is a kind of tensor without plain elements, or another value that
                contains tensors.
            ConfigError: If only some of the ranks load.
        """
        assert self._uri is not None
        if len(plans) > 1 and len(plans) != dist.get_world_size():
            raise ConfigError(
                f"{len(plans)} of {dist.get_world_size()} ranks load, but this reader broadcasts "
                "to all: load on all ranks, or pass no_dist=True",
                uri=self.checkpoint_id,
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        stats = TransferStats(str(self._uri), rank)
        with portable_errors(str(self._uri)):
            state = load_torch_file(self._uri, self.config, stats, trust_pickle=self.trust_pickle)
            self.transferred = stats.snapshot()
            self._content = _by_name(state, str(self._uri))
            types = {item.storage_index.fqn: item.type for plan in plans for item in plan.items}
            script = self._script(types, len(plans), rank)
        return [dataclasses.replace(plan, storage_data=script) for plan in plans]

    def _script(self, types: Mapping[str, LoadItemType], world: int, reader: int) -> _Script:
        script = _Script({}, {}, world, reader)
        if missing := [fqn for fqn in types if fqn not in self._content]:
            raise MissingKeyError(
                f"the file lacks {len(missing)} of the state dict's keys, such as {missing[:5]}: "
                "remove them from the state dict, or rename them to names of the file, such as "
                f"{list(self._content)[:5]}",
                uri=self.checkpoint_id,
                item=missing[0],
            )
        for fqn, item_type in types.items():
            stored = self._content[fqn]
            if why := _why_not_sent(stored, item_type != LoadItemType.BYTE_IO):
                raise UnsupportedTensorError(
                    f"{fqn} in the file {why}", uri=self.checkpoint_id, item=fqn
                )
            if isinstance(stored, torch.Tensor):
                script.tensors[fqn] = stored.dtype, tuple(stored.shape)
            else:
                torch.save(stored, buffer := io.BytesIO())
                script.values[fqn] = buffer.getvalue()
        return script

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills this rank's state from broadcasts of all tensors that any rank loads.

        Raises:
            ShapeMismatchError: If a tensor has a different shape in the file and the state dict.
            UnsupportedTensorError: If a tensor of the state dict can't be loaded into, or its type
                can't hold what the file has.
            KeyCollisionError: If tensors that share memory have different values in the file.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        with portable_errors(self.checkpoint_id), Span("load", str(self._uri), rank) as span:
            span.nbytes = 0 if self.transferred is None else self.transferred.nbytes
            try:
                self._receive(plan.storage_data, plan, planner)
            finally:
                self._content = {}
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _receive(self, script: _Script, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Broadcasts the tensors in batches, when all ranks are ready; fills this rank's state.

        Values that are not tensors are taken from ``script``.
        """
        meeting = Meeting.of(None, no_dist=script.world == 1)
        device = "cpu" if meeting.group is None else device_for_collectives(meeting.group)
        targets = meeting.begin(lambda: self._targets(script, plan, planner), during=LOADING)
        order = [target for fqn in script.tensors for target in targets.get(fqn, ())]
        shared = SharedMemory([(item.dest_index, in_memory(tensor)) for item, tensor in order])
        last, filled = dict[str, torch.Tensor](), itertools.count()

        def make_room(names: Sequence[str]) -> dict[str, torch.Tensor]:
            """Fills this rank's parts of the last batch, and returns tensors for the next one."""
            for fqn, whole in last.items():
                for item, tensor in targets.get(fqn, ()):
                    copy_into(tensor, whole[_region(item)])
                    shared.note(next(filled))
                del whole
            last.clear()  # before there is room for the next
            if not names:
                shared.check(self.checkpoint_id)
            return {fqn: self._room(fqn, *script.tensors[fqn], device) for fqn in names}

        for names in (*_batches(script.tensors), ()):  # the last one only fills
            last = meeting.begin(functools.partial(make_room, names), during=LOADING)
            if meeting.group is not None:
                _broadcast(last, script.reader)
        for item, tensor in order:
            planner.commit_tensor(item, tensor)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(script.values[item.storage_index.fqn]))

    def _room(
        self, fqn: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
    ) -> torch.Tensor:
        """Returns a tensor to broadcast on ``device``, in row-major order.

        On the rank that read the file this is the file's tensor; on the other ranks it is
        uninitialized, and receives the broadcast.
        """
        stored: torch.Tensor | None = self._content.get(fqn)
        if stored is not None:
            plain = stored.detach().resolve_conj().resolve_neg()
            return plain.to(device, memory_format=torch.contiguous_format).contiguous()
        return torch.empty(shape, dtype=dtype, device=device)

    def _targets(
        self, script: _Script, plan: LoadPlan, planner: LoadPlanner
    ) -> dict[str, list[_Target]]:
        """Returns the tensors of this rank to fill, by the names of the tensors in the file.

        Raises:
            ShapeMismatchError: If a tensor has another shape in the file than in the state dict.
            UnsupportedTensorError: If a tensor can't be filled, or can't hold the file's values.
        """
        targets: dict[str, list[_Target]] = {}
        metadata = cast(DefaultLoadPlanner, planner).metadata
        assert metadata is not None  # made from the state dict
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            fqn = item.storage_index.fqn
            entry, (_, stored) = metadata.state_dict_metadata[fqn], script.tensors[fqn]
            assert isinstance(entry, TensorStorageMetadata)
            if tuple(entry.size) != stored:
                raise ShapeMismatchError(
                    f"{fqn} has shape {stored} in the file, but {tuple(entry.size)} in the state "
                    "dict: load it into a tensor of the file's shape",
                    uri=self.checkpoint_id,
                    item=fqn,
                )
            tensor = settled(planner.resolve_tensor(item)).detach()
            check_fillable(tensor, fqn, str(self._uri))
            targets.setdefault(fqn, []).append((item, tensor))
        tensors = {fqn: tensor for fqn, [(_, tensor), *_] in targets.items()}
        types = {fqn: dtype for fqn, (dtype, _) in script.tensors.items()}
        check_types(conversions(tensors, types.get), str(self._uri), logs=bool(self._content))
        return targets


def _broadcast(tensors: Mapping[str, torch.Tensor], reader: int) -> None:
    for whole in tensors.values():
        if whole.numel():
            dist.broadcast(whole.reshape(-1).view(torch.uint8), src=reader)


def _batches(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[list[str]]:
    """Yields the tensors' names in batches: of up to 16 MiB together, or one larger tensor."""
    names, total = list[str](), 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if names and total + nbytes > _BATCH:
            yield names
            names, total = [], 0
        names.append(name)
        total += nbytes
    if names:
        yield names


def _region(item: ReadItem) -> tuple[slice, ...]:
    """Returns the position of an item's elements in the whole tensor.

    The item has the offset of a chunk of the state dict, and offsets within this chunk.
    """
    begin = item.storage_index.offset or (0,) * len(item.lengths)
    parts = zip(begin, item.storage_offsets, item.lengths, strict=True)
    return tuple(slice(first + offset, first + offset + size) for first, offset, size in parts)


def check_fillable(tensor: torch.Tensor, name: str, uri: str) -> None:
    """Checks that a tensor of the state dict can be filled in place.

    Raises:
        UnsupportedTensorError: If it can't, for example because it has no memory of its own.
    """
    why = "" if travels_as_bytes(tensor) else why_not_filled(tensor)
    if why:
        raise UnsupportedTensorError(
            f"{name} can't be loaded into the tensor of the state dict: {why}", uri=uri, item=name
        )


def _why_not_sent(stored: Any, wants_tensor: bool) -> str:
    """Returns why an entry of the file can't be loaded as planned; empty if it can be loaded."""
    if isinstance(stored, torch.Tensor) != wants_tensor:
        wanted = "a tensor" if wants_tensor else "another kind of value"
        return f"is a {type(stored).__name__}, but the state dict has {wanted}: use the file's type"
    if wants_tensor and (
        type(stored) not in PLAIN or stored.is_quantized or stored.layout != torch.strided
    ):
        return (
            f"is a {type(stored).__name__} of layout {stored.layout}, which can't be sharded: "
            "convert it to a dense tensor and save it again"
        )
    leaves = () if wants_tensor else torch.utils._pytree.tree_leaves(stored)
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return (
            "contains tensors, but the state dict has one value for it: give the state dict the "
            "dicts and lists of the file; tensors within other objects can't be loaded"
        )
    return ""


def _by_name(state: Any, uri: str) -> dict[str, Any]:
    """Returns the entries of a nested state by name: the keys down to an entry, joined by dots.

    Entries of the outermost dict, whole dicts included, are also returned under their own keys.

    Raises:
        CheckpointError: If ``state`` is not a dict, or two of its entries get the same name.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the file contains a {type(state).__name__}, but only a dict can be loaded by key: "
            "read it with cloudckpt.files.load_file and torch.load",
            uri=uri,
        )
    try:
        flattened, _ = flatten_state_dict(state)
    except ValueError as exc:
        raise CheckpointError(
            "two entries of the file have nested keys that join to the same name: rename one",
            uri=uri,
            cause=exc,
        ) from exc
    return {**{str(key): value for key, value in state.items()}, **flattened}
