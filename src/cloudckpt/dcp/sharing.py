"""Reads that the ranks of a process group share."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import break_off
from cloudckpt.errors import CloudCheckpointError, ProcessGroupError, TransferCancelledError
from cloudckpt.transfer.download import Download
from cloudckpt.transfer.landing import Segment
from cloudckpt.transfer.sharing import Ring, digests, plan_shares, ring_allgather, shared_requests

__all__ = ["Offer", "SharedReads"]


Offer = tuple[str, torch.Tensor]
"""What a rank reports of its reads: its neighbourhood, and a number for each read."""


class SharedReads:
    """The reads that ranks of a group have in common, and how they pass the bytes on.

    All ranks must agree on which requests are shared and how they are cut. So the meeting before
    the load compares whether reads are shared; and reads that each rank's options cut (``verify``,
    ``connections``) are shared only where they are the same. ``memory_budget`` limits how far a
    rank may run ahead.

    Args:
        group: The ranks.
        config: The options.
        segments: What this rank wants.
        told: What all ranks offer, in their order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: Config,
        segments: Sequence[Segment],
        told: Sequence[Offer],
    ) -> None:
        self._group = group
        self._config = config
        self._segments = segments
        self._told = told
        self._is_over = False  # nobody waits for this rank

    @staticmethod
    def offer(segments: Sequence[Segment], shared_reads: str) -> Offer:
        """What a rank reports to the others about its reads; ``shared_reads`` is the option."""
        return socket.gethostname() if shared_reads == "host" else "", digests(segments)

    def carry_out(self, download: Download) -> list[Segment]:
        """Fetches and passes on shared reads; a collective call, to be made within ``download``.

        Returns:
            What is left for this rank to fetch on its own.

        Raises:
            TransferCancelledError: If another rank has failed.
            ProcessGroupError: If the ranks lost each other.
        """
        segments, told = self._segments, self._told
        names = [host for host, _ in told]
        hosts = [names.index(host) for host in names]
        alone = set(range(len(segments)))
        failure: Exception | None = None
        rank = dist.get_rank(self._group)
        for share in plan_shares([of for _, of in told], rank, hosts):
            requests = shared_requests(
                [segments[number] for number in share.segments],
                len(share.ranks),
            )
            if requests is None:
                continue
            alone.difference_update(share.segments)
            ring = _GroupRing(self._group, share.ranks, rank)
            try:
                ring_allgather(download, ring, requests, budget=self._config.memory_budget)
            except (RuntimeError, TransferCancelledError) as error:
                failure = failure or _named(error)
                download.fail(failure)  # ranks of further shares must learn of it
        self._is_over = True
        if failure is not None:
            raise failure
        return [segments[number] for number in sorted(alone)]

    def leave(self) -> None:
        """Lets nobody wait for this rank, if it has raised before all was passed on."""
        if not self._is_over:
            break_off(self._group)


def _named(error: Exception) -> CloudCheckpointError:
    """The error, named if it is a plain one of torch's because the ranks lost each other."""
    if isinstance(error, CloudCheckpointError):
        return error
    made = ProcessGroupError(
        "the ranks lost each other: find out which rank ended first and "
        "why, and start all of them again",
        cause=error,
    )
    made.__cause__ = error
    return made


class _GroupRing(Ring):
    """Ranks of a process group, which send tensors to each other."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.size = len(ranks)
        self.position = ranks.index(rank)
        self._group = group
        self._before = ranks[self.position - 1]
        self._next = ranks[(self.position + 1) % self.size]
        self._device = torch.device(device_for_collectives(group))

    def exchange(
        self, out: torch.Tensor | None, into: torch.Tensor | None
    ) -> tuple[RuntimeError | None, RuntimeError | None]:
        if self._device.type != "cpu":
            return self._exchange_through_device(out, into)
        receive, lost = self._begun(dist.irecv, into, group_src=self._before)
        send, unsent = self._begun(dist.isend, out, group_dst=self._next)
        return unsent or _waited(send), lost or _waited(receive)

    def _begun(
        self, operation: Callable[..., dist.Work | None], tensor: torch.Tensor | None, **peer: int
    ) -> tuple[dist.Work | None, RuntimeError | None]:
        if tensor is None:
            return None, None
        try:
            return operation(tensor, group=self._group, **peer), None
        except RuntimeError as error:
            return None, error

    def _exchange_through_device(
        self, out: torch.Tensor | None, into: torch.Tensor | None
    ) -> tuple[RuntimeError | None, RuntimeError | None]:
        """For groups whose backend can't send host memory."""
        ops = []
        landing = None if into is None else torch.empty_like(into, device=self._device)
        if landing is not None:
            ops.append(dist.P2POp(dist.irecv, landing, None, self._group, 0, self._before))
        if out is not None:
            sent = out.to(self._device)
            ops.append(dist.P2POp(dist.isend, sent, None, self._group, 0, self._next))
        try:
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            if into is not None and landing is not None:
                into.copy_(landing)
        except RuntimeError as error:
            return error, error
        return None, None


def _waited(work: dist.Work | None) -> RuntimeError | None:
    """Waits for an operation; returns why it failed, or None."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        return error
    return None
