"""What is imported when: commands that only look at a run do not wait for torch."""

import pickle
import subprocess
import sys

import pytest
import torch

import cloudckpt
from cloudckpt import api
from cloudckpt.runs import manager

_SCRIPT = """
import sys
import cloudckpt
from cloudckpt.cli import main

print(cloudckpt.Config, cloudckpt.uri.CheckpointURI, cloudckpt.events, dir(cloudckpt))
print(cloudckpt.errors, cloudckpt.runs.CheckpointSummary, dir(cloudckpt.runs))
run = sys.argv[1]
for command in ["--version"], ["--help"], ["prune", "--help"], ["ls", run], ["latest", run]:
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
    assert "torch" not in sys.modules, command
"""


def test_commands_that_only_look_at_a_run_do_not_import_torch(tmp_path):
    run = tmp_path / "run"
    cloudckpt.save({"w": torch.zeros(3)}, checkpoint_id=str(run / "step-7"), no_dist=True)

    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(run)], capture_output=True, text=True, timeout=250
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(f"{run}/step-7\n")


def test_each_public_name_is_the_one_that_its_module_has():
    assert cloudckpt.save is api.save
    assert cloudckpt.CheckpointManager is manager.CheckpointManager
    assert cloudckpt.hf.save is not cloudckpt.save
    assert pickle.loads(pickle.dumps(cloudckpt.runs.Verified)) is cloudckpt.runs.Verified
    assert set(cloudckpt.__all__) <= set(dir(cloudckpt))
    assert set(cloudckpt.runs.__all__) <= set(dir(cloudckpt.runs))
    everything: dict[str, object] = {}
    exec("from cloudckpt import *", everything)
    assert set(cloudckpt.__all__) <= set(everything)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'cloudckpt' has no attribute 'restore'"):
        _ = cloudckpt.restore
    with pytest.raises(ImportError):
        exec("from cloudckpt import restore")
