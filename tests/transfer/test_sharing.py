"""Bytes that several ranks want: who fetches them, and how they are handed on."""

import functools
import itertools
import math
import queue
import random
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checksum import CRC32C, Blocks
from cloudckpt.config import Config
from cloudckpt.errors import StoreError, TransferCancelledError
from cloudckpt.transfer import sharing
from cloudckpt.transfer.download import Download, segments_for
from cloudckpt.transfer.landing import BytesSink, Segment, StoredBytes, Wanted
from cloudckpt.transfer.sharing import Ring, RingAllgather, digests, plan_shares, shared_requests
from cloudckpt.transfer.stats import TransferStats
from support.memory_store import MemoryStore

KIB = 1024
BLOCK = 64 * KIB
PATIENCE = 20.0


class Links:
    """Where the messages of ranks wait, one for each; and who is dead."""

    def __init__(self, ranks: int) -> None:
        self.mailboxes = [queue.Queue[torch.Tensor](1) for _ in range(ranks)]
        self.dead: set[int] = set()


class Threads(Ring):
    """A rank that is a thread, and dies after some exchanges if ``lives`` says so."""

    def __init__(self, links: Links, position: int, lives: float = math.inf) -> None:
        self._links, self._lives = links, lives
        self.size = len(links.mailboxes)
        self.position = position

    def exchange(self, out, into):
        self._lives -= 1
        if self._lives < 0:
            self._links.dead.add(self.position)
            raise SystemExit
        after, before = (self.position + 1) % self.size, (self.position - 1) % self.size
        there, here = self._links.mailboxes[after], self._links.mailboxes[self.position]
        lost = missing = None
        if out is not None:
            lost = self._wait(after, lambda: there.put(out.clone(), timeout=0.05))
        if into is not None:
            missing = self._wait(before, lambda: into.copy_(here.get(timeout=0.05)))
        return lost, missing

    def _wait(self, peer, move):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                move()
                return None
            except (queue.Full, queue.Empty):
                if peer in self._links.dead:
                    return RuntimeError("closed by peer")
        return RuntimeError("nothing came")


