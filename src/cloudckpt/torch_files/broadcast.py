"""Loads a ``torch.save`` file into the shards of all ranks: one rank reads and broadcasts it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.reader import OurReader
from cloudckpt.errors import ConfigError, InvalidURIError
from cloudckpt.events import Span, Transferred
from cloudckpt.torch_files.batches import FileTensor, Targets, batches
from cloudckpt.torch_files.contents import FileContents
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["BroadcastingTorchSaveReader"]


@dataclass(frozen=True)
class _Offer:
    """What a rank offers before it takes part.

    Attributes:
        group: The size of the group that it will use, and a hash of its ranks.
        limit: The largest batch, in bytes, that it has memory for.
    """

    group: tuple[int, int]
    limit: int


@dataclass(frozen=True)
class _Script:
    """What the reading rank will send to all, in this order.

    Attributes:
        tensors: The tensors.
        values: Everything that is not a tensor, as written by ``torch.save``.
        world: How many ranks take part.
        limit: Most bytes of a batch.
    """

    tensors: tuple[FileTensor, ...]
    values: Mapping[str, bytes]
    world: int
    limit: int


class BroadcastingTorchSaveReader(OurReader):
    """Reads a ``torch.save`` file at a URI on one rank and broadcasts it to the others.

    Use it with :class:`DynamicMetaLoadPlanner` (ours or torch's), in ``cloudckpt.load`` or in
    ``torch.distributed.checkpoint.load``, to load the file into state dicts of any sharding. Only
    tensors that a state dict asks for are read. Each rank uses ``memory_budget`` (64 MiB by
    default) besides its state, and no rank holds the whole file; the reading rank holds tensors
    saved with gaps between their elements one at a time.

    If a rank fails or is interrupted, all ranks stop before the next batch, and raise.

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
            checkpoint_id: The file, if it is not passed to ``load``.
            coordinator_rank: The global rank that reads. It must be the first in the group.
            process_group: The group passed to ``load``, if any.
            config: Options.
            trust_pickle: Whether the file's pickle may run any code.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is not a valid location.
        """
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self.config = config_or_default(config)
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
        return CheckpointURI.accepts(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switches to another location, if given."""
        if checkpoint_id:
            self._uri = CheckpointURI.parse(checkpoint_id)
        self.transferred = None
        self._forget()

    def _forget(self) -> None:
        self._contents: FileContents | None = None
        self._room = self._host = torch.empty(0, device="cpu")  # of one batch

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Returns empty metadata: :class:`DynamicMetaLoadPlanner` makes it from the state dict."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Checks the arguments.

        Raises:
            InvalidURIError: If no location was given.
            ConfigError: If a rank other than ``coordinator_rank`` coordinates the load.
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
        """Allocates memory: a rank without enough fails here, where no other rank waits for it."""
        limit, group, device = self.config.memory_budget // 2, (1, 0), "cpu"
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(self._group)
            group, device = (len(ranks), hash(tuple(ranks))), device_for_collectives(self._group)
        self._room = self._host = _room(limit, device)
        return dataclasses.replace(plan, storage_data=_Offer(group, limit))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Opens the file and decides what will be sent; on the reading rank only.

        Raises:
            CheckpointNotFoundError: If there is no such file.
            CheckpointCorruptError: If it can't be read, or is not a ``torch.save`` file.
            UntrustedPickleError: If its pickle would run code that is not on torch's allow-list.
            MissingKeyError: If it lacks a key.
            UnsupportedTensorError: If an entry is a tensor in the file but not in the state dict,
                or vice versa, or is a kind of tensor without plain elements.
            ConfigError: If the ranks' readers use a different group than the load.
        """
        assert self._uri is not None
        with portable_errors(str(self._uri)):
            limit = self._agreed(plans)
            if not self._room.is_cpu:
                self._host = _room(limit, "cpu")
            self._contents = FileContents(
                self._uri, self.config, trust_pickle=self.trust_pickle, rank=self.coordinator_rank
            )
            tensors, values = self._contents.select(
                {item.storage_index.fqn: item.type for plan in plans for item in plan.items}
            )
        script = _Script(tensors, values, len(plans), limit)
        return [dataclasses.replace(plan, storage_data=script) for plan in plans]

    def _agreed(self, plans: list[LoadPlan]) -> int:
        """Most bytes of a batch, after checking that all ranks use the same group."""
        offers = [plan.storage_data for plan in plans]
        groups = {offer.group for offer in offers}
        if len(plans) > 1 and (len(groups) > 1 or groups.pop()[0] != len(plans)):
            raise ConfigError(
                f"{len(plans)} ranks load, but the readers of some broadcast in another group: "
                "give the process_group of load to each BroadcastingTorchSaveReader, too",
                uri=self.checkpoint_id,
            )
        return min(int(offer.limit) for offer in offers)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads or receives what the ranks need, a batch of at most ``memory_budget`` at a time.

        A rank returns early if another rank has failed; torch then raises the failure on all.

        Raises:
            ShapeMismatchError: If a tensor has a different shape in the file and the state dict.
            UnsupportedTensorError: If a tensor of the state dict can't be loaded into, or its type
                can't hold what the file has.
            CheckpointReplacedError: If the file was replaced meanwhile.
            StoreError: If the store refuses or stays unreachable.
        """
        script, uri = plan.storage_data, str(self._uri)
        assert isinstance(script, _Script)
        rank = dist.get_rank() if dist.is_initialized() else 0
        with portable_errors(uri), Span("load", uri, rank) as span:
            try:
                self._receive(script, plan, planner)
            finally:
                if self._contents is not None:
                    self.transferred = self._contents.file.transferred
                    span.nbytes = self.transferred.nbytes
                self._forget()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _receive(self, script: _Script, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Receives batch after batch as long as no rank has failed.

        Before each batch the ranks exchange whether they have failed. A rank that fails or is
        interrupted stays until then: if it left at once, the others would wait for it in vain.
        """
        room, host, contents = self._room, self._host, self._contents
        failures: list[BaseException] = []
        failed = torch.zeros(1, dtype=torch.uint8, device=room.device)
        with _kept(failures):
            reads = contents is not None
            targets = Targets(plan, planner, script.tensors, str(self._uri), logs=reads)
        for batch in batches(script.tensors, script.limit):
            if contents is not None and not failures:
                with _kept(failures):
                    contents.fill(batch, host)
                    if room is not host:
                        room[: batch.size].copy_(host[: batch.size])
            failed.fill_(bool(failures))
            if script.world > 1:
                with _kept(failures, interrupts_only=True):
                    dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
            if failed:
                break
            if script.world > 1:
                with _kept(failures, interrupts_only=True):
                    dist.broadcast(room[: batch.size], src=self.coordinator_rank, group=self._group)
            with _kept(failures):
                targets.deliver(batch, room)
        if failures:
            raise failures[0]
        if failed:
            return
        targets.commit()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(script.values[item.storage_index.fqn]))


def _room(nbytes: int, device: str) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _kept(failures: list[BaseException], *, interrupts_only: bool = False) -> Iterator[None]:
    """Adds what is raised to ``failures``; an interrupted collective has taken place, too."""
    try:
        yield
    except BaseException as error:
        if interrupts_only and isinstance(error, Exception):
            raise  # the group is broken, nobody waits
        failures.append(error)
