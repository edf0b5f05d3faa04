"""Trainers that end, by themselves or by force, while a save is under way."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from faults.states import SMALL

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
        [sys.executable, str(path)], capture_output=True, text=True, timeout=90, env=environment
    )


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_a_trainer_that_ends_commits_the_save_that_is_under_way(kind, local, tmp_path):
    script = SCRIPT.format(uri=local.uri, kind=kind) + 'if __name__ == "__main__":\n    train()\n'
    done = _run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "under way: True\n"
    assert step_at(local) == 7


def test_a_script_that_begins_to_train_when_it_is_imported_is_told_what_to_do(local, tmp_path):
    script = SCRIPT.format(uri=local.uri, kind="PROCESS") + "train().result(60)\n"
    done = _run(tmp_path, script)
    assert done.returncode == 1
    assert "SaveProcessError: the saving process ended (1) before it was ready" in done.stderr
    assert "must guard its entry with if __name__ == '__main__'" in done.stderr
    assert local.names() == []


def test_the_process_of_a_killed_trainer_ends_and_commits_nothing(trainers, local, tmp_path):
    family, gate = uuid.uuid4().hex, Gate(tmp_path)
    arguments = {"uri": local.uri, "folder": str(tmp_path), "nbytes": SMALL}
    with trainers.child("save_and_stand_still", family=family, **arguments) as trainer:
        gate.wait()
        beside = processes_of(family)
        assert beside
        trainer.signal(signal.SIGKILL)
        assert eventually(lambda: not is_running(trainer.pid), PATIENCE)
        assert eventually(lambda: not processes_of(family), 10)
    gate.open()
    assert ".metadata" not in local.names()
    assert not [n for n in os.listdir("/dev/shm") if any(str(pid) in n for pid in beside)]
