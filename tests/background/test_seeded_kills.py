"""Trainers and saving processes that are killed at any moment of a save.

The moment is counted in requests and bytes that the proxy has seen, not in seconds. Every element
of a state dict is its step, so a mix of two would show.
"""

import os
import random
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import SaveProcessError
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.testing.proxy import FaultyProxy
from cloudckpt.testing.wire_faults import Call
from dcp.places import Place
from faults.states import BIG
from forks import child

from .jobs import config_for, save_on_and_on
from .saves import PATIENCE, begin, step_at
from .waiting import eventually, is_running, processes_of

pytestmark = pytest.mark.timeout(800)

KILLS = int(os.environ.get("CLOUDCKPT_TEST_KILLS", "12"))
"""Kills of saving processes; half as many trainers are killed. Each costs seconds of CPU."""

LANES = 2  # victims at a time
BATCH = 5  # kills of a lane in one test


def _batches(kills: int) -> list[list[tuple[str, int]]]:
    """Lanes with a seed and a number of kills, some for each test."""
    lanes = [min(BATCH, kills - start) for start in range(0, kills, BATCH)]
    if len(lanes) == 1:  # too few for a batch: share them
        lanes = [kills - kills // LANES, kills // LANES]
    numbered = [(f"seed {number}", count) for number, count in enumerate(lanes) if count]
    return [numbered[start : start + LANES] for start in range(0, len(numbered), LANES)]


def _kill_somewhere(
    proxy: FaultyProxy, uri: str, rng: random.Random, kill: Callable[[], None]
) -> None:
    """Kills at a random request to a place, at a random moment of it."""
    moment = rng.choice(["request", "request", "answer"])
    after = rng.choice([0, rng.randrange(1, BIG)])
    fault = Call(lambda _: kill(), moment, after)
    proxy.inject(fault, path=f"*{_prefix(uri)}*", skip=rng.randrange(24), times=1)


def _prefix(uri: str) -> str:
    return uri.removeprefix("s3://")


def _quiet(proxy: FaultyProxy, uri: str) -> bool:
    """Whether no request to a place is under way any more."""
    return eventually(
        lambda: not any(_prefix(uri) in request.target for request in proxy.under_way)
    )


def _shared_memory_of(pids: list[int]) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


def _in_lanes(lane: Callable, batch: list[tuple[str, int]], places: list[Place], *more) -> None:
    with ThreadPoolExecutor(LANES) as pool:
        for done in [
            pool.submit(lane, seed, kills, place, *more)
            for (seed, kills), place in zip(batch, places, strict=False)
        ]:
            done.result()


# ---- the saving process


def _kill_processes(seed: str, kills: int, place: Place, proxy: FaultyProxy) -> None:
    rng = random.Random(f"process/{seed}")
    direct = Place(place.uri, place.config)
    shaky = Place(place.uri, config_for(proxy.url))
    with AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS) as saver:
        begin(saver, 0, shaky, nbytes=BIG).result(PATIENCE)
        step, last, victims = 0, 0, []
        for _ in range(kills):
            assert saver._process is not None
            victims.append(saver._process.pid)
            pid = saver._process.pid
            _kill_somewhere(proxy, place.uri, rng, lambda pid=pid: os.kill(pid, signal.SIGKILL))
            error = None
            while error is None:
                step += 1
                assert step - last < 20, "nobody was killed"
                error = begin(saver, step, shaky, nbytes=BIG).exception(PATIENCE)
                last = step if error is None else last
            assert isinstance(error, SaveProcessError), repr(error)
            assert "signal 9" in str(error)
            assert not is_running(pid)
            assert _quiet(proxy, place.uri)
            found = step_at(direct, BIG)
            assert found in (last, step)
            step += 1  # the next save works and replaces, whatever the kill has left
            begin(saver, step, shaky, nbytes=BIG).result(PATIENCE)
            assert step_at(direct, BIG) == step
            last = step
        assert _shared_memory_of([os.getpid(), *victims]) == []


@pytest.mark.parametrize("batch", _batches(KILLS), ids=lambda batch: batch[0][0])
def test_a_saving_process_that_is_killed_leaves_one_step_and_the_next_save_works(
    batch, proxy, places
):
    _in_lanes(_kill_processes, batch, [places("s3") for _ in batch], proxy)


# ---- the trainer


def _kill_trainers(seed: str, kills: int, place: Place, proxy: FaultyProxy, folder) -> None:
    rng = random.Random(f"trainer/{seed}")
    direct, log = Place(place.uri, place.config), folder / seed
    last = 0
    for _ in range(kills):
        family = uuid.uuid4().hex
        log.write_text(str(last))
        arguments = {"uri": place.uri, "endpoint": proxy.url, "log": str(log), "nbytes": BIG}
        with child(save_on_and_on, family=family, first=last + 1, **arguments) as trainer:
            _kill_somewhere(proxy, place.uri, rng, lambda: trainer.signal(signal.SIGKILL))
            assert eventually(lambda: not is_running(trainer.pid), 150)
            beside = processes_of(family)
            assert eventually(lambda: not processes_of(family), 10)  # noqa: B023
        assert _quiet(proxy, place.uri)
        told = int(log.read_text().split()[-1])
        if ".metadata" in place.names():
            last = step_at(direct, BIG)
            assert last in (told, told + 1)  # killed before it could hear of it, or write it down
        else:
            assert told == 0
        assert _shared_memory_of([trainer.pid, *beside]) == []


@pytest.mark.parametrize("batch", _batches(KILLS // 2), ids=lambda batch: batch[0][0])
def test_a_trainer_that_is_killed_leaves_one_step_and_no_process(batch, proxy, places, tmp_path):
    _in_lanes(_kill_trainers, batch, [places("s3") for _ in batch], proxy, tmp_path)
