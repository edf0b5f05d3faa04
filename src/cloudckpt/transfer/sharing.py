"""Shares reads between ranks: one rank fetches bytes that several need, and passes them on.

The ranks that need the same requests form a ring. In each round, every rank has fetched one request
from the store; then each sends the bytes that it holds to the next rank, receives those of the
previous rank, and passes these on in turn, until every rank has received all. So a rank reads its
share of the bytes from the store, sends and receives each byte once, and holds a few requests in
memory, however many ranks there are.

A rank that fails continues to receive, so that no other rank waits for it in vain. It also sends
one more message, which reports the failure; the next rank then fails too, and so on around the
ring. The memory for this is allocated at the beginning.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from cloudckpt.errors import TransferCancelledError
from cloudckpt.transfer.download import MERGE_GAP, Download, pack_requests
from cloudckpt.transfer.landing import Segment
from cloudckpt.transfer.memory import bytes_of

__all__ = ["Ring", "RingAllgather", "Share", "digests", "plan_shares", "shared_requests"]

_LARGEST = 8 * 1024**2
_SMALLEST = 256 * 1024
"""The least size of a shared request in bytes; `_LARGEST` is the greatest.

Smaller requests would not be worth their cost; a rank could not hold several larger ones in memory.
"""

_WORTH = 64 * 1024
"""Bytes per rank below which nothing is shared: each rank requests everything from the store."""

_STATUS = 8  # bytes after a message's payload; the first is 1 unless the sender has failed


def digests(segments: Sequence[Segment]) -> torch.Tensor:
    """Returns a hash of each segment's location, to find the segments that several ranks need.

    Returns:
        An int64 tensor with one hash per segment.
    """
    hashes = bytearray()
    for segment in segments:
        where = f"{segment.want.source.key}\0{segment.start}\0{segment.stop}\0{segment.grain}"
        hashes += hashlib.blake2b(where.encode(), digest_size=8).digest()
    if not hashes:
        return _numbers(())
    return torch.frombuffer(hashes, dtype=torch.int64)


@dataclass(frozen=True)
class Share:
    """Segments that the same ranks need.

    Attributes:
        ranks: The ranks, at least two, in ascending order.
        segments: The indices of these segments on this rank; a repeated segment counts once.
    """

    ranks: tuple[int, ...]
    segments: Sequence[int]


def plan_shares(of_ranks: Sequence[torch.Tensor], rank: int, hosts: Sequence[int]) -> list[Share]:
    """Returns the segments of a rank that other ranks need too, grouped by the set of ranks.

    All ranks of a share compute the same share, and find their shares in the same order, so that
    they can process them one by one.

    Args:
        of_ranks: The :func:`digests` of each rank's segments.
        rank: This rank.
        hosts: The host number of each rank; only ranks on the same host share.
    """
    near = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    own_rows = [torch.unique(of_ranks[number]) for number in near]
    rows = torch.cat(own_rows)
    who = torch.cat([torch.full_like(of, n) for of, n in zip(own_rows, near, strict=True)])
    wanted, inverse, count = torch.unique(rows, return_inverse=True, return_counts=True)
    # identifies a set of ranks: the sum of a random number per rank
    drawn = torch.randint(
        -(1 << 62),
        1 << 62,
        (len(of_ranks),),
        generator=torch.Generator().manual_seed(0),
        device="cpu",
    )
    sets = torch.zeros_like(wanted).scatter_add_(0, inverse, drawn[who])
    sets[count < 2] = 0
    own: dict[int, int] = {}  # by hash: the first index on this rank
    for at, number in enumerate(of_ranks[rank].tolist()):
        own.setdefault(number, at)
    numbers, places = _numbers(own), _numbers(own.values())
    own_sets = sets[torch.searchsorted(wanted, numbers)]
    made = []
    for one in torch.unique(own_sets[own_sets != 0]).tolist():
        ranks = who[rows == wanted[sets == one][0]]
        made.append(Share(tuple(sorted(ranks.tolist())), places[own_sets == one].tolist()))
    return sorted(made, key=lambda share: share.ranks)


def _numbers(numbers: Iterable[int]) -> torch.Tensor:
    """Returns an int64 tensor in host memory, whatever the default device."""
    return torch.tensor([*numbers], dtype=torch.int64, device="cpu")


def shared_requests(segments: Sequence[Segment], ranks: int) -> list[list[Segment]] | None:
    """Groups segments that `ranks` ranks need into requests; the result is the same on all of them.

    Returns:
        The requests; None if so few bytes are not worth sharing: each rank then fetches them.
    """
    total = sum(segment.stop - segment.start for segment in segments)
    if total < _WORTH * ranks:
        return None
    limit = min(max(-(-total // ranks), _SMALLEST), _LARGEST)
    ordered = sorted(
        segments, key=lambda one: (one.want.source.key, one.start, one.stop, one.grain)
    )
    return list(pack_requests(ordered, limit=limit, merge_gap=MERGE_GAP))


class Ring(ABC):
    """A ring of the ranks that need the same requests, from the view of one of these ranks."""

    size: int
    """The number of ranks."""

    position: int
    """The index of this rank in the ring, from 0."""

    @abstractmethod
    def exchange(
        self, out: torch.Tensor | None, into: torch.Tensor | None
    ) -> tuple[RuntimeError | None, RuntimeError | None]:
        """Sends `out` to the next rank, and fills `into` with the previous rank's message.

        Both are of dtype uint8; None if there is nothing to send or to receive.

        Returns:
            The error of sending, and that of receiving, if the other rank ended or the connection
            to it broke; None for each that succeeded or was not wanted.
        """


class _Message:
    """A message around the ring: the bytes of a request, and whether its sender has failed."""

    def __init__(self, request: Sequence[Segment], memory: torch.Tensor | None = None) -> None:
        self.nbytes = _size(request)
        size = self.nbytes + _STATUS
        self.all = _allocated(size) if memory is None else memory[:size]

    @property
    def payload(self) -> memoryview:
        return bytes_of(self.all)[: self.nbytes]

    @property
    def is_good(self) -> bool:
        return bool(self.all[self.nbytes] == 1)

    def say(self, *, is_good: bool) -> None:
        self.all[self.nbytes :] = int(is_good)


def _size(request: Sequence[Segment]) -> int:
    return request[-1].stop - request[0].start


def _allocated(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch's for a lack of memory
        raise MemoryError(
            f"{size} bytes of memory could not be allocated to share a part of the checkpoint "
            "between ranks: free memory, or turn sharing off by Config(shared_reads='off')"
        ) from error


class RingAllgather:
    """Fetches this rank's requests, exchanges the bytes with all ranks, and delivers all bytes."""

    def __init__(
        self,
        download: Download,
        ring: Ring,
        requests: Sequence[Sequence[Segment]],
        budget: int,
    ) -> None:
        """Prepares this rank's part, and allocates the memory to report a failure.

        Args:
            download: Fetches and delivers the requests.
            ring: The ranks.
            requests: The requests of all ranks, the same on each.
            budget: About how many bytes of requests this rank may hold in memory at a time.

        Raises:
            MemoryError: If this memory can't be allocated; the other ranks do not learn of it.
        """
        self._download = download
        self._ring = ring
        self._requests = requests
        largest = max(map(_size, requests))
        room = max(2, budget // largest)
        self._ahead = max(1, room // 2)  # requests fetched in advance
        self._room = threading.Semaphore(max(2, room - self._ahead))  # for other ranks' messages
        # buffers to send from and receive into after this rank has failed
        self._spare = _allocated(largest + _STATUS), _allocated(largest + _STATUS)
        self._waiting: deque[Future[_Message]] = deque()
        self._own = iter(range(ring.position, len(requests), ring.size))
        self._failed = False  # this rank
        self._ended = False  # the previous rank has announced that it sends nothing more
        self._silent = False  # this rank has announced its failure, or can't send any more
        self._lost: RuntimeError | None = None

    def run(self) -> None:
        """Carries out this rank's part of the exchange.

        Call it in :meth:`Shared.carry_out`, on all ranks of the ring, even on those that failed.

        Raises:
            TransferCancelledError: If this or another rank has failed. If this rank has failed,
                ``download`` raises the cause.
            RuntimeError: If a rank ended or a connection to it broke.
        """
        for _ in range(self._ahead):
            self._fetch_next()
        for first in range(0, len(self._requests), self._ring.size):
            self._round(self._requests[first : first + self._ring.size])
            if self._silent and self._ended:
                break
        if self._lost is not None:
            raise self._lost
        if self._has_failed():
            why = "cancelled, because the load failed on a rank; see the error of that rank"
            raise TransferCancelledError(why)

    def _fetch_next(self) -> None:
        number = next(self._own, None)
        if number is None or self._has_failed():
            return
        request, fetched = self._requests[number], Future[_Message]()

        def fetch() -> None:
            message = _Message(request)
            self._download.read(request, message.payload)
            fetched.set_result(message)
            self._download.land(request, message.payload)

        self._waiting.append(fetched)
        self._submit(fetch)

    def _submit(self, task: Callable[[], None]) -> bool:
        """Queues a task of the download; returns False, and ends the download, if that fails."""
        try:
            self._download.submit(task)
        except Exception as error:  # noqa: BLE001 - the download raises it, if it is the first
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._download.fail(error)

    def _has_failed(self) -> bool:
        self._failed = self._failed or self._download.cancellation.is_set
        return self._failed

    def _round(self, requests: Sequence[Sequence[Segment]]) -> None:
        """Passes one request of each rank around the ring; fewer in the last round."""
        size, at = self._ring.size, self._ring.position
        held: _Message | None = None
        if at < len(requests):
            held = self._own_message()
        for step in range(size - 1):
            sent, wanted = (at - step) % size, (at - 1 - step) % size
            out: _Message | None = None
            if sent < len(requests) and not self._silent:
                out = self._outgoing(held, requests[sent])
            came: _Message | None = None
            if wanted < len(requests) and not self._ended:
                _wait(lambda seconds: self._room.acquire(timeout=seconds), self._download)
                came = self._incoming(requests[wanted])
            unsent, lost = self._ring.exchange(
                None if out is None else out.all, None if came is None else came.all
            )
            self._lost = self._lost or unsent or lost
            self._silent = self._silent or unsent is not None
            self._failed = self._failed or self._lost is not None
            held = came
            if came is not None:
                self._take(came, requests[wanted], came.is_good and lost is None)
        self._fetch_next()

    def _own_message(self) -> _Message | None:
        """Returns the message with this rank's fetched request; None if the rank has failed."""
        if not self._waiting:
            return None
        fetched = self._waiting.popleft()
        _wait(lambda seconds: bool(futures.wait([fetched], seconds).done), self._download)
        if fetched.done():
            return fetched.result()
        self._failed = True
        return None

    def _incoming(self, request: Sequence[Segment]) -> _Message:
        if not self._has_failed():
            try:
                return _Message(request)
            except MemoryError as error:
                self._fail(error)
        return _Message(request, self._spare[1])

    def _outgoing(self, held: _Message | None, request: Sequence[Segment]) -> _Message:
        if held is None or self._has_failed():
            self._failed = self._silent = True
            held = _Message(request, self._spare[0])
        held.say(is_good=not self._failed)
        return held

    def _take(self, message: _Message, request: Sequence[Segment], is_good: bool) -> None:
        if not is_good:
            self._failed = self._ended = True

        def deliver() -> None:
            try:
                self._download.land(request, message.payload)
            finally:
                self._room.release()

        if self._has_failed() or not self._submit(deliver):
            self._room.release()


def _wait(wait: Callable[[float], bool], download: Download) -> None:
    """Calls ``wait`` with a timeout in seconds until it returns True or the download fails."""
    while not wait(0.2) and not download.cancellation.is_set:
        pass
