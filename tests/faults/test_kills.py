"""Writers that are killed: what they leave is the last checkpoint, whole.

The moment is counted in requests and bytes that the proxy has seen, not in seconds. Every element
of a state dict is its step, so a mix of two would show. The proxy's log tells how many commits the
server has carried out, and thereby which step has to be there: no other is right.

Each kind of moment is here once; ``soak`` draws them at random, and tries all of a disk's.
"""

import signal
import threading
from dataclasses import dataclass

import pytest

import cloudckpt
from cloudckpt.errors import CheckpointNotFoundError
from support.forks import child
from support.wire.faults import Call

from . import jobs
from .selection import everywhere
from .states import BIG, SMALL, filled, impatient, load_step


@dataclass(frozen=True)
class Moment:
    """When a writer is killed: at a request, the number of them that pass, and how far it gets."""

    operation: str
    path: str
    skip: int = 0
    moment: str = "request"
    after: int = 0


MOMENTS = {
    "amid a part": Moment("UploadPart", "*", after=1000),
    "behind a part": Moment("UploadPart", "*", skip=1, moment="answer"),
    "before the commit": Moment("PutObject", "*/.metadata", skip=1),
    "behind the commit": Moment("PutObject", "*/.metadata", moment="answer"),
    "amid the deletion of the last one": Moment("DeleteObject*", "*"),
}


def commits(proxy) -> int:
    """How many commits the server has carried out."""
    return sum(
        exchange.carried_out in (200, 201)
        and exchange.request.operation == "PutObject"
        and exchange.request.path.endswith("/.metadata")
        for exchange in proxy.exchanges
    )


def saved_until_killed(
    proxy, endpoint, moment: Moment, uri: str, first: int, nbytes: int, **options
) -> int:
    """Saves steps from ``first`` on in a child until that is killed; returns the steps saved."""
    proxy.clear()
    born, writers = threading.Event(), []

    def kill(_) -> None:
        assert born.wait(30)
        writers[0].signal(signal.SIGKILL)

    proxy.inject(
        Call(kill, moment.moment, moment.after),
        operation=moment.operation,
        path=moment.path,
        skip=moment.skip,
        times=1,
    )
    config = impatient(endpoint, conditional_writes="auto")
    arguments = {"uri": uri, "config": config, "first": first, "nbytes": nbytes, **options}
    with child(jobs.save_on_and_on, **arguments) as writer:
        writers.append(writer)
        born.set()
        status, _ = writer.wait()
    assert status == -signal.SIGKILL
    assert proxy.wait_idle(), proxy.under_way
    return commits(proxy)


@everywhere()
def test_a_killed_writer_leaves_the_last_checkpoint_of_its_uri(store, proxy, endpoint, direct):
    uri, step = store.uri("run/latest"), 0
    cloudckpt.save(filled(step), checkpoint_id=uri, config=direct)
    for moment in MOMENTS.values():
        step += saved_until_killed(proxy, endpoint, moment, uri, step + 1, BIG)
        assert load_step(uri, direct) == step, moment


@everywhere()
def test_a_killed_writer_leaves_no_half_of_a_new_checkpoint(store, proxy, endpoint, direct):
    for number, name in enumerate(["behind a part", "before the commit", "behind the commit"]):
        uri = store.uri(f"run-{number}/step-{{step}}")
        done = saved_until_killed(proxy, endpoint, MOMENTS[name], uri, 1, BIG)
        for there in range(1, done + 1):
            assert load_step(uri.format(step=there), direct) == there
        with pytest.raises(CheckpointNotFoundError):
            load_step(uri.format(step=done + 1), direct)


def killed_before(call: int, folder, config) -> None:
    """A writer to a disk is killed before a system call: its last checkpoint is there."""
    uri = str(folder / "latest")
    cloudckpt.save(filled(0, SMALL), checkpoint_id=uri, config=config)
    with child(jobs.save_to_disk_until, uri=uri, nbytes=SMALL, fatal=call) as writer:
        status, _ = writer.wait()
    assert status == -signal.SIGKILL
    step = load_step(uri, config, SMALL)
    log = (folder / "latest.committed").read_text().split()
    assert step == int(log[-1]) or step == int(log[-1]) + 1  # killed before it could write it down
    cloudckpt.save(filled(step + 1, SMALL), checkpoint_id=uri, config=config)
    assert load_step(uri, config, SMALL) == step + 1


@pytest.mark.parametrize("call", range(0, 24, 4))
def test_a_killed_writer_to_a_disk_leaves_the_last_checkpoint(tmp_path, direct, call):
    killed_before(call, tmp_path, direct)
