"""Writers that are killed at any moment: what they leave is the last checkpoint, whole.

The moment is counted in requests and bytes that the proxy has seen, not in seconds. Every element
of a state dict is its step, so a mix of two would show. The proxy's log tells how many commits the
server has carried out, and thereby which step has to be there: no other is right.
"""

import random
import signal
import threading
import time

import pytest

import cloudckpt
from cloudckpt import CheckpointNotFoundError
from cloudckpt.testing.wire_faults import Call, Stall
from forks import child

from . import jobs
from .selection import everywhere
from .states import BIG, SMALL, filled, impatient, load_step

KILLS = {"s3": 10, "google": 4, "azure": 4}  # for each way to kill; S3 has six, the others four


def kill_at(proxy, child_of, rng: random.Random, nbytes: int) -> None:
    """Has the proxy kill a child at a random request, at a random moment of it."""
    born = threading.Event()
    child_of.append(born)

    def kill(_) -> None:
        assert born.wait(30)
        child_of[1].signal(signal.SIGKILL)

    moment = rng.choice(["request", "request", "answer"])
    after = rng.choice([0, rng.randrange(1, nbytes)])
    proxy.inject(Call(kill, moment, after), skip=rng.randrange(24), times=1)


def commits(proxy) -> int:
    """How many commits the server has carried out."""
    return sum(
        exchange.carried_out in (200, 201)
        and exchange.request.operation == "PutObject"
        and exchange.request.path.endswith("/.metadata")
        for exchange in proxy.exchanges
    )


def saved_until_killed(
    proxy, endpoint, rng, uri: str, first: int, nbytes: int, struck: set[str]
) -> int:
    """Saves steps from ``first`` on in a child until that is killed; returns the steps saved."""
    proxy.clear()
    child_of: list = []
    kill_at(proxy, child_of, rng, nbytes)
    config = impatient(endpoint, conditional_writes="auto")
    arguments = {"config": config, "first": first, "nbytes": nbytes}
    with child(jobs.save_on_and_on, uri=uri, **arguments) as writer:
        child_of.append(writer)
        child_of[0].set()
        status, _ = writer.wait()
    assert status == -signal.SIGKILL
    assert proxy.wait_idle(), proxy.under_way
    struck |= {e.request.operation for e in proxy.exchanges if e.fault is not None}
    return commits(proxy)


@everywhere(seed=[0])
@pytest.mark.parametrize("nbytes", [SMALL, BIG], ids=["small", "big"])
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_writer_leaves_the_last_checkpoint_of_its_uri(
    dialect, store, proxy, endpoint, direct, seed, nbytes
):
    rng = random.Random(f"same/{nbytes}/{seed}")
    uri, step = store.uri("run/latest"), 0
    cloudckpt.save(filled(step, nbytes), checkpoint_id=uri, config=direct)
    struck: set[str] = set()
    for _ in range(KILLS[dialect]):
        step += saved_until_killed(proxy, endpoint, rng, uri, step + 1, nbytes, struck)
        assert load_step(uri, direct, nbytes) == step
    spread = len(struck) >= KILLS[dialect] // 3
    assert spread, "the moments must be spread over several kinds of requests"


@everywhere()
@pytest.mark.parametrize("nbytes", [SMALL, BIG], ids=["small", "big"])
def test_a_killed_writer_leaves_no_half_of_a_new_checkpoint(
    dialect, store, proxy, endpoint, direct, nbytes
):
    rng = random.Random(f"new/{nbytes}")
    step, struck = 0, set()
    for kill in range(KILLS[dialect]):
        uri = store.uri(f"run-{kill}/step-{{step}}")
        done = saved_until_killed(proxy, endpoint, rng, uri, step + 1, nbytes, struck)
        for there in range(step + 1, step + 1 + done):
            assert load_step(uri.format(step=there), direct, nbytes) == there
        step += done
        with pytest.raises(CheckpointNotFoundError):
            load_step(uri.format(step=step + 1), direct, nbytes)
        step += 1  # what was begun is gone
    spread = len(struck) >= KILLS[dialect] // 3
    assert spread, "the moments must be spread over several kinds of requests"


def test_a_save_after_a_kill_works_and_replaces(store, proxy, endpoint, direct):
    rng = random.Random("after")
    uri = store.uri("run/latest")
    cloudckpt.save(filled(0, SMALL), checkpoint_id=uri, config=direct)
    step = saved_until_killed(proxy, endpoint, rng, uri, 1, SMALL, set())
    cloudckpt.save(filled(step + 1, SMALL), checkpoint_id=uri, config=direct)
    assert load_step(uri, direct, SMALL) == step + 1


@pytest.mark.parametrize("fatal", range(0, 24, 2))
def test_a_killed_writer_to_a_disk_leaves_the_last_checkpoint(tmp_path, direct, fatal):
    uri = str(tmp_path / "latest")
    cloudckpt.save(filled(0, SMALL), checkpoint_id=uri, config=direct)
    with child(jobs.save_to_disk_until, uri=uri, nbytes=SMALL, fatal=fatal) as writer:
        status, _ = writer.wait()
    assert status == -signal.SIGKILL
    step = load_step(uri, direct, SMALL)
    log = (tmp_path / "latest.committed").read_text().split()
    assert step == int(log[-1]) or step == int(log[-1]) + 1  # killed before it could write it down
    cloudckpt.save(filled(step + 1, SMALL), checkpoint_id=uri, config=direct)
    assert load_step(uri, direct, SMALL) == step + 1


@pytest.mark.parametrize("path", ["*.distcp", "*/.metadata"])
def test_a_writer_that_is_killed_while_the_store_stalls_leaves_the_last_checkpoint(
    store, proxy, endpoint, direct, path
):
    uri = store.uri("run/latest")
    cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=direct)
    proxy.inject(Stall("request", after=100), operation="PutObject", path=path)
    patient = impatient(endpoint, read_timeout=60.0, stall_timeout=60.0)
    with child(jobs.save, uri=uri, config=patient, step=2, nbytes=SMALL) as writer:
        while not proxy.requests("PutObject", path):
            time.sleep(0.01)
        writer.signal(signal.SIGKILL)
        status, _ = writer.wait()
    assert status == -signal.SIGKILL
    assert load_step(uri, direct, SMALL) == 1
