import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch

import cloudckpt
from cloudckpt.integrations.ray import checkpoint, checkpoint_upload_fn, run_uri, uri_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(600)


def test_runs_go_on_keep_what_they_are_told_to_and_are_not_copied(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    seen = _job(environment, run, tmp_path)

    crashed, anew = seen["crashed"], seen["begun anew"]
    assert crashed == {"loss": 24.0, "uri": f"{run}/ours/run/step-6", "sum": 24.0}
    assert anew == {"loss": 32.0, "uri": f"{run}/ours/run/step-8", "sum": 32.0}
    assert _steps(f"{run}/ours/run") == [7, 8]

    there = f"{run}/pyarrow/run"  # begun with step-8 of the other run, which stays
    assert seen["in background"] == {"loss": 44.0, "uri": f"{there}/step-11", "sum": 44.0}
    assert _steps(there) == [10, 11]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker of a run on a disk, which Ray lists and deletes by pyarrow."""
    place = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=str(tmp_path)
    )
    here = SimpleNamespace(get_world_rank=lambda: 0, get_storage=lambda: place)
    monkeypatch.setattr("ray.train.get_context", lambda: here)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_what_pyarrow_would_delete_though_others_refer_to_it_is_not_reported(
    context: None, is_incremental: bool
) -> None:
    config, uri = cloudckpt.Config(incremental=is_incremental), f"{run_uri()}/step-1"
    cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=uri, config=config)
    if not is_incremental:
        assert uri_of(checkpoint_upload_fn(checkpoint(uri), "name")) == uri
        return
    with pytest.raises(cloudckpt.errors.ConfigError, match=r"RunConfig\(\*\*storage\(folder\)\)"):
        checkpoint_upload_fn(checkpoint(uri), "name")


def test_a_reference_is_neither_deleted_nor_copied(context: None, tmp_path: Path) -> None:
    """Ray deletes what it has uploaded in the background, and copies without an upload function."""
    uri = f"{run_uri()}/step-1"
    cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=uri)
    reported = checkpoint(uri)
    reported.filesystem.delete_dir(reported.path)
    assert cloudckpt.exists(uri)
    with pytest.raises(cloudckpt.errors.ConfigError, match="checkpoint_upload_fn"):
        reported.to_directory(str(tmp_path / "copy"))
    with pytest.raises(cloudckpt.errors.ConfigError, match="pass the result"):
        checkpoint_upload_fn(ray.train.Checkpoint.from_directory(str(tmp_path)), "name")


def _job(environment: dict[str, str], run: str, tmp_path: Path) -> dict[str, Any]:
    """What all runs of the job have told; Ray is started once for them."""
    path = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
    told = {
        "CRASHED": str(tmp_path / "crashed"),
        "RESULTS": str(tmp_path / "results"),
        "RANK": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # else it kills workers for the memory of others
    }
    ended = subprocess.run(
        [sys.executable, str(HERE / "ray_job.py"), run],
        env={**environment, **told, "PYTHONPATH": path},
        cwd=tmp_path,
        timeout=560,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    seen: dict[str, Any] = json.loads((tmp_path / "results0").read_text())
    return seen


def _steps(run: str) -> list[int | None]:
    """Of all folders of a run, Ray's own copies included if it makes any."""
    return [one.step for one in cloudckpt.list_checkpoints(run)]
