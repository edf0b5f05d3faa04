"""Looking at checkpoints from an event loop: the same answers and errors, and the loop goes on."""

import asyncio
import dataclasses
import gc
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy, aio, errors
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectInfo, Retry, once
from cloudckpt.uri import CheckpointURI
from faults.refusals import GATEWAYS
from support.memory_store import MemoryStore
from support.wire.faults import Reset, Respond
from support.wire.hop import Fault, Hop

from .conftest import Place, on


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    """No thread that asks or waits, and no warning about what is left open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield
        deadline = time.monotonic() + 20
        while asking() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert asking() == []
        gc.collect()


def asking() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("cloudckpt-aio", "cloudckpt-list"))]


def put(place: Place, *names: str, data: bytes = b"x") -> None:
    uri = CheckpointURI.parse(place.uri)
    store = registry.open_store(uri, place.config)
    for name in names:
        view = memoryview(data)
        checksum = store.capabilities.checksum.of(view)
        store.put(uri.key(name), [view], checksum=checksum)


def commit(place: Place, *steps: int, data: bytes = b"b.") -> None:
    for step in steps:
        put(
            place, f"step-{step}/__0_0.0123456789abcdef.distcp", f"step-{step}/.metadata", data=data
        )


# questions


def test_the_answers_are_those_of_the_functions(place) -> None:
    config = place.config
    commit(place, 9, 10)
    put(place, "step-11/__0_0.0123456789abcdef.distcp", "logs/events", "ein lauf/.metadata")
    put(place, "step-12/.metadata", data=b"b.")

    async def ask():
        return await asyncio.gather(
            aio.latest(place.uri, config=config),
            aio.list_checkpoints(place.uri, config=config),
            *(aio.exists(f"{place.uri}/step-{step}", config=config) for step in (10, 11)),
            aio.latest(f"{place.uri}/nothing", config=config),
            aio.list_checkpoints(f"{place.uri}/nothing", config=config),
        )

    found = asyncio.run(ask())
    assert found[:2] == [
        cloudckpt.latest(place.uri, config=config),
        cloudckpt.list_checkpoints(place.uri, config=config),
    ]
    assert found[2:] == [True, False, None, []]
    assert found[0] == f"{place.uri}/step-12"
    assert [one.step for one in found[1]] == [9, 10, 11, 12, None]


def test_what_moves_bytes_is_there_too(place) -> None:
    uri, config = f"{place.uri}/step-1", place.config
    cloudckpt.save({"w": torch.ones(1000)}, checkpoint_id=uri, config=config)
    cloudckpt.files.save_file(f"{place.uri}/config.json", b"{}", config=config)

    async def ask():
        return await asyncio.gather(
            aio.inspect(uri, config=config),
            aio.verify(uri, config=config),
            aio.load_file(f"{place.uri}/config.json", config=config),
        )

    contents, verified, content = asyncio.run(ask())
    assert contents == cloudckpt.inspect(uri, config=config)
    assert verified == cloudckpt.verify(uri, config=config)
    assert content == b"{}"


def test_errors_have_the_names_that_they_have_elsewhere(place) -> None:
    config = place.config

    def fails(kind, coroutine) -> None:
        with pytest.raises(kind):
            asyncio.run(coroutine)

    fails(errors.CheckpointNotFoundError, aio.inspect(f"{place.uri}/step-1", config=config))
    fails(errors.CheckpointNotFoundError, aio.verify(f"{place.uri}/step-1", config=config))
    fails(errors.ObjectNotFoundError, aio.load_file(f"{place.uri}/file", config=config))
    fails(errors.InvalidURIError, aio.exists("ftp://x/y", config=config))
    fails(errors.ConfigError, aio.latest(place.uri, step_name="epoch", config=config))
    if place.is_cloud:
        elsewhere = f"{place.uri.partition('://')[0]}://no-such-bucket-of-ours/run"
        fails(errors.BucketNotFoundError, aio.exists(elsewhere, config=config))
        fails(errors.BucketNotFoundError, aio.latest(elsewhere, config=config))
        fails(errors.BucketNotFoundError, aio.list_checkpoints(elsewhere, config=config))


# faults


@on["s3 google azure"]
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Reset("answer"), errors.ConnectionLostError),
        (Respond(GATEWAYS["not found"]), errors.ServerError),
    ],
    ids=["lost answer", "gateway"],
)
def test_what_does_not_pass_is_raised_and_is_no_empty_run(place, fault, error) -> None:
    commit(place, 7)
    place.proxy.inject(fault)
    few = RetryPolicy(attempts=2, base=0.01, cap=0.01, deadline=0.2)
    config = dataclasses.replace(place.shaky, retry=few)
    for question in (
        aio.exists(f"{place.uri}/step-7", config=config),
        aio.latest(place.uri, config=config),
        aio.list_checkpoints(place.uri, config=config),
    ):
        with pytest.raises(error):
            asyncio.run(question)


# cancellation, and many at once


class Held(MemoryStore):
    """Lists nothing until it is let go."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.is_asked, self.let_go = threading.Event(), threading.Event()
        self.listings = 0

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        self.listings += 1
        self.is_asked.set()
        assert self.let_go.wait(60)
        return super().list_level(prefix)


ONE = Config(connections=1)


@pytest.fixture
def held(serve):
    store = serve(Held(uuid.uuid4().hex))
    yield store
    store.let_go.set()


def test_who_is_cancelled_before_a_thread_is_free_asks_nothing(held) -> None:
    async def ask() -> None:
        first = asyncio.ensure_future(aio.latest("memory://held/run", config=ONE))
        await asyncio.to_thread(held.is_asked.wait, 60)
        second = asyncio.ensure_future(aio.latest("memory://held/run", config=ONE))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.let_go.set()
        assert await first is None

    asyncio.run(ask())
    assert held.listings == 1


@dataclasses.dataclass(frozen=True)
class Counted(Fault):
    """Takes its time, and counts how many do at once."""

    count: Callable[[int], None]

    def inflict(self, hop: Hop) -> None:
        self.count(+1)
        answer = hop.forward()
        time.sleep(0.01)
        self.count(-1)
        hop.send(answer)


@on["s3 google azure"]
def test_many_who_ask_at_once_share_the_connections(place) -> None:
    commit(place, 1)
    limit = place.config.connections

    async def ask():
        questions = (aio.exists(f"{place.uri}/step-1", config=place.shaky) for _ in range(60))
        return await asyncio.gather(*questions)

    lock, under_way, most = threading.Lock(), 0, 0

    def count(change: int) -> None:
        nonlocal under_way, most
        with lock:
            under_way += change
            most = max(most, under_way)

    place.proxy.inject(Counted(count))
    assert asyncio.run(ask()) == [True] * 60
    assert len(place.proxy.requests()) == 60
    assert 1 < most <= limit