class Counting(MemoryStore):
    """Counts the bytes that are read, and may fail or damage one range."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.read = 0
        self.fails = False
        self.damages: set[int] = set()

    def get_range(self, key, start, into, **options):
        if self.fails:
            raise StoreError("this one does not answer", uri=self.uri(key))
        info = super().get_range(key, start, into, **options)
        self.read += sum(view.nbytes for view in into)
        if start in self.damages:
            self.damages.discard(start)
            into[0][0] ^= 1
        return info


def stored(name: str, sizes: list[int]) -> tuple[dict[str, bytes], list[StoredBytes]]:
    """Objects of random bytes; each is one item whose blocks have checksums."""
    store, draw = MemoryStore(name), random.Random(0)
    contents, sources = {}, []
    for number, size in enumerate(sizes):
        key, data = f"object-{number}", draw.randbytes(size)
        store.put(key, [memoryview(data)], checksum=CRC32C.of(data))
        sums = [CRC32C.of(data[at : at + BLOCK]) for at in range(0, size, BLOCK)]
        contents[key] = data
        sources.append(StoredBytes(key, 0, size, Blocks(CRC32C, BLOCK, sums), size, key))
    return contents, sources


def run_ranks(work, count):
    """What ``work(rank)`` raises on each of so many threads; None where it returns."""
    raised: list[BaseException | None] = [None] * count

    def one(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - told below
            raised[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a rank waits on"
    return raised


def load(
    stores,
    sources,
    config=Config(connections=4),  # noqa: B008 - frozen
    starve=lambda rank, download: None,
    ring=Threads,
    rounds=1,
):
    """Has each rank, with its store, load all sources; returns the sinks and the errors."""
    links = Links(len(stores))
    sinks = [[BytesSink(source.nbytes) for source in sources] for _ in stores]

    def work(rank: int) -> None:
        download = Download(stores[rank], config, TransferStats())
        starve(rank, download)
        wanted = [
            Wanted(source, 0, source.nbytes, sink, True)
            for source, sink in zip(sources, sinks[rank], strict=True)
        ]
        requests = [*shared_requests(segments_for(wanted, config), len(stores))] * rounds
        place = ring(links, rank)
        download.run(lambda: RingAllgather(download, place, requests, config.memory_budget).run())

    return sinks, run_ranks(work, len(stores))


@pytest.mark.parametrize("ranks", [2, 5])
def test_each_rank_gets_all_and_all_together_read_it_once(ranks):
    name = f"shared-{ranks}"
    contents, sources = stored(name, [3 * 1024 * KIB, 1, 700 * KIB + 3, 12 * 1024 * KIB])
    stores = [Counting(name) for _ in range(ranks)]
    sinks, raised = load(stores, sources)
    assert raised == [None] * ranks
    for of_rank in sinks:
        assert [bytes(sink.data) for sink in of_rank] == list(contents.values())
    total = sum(map(len, contents.values()))
    assert sum(store.read for store in stores) == total
    assert max(store.read for store in stores) <= 2 * total / ranks + 256 * KIB


def test_fewer_bytes_than_ranks_can_share_are_not_shared():
    _, sources = stored("few", [100 * KIB])
    wanted = [
        Wanted(source, 0, source.nbytes, BytesSink(source.nbytes), True) for source in sources
    ]
    assert shared_requests(segments_for(wanted, Config()), 2) is None


def _no_threads(download, started=0):
    submit, tasks = download.submit, itertools.count()

    def refuse(task):
        if next(tasks) >= started:
            raise RuntimeError("can't start new thread")
        submit(task)

    download.submit = refuse


def _no_memory(download):
    def refuse(*_):
        raise MemoryError

    download.read = refuse


class NoRoom(Threads):
    """Rank 0 has no memory for what comes, as soon as it has begun."""

    full = threading.local()

    def exchange(self, out, into):
        self.full.is_full = self.position == 0
        return super().exchange(out, into)


@pytest.fixture
def allocating(monkeypatch):
    usual = sharing._allocated

    def refuse(size):
        if getattr(NoRoom.full, "is_full", False):
            raise MemoryError
        return usual(size)

    monkeypatch.setattr(sharing, "_allocated", refuse)


FAILURES = [
    (None, StoreError),  # its store fails
    (_no_threads, RuntimeError),
    (functools.partial(_no_threads, started=1), RuntimeError),
    (_no_memory, MemoryError),
]


@pytest.mark.parametrize(
    ("lack", "error", "ranks"),
    [*((*failure, ranks) for failure in FAILURES for ranks in (2, 4)), (NoRoom, MemoryError, 3)],
)
def test_a_rank_that_fails_says_why_and_all_end(allocating, lack, error, ranks):
    name = f"{error.__name__}-{ranks}"
    _, sources = stored(name, [40 * 1024 * KIB])
    stores = [Counting(name) for _ in range(ranks)]
    if lack is None:
        stores[0].fails = True
        _, raised = load(stores, sources)
    elif lack is NoRoom:
        _, raised = load(stores, sources, ring=NoRoom)
    else:
        _, raised = load(stores, sources, starve=lambda rank, download: rank or lack(download))
    assert type(raised[0]) is error
    assert "nothing came" not in str(raised[0])
    # one that had all before it heard of it has nothing to complain of
    assert set(map(type, raised[1:])) <= {TransferCancelledError, type(None)}
    assert raised[1] is not None


def test_what_was_damaged_on_the_way_from_the_store_is_fetched_again_by_each_rank():
    contents, sources = stored("damaged", [4 * 1024 * KIB])
    stores = [Counting("damaged") for _ in range(4)]
    stores[0].damages = {0}
    sinks, raised = load(stores, sources)
    assert raised == [None] * 4
    assert all(bytes(sink.data) == contents["object-0"] for [sink] in sinks)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_if_a_rank_dies_all_others_end(steps):
    name = f"dead-{steps}"
    _, sources = stored(name, [16 * 1024 * KIB])

    def ring(links, rank):
        return Threads(links, rank, lives=steps if rank == 1 else math.inf)

    _, raised = load([Counting(name) for _ in range(4)], sources, ring=ring, rounds=2)
    assert type(raised[1]) is SystemExit
    assert {type(raised[rank]) for rank in (0, 2)} == {RuntimeError}
    assert type(raised[3]) is TransferCancelledError


def segments_of(numbers) -> list[Segment]:
    """A segment for each number; equal numbers want the same bytes."""
    return [
        Segment(
            Wanted(
                StoredBytes(f"key-{n % 3}", 0, 1 << 30, None, None, ""), 0, 1, BytesSink(1), True
            ),
            n * KIB,
            (n + 1) * KIB,
            KIB,
        )
        for n in numbers
    ]


@given(
    wants=st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=5),
    data=st.data(),
)
def test_ranks_share_exactly_what_they_want_alike_and_in_the_same_order(wants, data):
    hosts = data.draw(st.lists(st.integers(0, 1), min_size=len(wants), max_size=len(wants)))
    of_ranks = [digests(segments_of(numbers)) for numbers in wants]
    plans = [plan_shares(of_ranks, rank, hosts) for rank in range(len(wants))]
    for rank, numbers in enumerate(wants):
        shared = {}
        for share in plans[rank]:
            assert rank in share.ranks
            for at in share.segments:
                assert numbers[at] not in shared, "once only"
                shared[numbers[at]] = share.ranks
        for number in set(numbers):
            having = tuple(
                other
                for other, of_other in enumerate(wants)
                if number in of_other and hosts[other] == hosts[rank]
            )
            assert shared.get(number) == (having if len(having) > 1 else None)
    for one, other in itertools.combinations(range(len(wants)), 2):
        common = [[s.ranks for s in plans[n] if {one, other} <= {*s.ranks}] for n in (one, other)]
        assert common[0] == common[1]
