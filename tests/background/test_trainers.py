"""Trainers that end, by themselves or by force, while a save is under way."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.checkpoint.objects import is_pending_name
from dcp.places import Place
from faults.states import SMALL, filled
from support.forks import child, context

from .jobs import save_and_stand_still
from .saves import PATIENCE, Gate, WireGate, step_at
from .waiting import eventually, is_running, processes_of

KINDS = ("THREAD", "PROCESS")
TRAINER = """
import atexit
import os
import signal
import sys
import warnings

import cloudckpt
from background.saves import Slow
from cloudckpt.checkpointer import CheckpointerConfig, make_async_checkpointer
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

warnings.simplefilter("ignore")


def fork_meanwhile(one):
    before = one._saver._process.pid
    if os.fork() == 0:
        sys.exit()
    os.wait()
    worker = os.fork()
    if worker == 0:
        signal.pause()
    one.save({root!r} + "/forked", filled(2, SMALL))[1].result(150)
    print("the same process:", one._saver._process.pid == before)
    life = one._saver._process._worker
    one.close()
    print("ended by itself:", life._process.returncode == 0)
    os.kill(worker, 9)


def save_once_more(one, uri):
    try:
        one.save(uri, filled(2, SMALL))
    except Exception as error:
        print(type(error).__name__, error)
    one.close()
    print("closed")


def make(kind):
    return make_async_checkpointer(CheckpointerConfig(kind=AsyncCheckpointerType[kind]))


one = make("PROCESS")
one.save({root!r} + "/forked", filled(1, SMALL))[1].result(150)
fork_meanwhile(one)
for kind in {kinds!r}:
    one, uri = make(kind), {root!r} + "/ended-" + kind
    one.save(uri, filled(1, SMALL))[1].result(150)
    atexit.register(save_once_more, one, uri)
for kind in {kinds!r}:
    future = cloudckpt.async_save(
        filled(7, SMALL),
        checkpoint_id={root!r} + "/committed-" + kind,
        planner=Slow(),
        async_checkpointer_type=AsyncCheckpointerType[kind],
    )
    print("under way:", not future.done(), flush=True)
"""
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def trained(places, tmp_path_factory) -> tuple[Place, list[str]]:
    """Where a trainer has saved that has ended, and the lines that it has printed."""
    root = places("local")
    path = tmp_path_factory.mktemp("trainer") / "train.py"
    path.write_text(TRAINER.format(root=root.uri, kinds=KINDS))
    paths = [TESTS, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return root, done.stdout.splitlines()


@pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)), reason="it starts no threads when it ends"
)
def test_a_trainer_that_ends_commits_the_saves_that_are_under_way(trained):
    root, lines = trained
    assert lines.count("under way: True") == 2
    assert [step_at(root.at(f"committed-{kind}")) for kind in KINDS] == [7, 7]


def test_a_save_that_the_end_of_the_interpreter_comes_before_is_refused(trained):
    root, lines = trained
    assert sum(line.startswith("AsyncSaveError save to ") for line in lines) == 2
    assert lines.count("closed") == 2
    assert [step_at(root.at(f"ended-{kind}")) for kind in KINDS] == [1, 1]


def test_forks_that_end_and_live_on_leave_the_saving_process_to_their_parent(trained):
    root, lines = trained
    assert lines[:2] == ["the same process: True", "ended by itself: True"]
    assert step_at(root.at("forked")) == 2


def _train(uri: str, folder: Path) -> None:
    gate = Gate(folder)
    cloudckpt.async_save(
        filled(7, SMALL),
        checkpoint_id=uri,
        planner=gate,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    gate.wait()
    (folder / "ends").touch()


def test_a_trainer_of_multiprocessings_that_ends_commits_the_save_that_has_begun(local, tmp_path):
    process = context.Process(target=_train, args=(local.uri, tmp_path))
    process.start()
    try:
        assert eventually((tmp_path / "ends").exists, PATIENCE)
        process.join(1)  # multiprocessing sends SIGTERM meanwhile
        assert process.is_alive()
        Gate(tmp_path).open()
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert step_at(local) == 7


def test_the_process_of_a_killed_trainer_sends_the_rest_and_commits_nothing(shaky, proxy):
    family, gate = uuid.uuid4().hex, WireGate(proxy, "PutObject")
    arguments = {"uri": shaky.uri, "endpoint": proxy.url, "nbytes": SMALL}
    with child(save_and_stand_still, family=family, **arguments) as trainer:
        gate.wait()
        beside = processes_of(family)
        assert beside
        trainer.signal(signal.SIGKILL)
        assert eventually(lambda: not is_running(trainer.pid), PATIENCE)
        gate.open()
        assert eventually(lambda: not processes_of(family), 60)
    assert proxy.wait_idle()
    assert ".metadata" not in shaky.names()
    assert len(list(filter(is_pending_name, shaky.names()))) == 1
    assert not [n for n in os.listdir("/dev/shm") if any(str(pid) in n for pid in beside)]
