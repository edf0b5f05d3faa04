"""Trainers that end, by themselves or by force, while a save is under way."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from cloudckpt.checkpoint.objects import is_pending_name
from faults.states import SMALL
from support.forks import child
from support.wire.faults import Call

from .jobs import save_and_stand_still
from .saves import PATIENCE, step_at
from .waiting import eventually, is_running, processes_of

SCRIPT = """
import warnings

import cloudckpt
from background.saves import Slow
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

warnings.simplefilter("ignore")
for kind, uri in {uris!r}.items():
    future = cloudckpt.async_save(
        filled(7, SMALL),
        checkpoint_id=uri,
        planner=Slow(),
        async_checkpointer_type=AsyncCheckpointerType[kind],
    )
    print("under way:", not future.done(), flush=True)
"""


TESTS = str(Path(__file__).parents[1])


def _run(folder: Path, script: str) -> subprocess.CompletedProcess:
    path = folder / "train.py"
    path.write_text(script)
    return _python([str(path)])


def _python(
    arguments: list[str], code: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Runs an interpreter that finds the tests' modules; ``code`` is what it reads."""
    paths = [TESTS, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments],
        input=code,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )


NO_NEW_THREADS = pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)), reason="it starts no threads when it ends"
)


@NO_NEW_THREADS
def test_a_trainer_that_ends_commits_the_saves_that_are_under_way(local, tmp_path):
    places = [local.at(kind) for kind in ("THREAD", "PROCESS")]
    uris = {kind: local.at(kind).uri for kind in ("THREAD", "PROCESS")}
    done = _run(tmp_path, SCRIPT.format(uris=uris))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "under way: True\n" * 2
    assert [step_at(place) for place in places] == [7, 7]


AT_THE_END = """
import atexit

import cloudckpt
from cloudckpt.checkpointer import CheckpointerConfig
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def save_once_more(one, uri):
    try:
        one.save(uri, filled(2, SMALL))
    except Exception as error:
        print(type(error).__name__, error)
    one.close()
    print("closed")


for kind, uri in {uris!r}.items():
    kind = AsyncCheckpointerType[kind]
    one = cloudckpt.checkpointer.make_async_checkpointer(CheckpointerConfig(kind=kind))
    one.save(uri, filled(1, SMALL))[1].result(150)
    atexit.register(save_once_more, one, uri)
"""


def test_a_save_that_the_end_of_the_interpreter_comes_before_is_refused(local, tmp_path):
    places = {kind: local.at(kind) for kind in ("THREAD", "PROCESS")}
    uris = {kind: place.uri for kind, place in places.items()}
    done = _run(tmp_path, AT_THE_END.format(uris=uris))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("AsyncSaveError save to ") == 2
    assert done.stdout.count("closed\n") == 2
    assert [step_at(place) for place in places.values()] == [1, 1]


FORKING = """
import os
import signal
import sys

import cloudckpt
from faults.states import SMALL, filled

one = cloudckpt.checkpointer.make_async_checkpointer()
one.save({uri!r}, filled(1, SMALL))[1].result(150)
before = one._saver._process.pid
if os.fork() == 0:
    sys.exit()
os.wait()
worker = os.fork()
if worker == 0:
    signal.pause()
one.save({uri!r}, filled(2, SMALL))[1].result(150)
print("the same process:", one._saver._process.pid == before)
life = one._saver._process._worker
one.close()
print("ended by itself:", life._process.returncode == 0)
os.kill(worker, 9)
"""


def test_forks_that_end_and_live_on_leave_the_saving_process_to_their_parent(local, tmp_path):
    done = _run(tmp_path, FORKING.format(uri=local.uri))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same process: True\nended by itself: True\n"
    assert "Error" not in done.stderr
    assert step_at(local) == 2


WITHIN_ANOTHER = """
import multiprocessing
import time
from pathlib import Path

import cloudckpt
from background.saves import Gate
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

FOLDER = Path({folder!r})


def train():
    gate = Gate(FOLDER)
    cloudckpt.async_save(
        filled(7, SMALL),
        checkpoint_id={uri!r},
        planner=gate,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    gate.wait()
    (FOLDER / "ends").touch()


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    while not (FOLDER / "ends").exists() and process.is_alive():
        time.sleep(0.01)
    process.join(2)  # multiprocessing sends SIGTERM meanwhile
    print("waits:", process.is_alive())
    Gate(FOLDER).open()
    process.join()
    print("ended:", process.exitcode)
"""


def test_a_trainer_of_multiprocessings_that_ends_commits_the_save_that_has_begun(local, tmp_path):
    done = _run(tmp_path, WITHIN_ANOTHER.format(uri=local.uri, folder=os.fspath(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "waits: True\nended: 0\n"
    assert step_at(local) == 7


def test_the_process_of_a_killed_trainer_sends_the_rest_and_commits_nothing(shaky, proxy, tmp_path):
    family, held = uuid.uuid4().hex, threading.Event()
    reached = threading.Event()

    def hold(_: object) -> None:
        reached.set()
        held.wait(PATIENCE)

    proxy.inject(Call(hold), operation="PutObject", path="*.distcp*", times=1)
    arguments = {"uri": shaky.uri, "endpoint": proxy.url, "nbytes": SMALL}
    with child(save_and_stand_still, family=family, **arguments) as trainer:
        assert reached.wait(PATIENCE)
        beside = processes_of(family)
        assert beside
        trainer.signal(signal.SIGKILL)
        assert eventually(lambda: not is_running(trainer.pid), PATIENCE)
        held.set()
        assert eventually(lambda: not processes_of(family), 60)
    assert proxy.wait_idle()
    assert ".metadata" not in shaky.names()
    assert len(list(filter(is_pending_name, shaky.names()))) == 1
    assert not [n for n in os.listdir("/dev/shm") if any(str(pid) in n for pid in beside)]
