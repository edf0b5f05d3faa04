"""``aio.watch``: each checkpoint is told once, by few requests, whatever happens to it."""

import asyncio
import threading
import uuid
from collections import Counter

import pytest
import torch

import cloudckpt
from cloudckpt import Config, aio
from cloudckpt.errors import ConfigError, ConnectionLostError, InvalidURIError
from cloudckpt.stores.base import once
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

from .conftest import RETRY
from .test_aio import _nothing_stays_open  # noqa: F401 - a fixture

RUN = "memory://watched/run"
CONFIG = Config(retry=RETRY)
SOON = 0.005  # seconds between polls


class Counting(MemoryStore):
    """Counts what it is asked; ``polls`` are the listings of the run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: Counter[str] = Counter()

    def list_level(self, prefix, retry=once):
        self.asked["folders"] += 1
        return super().list_level(prefix)

    def list(self, prefix, retry=once):
        self.asked["list"] += 1
        return super().list(prefix)

    def get_range(self, *args, **options):
        self.asked["look"] += 1
        return super().get_range(*args, **options)

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.put(
                f"run/step-{step}/.metadata", [memoryview(uuid.uuid4().bytes + b"b.")], checksum=0
            )

    def tear(self, step: int) -> None:
        name = f"run/step-{step}/__0_0.0123456789abcdef.distcp"
        self.put(name, [memoryview(b"x")], checksum=0)

    def remove(self, *steps: int) -> None:
        for step in steps:
            self.delete(f"run/step-{step}/.metadata")
            self.delete(f"run/step-{step}/__0_0.0123456789abcdef.distcp")


@pytest.fixture
def faulty(serve) -> FaultyStore:
    return serve(FaultyStore(Counting(uuid.uuid4().hex)))


@pytest.fixture
def store(faulty) -> Counting:
    return faulty.inner


class Watched:
    """A watch whose steps are taken one by one."""

    def __init__(self, store: Counting, **options) -> None:
        self._store = store
        self._watch = aio.watch(RUN, interval=SOON, config=CONFIG, **options)

    async def told(self, count: int) -> list[int | None]:
        """The next steps, of which there must be so many."""
        return [(await asyncio.wait_for(anext(self._watch), 60)).step for _ in range(count)]

    async def nothing(self, polls: int = 6) -> None:
        """Nothing is told while it polls so often."""
        end = self._store.asked["folders"] + polls
        found = asyncio.ensure_future(anext(self._watch))
        while self._store.asked["folders"] < end and not found.done():
            await asyncio.sleep(SOON)
        assert not found.done(), found.result()
        self._pending = found

    async def told_after_all(self) -> int | None:
        """What ends the wait of :meth:`nothing`."""
        return (await asyncio.wait_for(self._pending, 60)).step


def test_what_is_there_is_told_in_order_and_then_what_is_new(store) -> None:
    store.commit(10, 9, 100)
    store.tear(50)

    async def watch() -> None:
        watched = Watched(store)
        assert await watched.told(3) == [9, 10, 100]
        await watched.nothing()
        store.commit(300, 200)
        assert sorted([await watched.told_after_all(), *await watched.told(1)]) == [200, 300]

    asyncio.run(watch())


def test_a_checkpoint_is_told_as_a_listing_tells_it(place) -> None:
    config, uri = place.config, f"{place.uri}/step-7"

    async def watch():
        watched = aio.watch(place.uri, interval=0.05, config=config)
        first = asyncio.ensure_future(anext(watched))  # the run is not there yet
        await asyncio.sleep(0.2)
        assert not first.done()
        save = cloudckpt.save
        await asyncio.to_thread(save, {"w": torch.ones(10)}, checkpoint_id=uri, config=config)
        return await asyncio.wait_for(first, 60)

    found = asyncio.run(watch())
    assert [found] == cloudckpt.list_checkpoints(place.uri, config=config)
    assert found.is_committed


def test_a_watch_begins_where_it_is_told_to(store) -> None:
    store.commit(1, 2, 3, 4)
    store.tear(5)

    async def watch() -> None:
        assert await Watched(store, start=3).told(2) == [3, 4]
        newest = Watched(store, start="latest")
        assert await newest.told(1) == [4]
        store.commit(3, 6)
        assert await newest.told(1) == [6]

    asyncio.run(watch())


def test_what_is_committed_late_replaced_or_saved_again_is_told(store) -> None:
    store.commit(*range(10, 20))
    store.tear(5)

    async def watch() -> None:
        watched = Watched(store)
        assert await watched.told(10) == [*range(10, 20)]
        for step in (19, 5):  # the newest is replaced, a torn one becomes whole
            await watched.nothing()
            store.commit(step)
            assert await watched.told_after_all() == step
        await watched.nothing()
        store.remove(19)
        await asyncio.sleep(20 * SOON)
        store.commit(19)  # a deleted one is saved again
        assert await watched.told_after_all() == 19

    asyncio.run(watch())


def test_what_is_deleted_before_its_turn_is_left_out(store) -> None:
    store.commit(1, 2, 3)

    async def watch() -> None:
        watched = Watched(store)
        assert await watched.told(1) == [1]
        store.remove(2)  # while the caller evaluates the first
        assert await watched.told(1) == [3]

    asyncio.run(watch())


def test_a_poll_takes_few_requests(store) -> None:
    store.commit(*range(1000))
    for step in range(0, 1000, 3):
        store.remove(step)
        store.tear(step)

    async def watch() -> None:
        watched = Watched(store, start="latest")
        assert await watched.told(1) == [998]
        store.asked.clear()
        await watched.nothing(polls=10)
        polls = store.asked["folders"]
        # a step that is not committed is looked at under two names
        assert store.asked["look"] <= 2 * 4 * (polls + 1)
        assert store.asked["list"] <= polls + 1  # that of the memory store, within its folders

    asyncio.run(watch())


def test_transient_failures_are_survived_and_lasting_ones_raised(store, faulty) -> None:
    async def watch() -> None:
        faulty.fail("list", ConnectionLostError, calls=[1, 2, 5])
        faulty.fail("get_range", ConnectionLostError, calls=[1, 2])
        store.commit(1)
        watched = Watched(store)
        assert await watched.told(1) == [1]
        store.commit(2)
        assert await watched.told(1) == [2]
        faulty.fail("list", ConnectionLostError, probability=1.0)
        with pytest.raises(ConnectionLostError, match="gave up after"):
            await watched.told(1)

    asyncio.run(watch())


def test_a_watch_that_is_cancelled_or_left_ends(store) -> None:
    async def wait() -> None:
        async for _ in aio.watch(RUN, interval=3600, config=CONFIG):
            pass

    async def watch() -> None:
        waiting = asyncio.ensure_future(wait())
        while not store.asked["folders"]:
            await asyncio.sleep(SOON)
        await asyncio.sleep(4 * SOON)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        store.commit(1)
        async for checkpoint in aio.watch(RUN, interval=SOON, config=CONFIG):
            assert checkpoint.step == 1
            break
        left = aio.watch(RUN, interval=SOON, config=CONFIG)
        await anext(left)
        await left.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(left)

    asyncio.run(watch())


@pytest.mark.parametrize("watch", [aio.watch, cloudckpt.watch], ids=["loop", "thread"])
def test_options_that_make_no_sense_are_refused_at_once(watch) -> None:
    for options in ({"interval": 0}, {"interval": float("nan")}, {"start": -1}, {"start": "first"}):
        with pytest.raises(ConfigError):
            watch(RUN, **options)
    with pytest.raises(ConfigError):
        watch(RUN, step_name="epoch")
    with pytest.raises(InvalidURIError):
        watch("ftp://x/y")


def test_a_thread_without_a_loop_watches_too(store, faulty) -> None:
    store.commit(1, 2)
    watched = cloudckpt.watch(RUN, interval=SOON, start="latest", config=CONFIG)
    assert next(watched).step == 2
    later = threading.Timer(10 * SOON, store.commit, [5])
    later.start()
    assert next(watched).step == 5  # after polls that found nothing
    assert store.asked["folders"] > 1
    later.join()
    faulty.fail("list", ConnectionLostError, probability=1.0)
    with pytest.raises(ConnectionLostError, match="gave up after"):
        next(watched)
