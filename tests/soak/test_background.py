"""Saving processes that are killed at any moment of a save; of trainers, see test_kills.

The moment is counted in requests and bytes that the proxy has seen, not in seconds. Every element
of a state dict is its step, so a mix of two would show.
"""

import functools
import os
import random
import signal
from collections.abc import Callable

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from background.jobs import config_for
from background.saves import PATIENCE, begin, step_at
from background.waiting import eventually, is_running
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.errors import SaveProcessError
from dcp.places import Place
from faults.states import BIG
from support.wire.faults import Call
from support.wire.proxy import FaultyProxy
from support.wire.request import Request

pytestmark = pytest.mark.parametrize("dialect", ["plain s3"], indirect=True)
lanes = pytest.mark.parametrize("lane", range(2))  # each with a chance of its own


def _kill_somewhere(
    proxy: FaultyProxy,
    uri: str,
    rng: random.Random,
    kill: Callable[[], None],
    where: Callable[[Request], bool] = lambda request: True,
) -> None:
    """Kills at a random request to a place, or at one of some kind, at a random moment of it."""
    moment = rng.choice(["request", "request", "answer"])
    after = rng.choice([0, rng.randrange(1, BIG)])
    fault = Call(lambda _: kill(), moment, after)
    proxy.inject(fault, path=f"*{_prefix(uri)}*", where=where, skip=rng.randrange(24), times=1)


def _is_sent_by_the_saving_process(request: Request) -> bool:
    """Whether it writes data; the rest, deletions of what was replaced too, is the trainer's."""
    return request.method in ("PUT", "POST") and ".distcp" in request.target


def _prefix(uri: str) -> str:
    return uri.removeprefix("s3://")


def _quiet(proxy: FaultyProxy, uri: str) -> bool:
    """Whether no request to a place is under way any more."""
    return eventually(
        lambda: not any(_prefix(uri) in request.target for request in proxy.under_way)
    )


def _shared_memory_of(pids: list[int]) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


@lanes
def test_a_saving_process_that_is_killed_leaves_one_step_and_the_next_save_works(
    lane, proxy, places, rng, rounds
):
    direct = places("s3")
    shaky = Place(direct.uri, config_for(proxy.url))
    with AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS) as saver:
        begin(saver, 0, shaky, nbytes=BIG).result(PATIENCE)
        step, last, victims = 0, 0, []
        for _ in rounds():
            assert saver._process is not None
            victims.append(saver._process.pid)
            pid = saver._process.pid
            kill = functools.partial(os.kill, pid, signal.SIGKILL)
            _kill_somewhere(proxy, direct.uri, rng, kill, _is_sent_by_the_saving_process)
            error, first = None, step
            while error is None:
                step += 1
                assert step - first < 30, "nobody was killed"
                error = begin(saver, step, shaky, nbytes=BIG).exception(PATIENCE)
                last = step if error is None else last
            assert isinstance(error, SaveProcessError), repr(error)
            assert "signal 9" in str(error)
            assert not is_running(pid)
            assert _quiet(proxy, direct.uri)
            assert step_at(direct, BIG) == last
            step += 1  # the next save works and replaces, whatever the kill has left
            begin(saver, step, shaky, nbytes=BIG).result(PATIENCE)
            assert step_at(direct, BIG) == step
            last = step
        assert _shared_memory_of([os.getpid(), *victims]) == []
