"""Trainers that end, by themselves or by force, while a save is under way."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from faults.states import SMALL
from forks import child

from .jobs import save_and_stand_still
from .saves import PATIENCE, Gate, step_at
from .waiting import eventually, is_running, processes_of

SCRIPT = """
import warnings

import cloudckpt
from background.saves import Slow
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

warnings.simplefilter("ignore")


def train():
    future = cloudckpt.async_save(
        filled(7, SMALL),
        checkpoint_id={uri!r},
        planner=Slow(),
        async_checkpointer_type=AsyncCheckpointerType.{kind},
    )
    print("under way:", not future.done(), flush=True)
    return future


"""


def _run(folder: Path, script: str) -> subprocess.CompletedProcess:
    path = folder / "train.py"
    path.write_text(script)
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=250, env=environment
    )


NO_NEW_THREADS = pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)), reason="it starts no threads when it ends"
)


@pytest.mark.parametrize("kind", [pytest.param("THREAD", marks=NO_NEW_THREADS), "PROCESS"])
def test_a_trainer_that_ends_commits_the_save_that_is_under_way(kind, local, tmp_path):
    script = SCRIPT.format(uri=local.uri, kind=kind) + 'if __name__ == "__main__":\n    train()\n'
    done = _run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "under way: True\n"
    assert step_at(local) == 7


def test_a_script_that_begins_to_train_when_it_is_imported_is_told_what_to_do(local, tmp_path):
    script = SCRIPT.format(uri=local.uri, kind="PROCESS") + "train().result(150)\n"
    done = _run(tmp_path, script)
    assert done.returncode == 1
    assert "SaveProcessError: the saving process ended (1) before it was ready" in done.stderr
    assert "must guard its entry with if __name__ == '__main__'" in done.stderr
    assert local.names() == []


AT_THE_END = """
import atexit

import cloudckpt
from cloudckpt import CheckpointerConfig
from faults.states import SMALL, filled
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def save_once_more(one):
    try:
        one.save(filled(2, SMALL), {uri!r})
    except Exception as error:
        print(type(error).__name__, error)
    one.close()
    print("closed")


if __name__ == "__main__":
    kind = AsyncCheckpointerType.{kind}
    one = cloudckpt.make_async_checkpointer(CheckpointerConfig(kind=kind))
    one.save(filled(1, SMALL), {uri!r})[1].result(150)
    atexit.register(save_once_more, one)
"""


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_a_save_that_the_end_of_the_interpreter_comes_before_is_refused(kind, local, tmp_path):
    done = _run(tmp_path, AT_THE_END.format(uri=local.uri, kind=kind))
    assert done.returncode == 0, done.stderr
    assert "AsyncSaveError the interpreter is shutting down" in done.stdout
    assert done.stdout.endswith("closed\n")
    assert step_at(local) == 1


FORKING = """
import os
import sys

import cloudckpt
from faults.states import SMALL, filled

if __name__ == "__main__":
    with cloudckpt.make_async_checkpointer() as one:
        one.save(filled(1, SMALL), {uri!r})[1].result(150)
        before = one._saver._process.pid
        if os.fork() == 0:
            sys.exit()
        os.wait()
        one.save(filled(2, SMALL), {uri!r})[1].result(150)
        print("the same process:", one._saver._process.pid == before)
"""


def test_a_fork_that_ends_leaves_the_saving_process_of_its_parent_alone(local, tmp_path):
    done = _run(tmp_path, FORKING.format(uri=local.uri))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same process: True\n"
    assert "Error" not in done.stderr
    assert step_at(local) == 2


THREADED = """
import os
import threading

import cloudckpt
from background.waiting import eventually, is_running
from faults.states import SMALL, filled

threading.Thread(target=threading.Event().wait, daemon=True).start()

if __name__ == "__main__":
    with cloudckpt.make_async_checkpointer() as one:
        one.save(filled(1, SMALL), {uri!r})[1].result(150)
        pid = one._saver._process.pid
        os.kill(pid, 9)
        assert eventually(lambda: not is_running(pid))
        one.save(filled(2, SMALL), {uri!r})[1].result(150)
    print("saved")
"""


def test_a_script_that_starts_threads_when_it_is_imported_has_saving_processes_too(local, tmp_path):
    done = _run(tmp_path, THREADED.format(uri=local.uri))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "saved\n"
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


def test_the_process_of_a_killed_trainer_ends_and_commits_nothing(local, tmp_path):
    family, gate = uuid.uuid4().hex, Gate(tmp_path)
    arguments = {"uri": local.uri, "folder": str(tmp_path), "nbytes": SMALL}
    with child(save_and_stand_still, family=family, **arguments) as trainer:
        gate.wait()
        beside = processes_of(family)
        assert beside
        trainer.signal(signal.SIGKILL)
        assert eventually(lambda: not is_running(trainer.pid), PATIENCE)
        assert eventually(lambda: not processes_of(family), 10)
    gate.open()
    assert ".metadata" not in local.names()
    assert not [n for n in os.listdir("/dev/shm") if any(str(pid) in n for pid in beside)]
