from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.integrations.accelerate import CloudAccelerator
from results import Job


def test_fsdp2_state_goes_on_with_other_numbers_of_ranks(
    job: Job, run: str, tmp_path: Path
) -> None:
    straight = job("accelerate_job.py", "--fsdp", "--steps=6", ranks=2)
    first = job("accelerate_job.py", "--fsdp", "--steps=3", f"--save={run}/step-3", ranks=2)
    same = job("accelerate_job.py", "--fsdp", "--steps=3", f"--load={run}/step-3", ranks=2)
    alone = job("accelerate_job.py", "--steps=3", f"--load={run}/step-3", ranks=1)

    assert {one["kind"] for one in first} == {"DTensor"}
    assert same[0]["losses"] == pytest.approx(straight[0]["losses"][3:], rel=1e-4)
    assert same[0]["rate"] == pytest.approx(straight[0]["rate"])
    assert [one["drawn"] for one in same] == [one["drawn"] for one in first]  # random states
    assert same[0]["drawn"] != same[1]["drawn"]
    assert alone[0]["kind"] == "Parameter"
    assert alone[0]["losses"][0] == pytest.approx(straight[0]["losses"][3], rel=1e-4)
    assert [one["count"] for one in (*same, *alone)] == [6, 6, 6]
    names = {item.name for item in cloudckpt.inspect(f"{run}/step-3").items}
    assert {"model_0.first.weight", "optimizer_0.state.second.bias.exp_avg"} <= names
    assert not [*(tmp_path / "cwd").iterdir()]


def test_named_checkpoints_rotate_in_the_project_and_the_newest_is_loaded(
    job: Job, run: str, tmp_path: Path
) -> None:
    job("accelerate_job.py", "--steps=3", f"--project={run}", ranks=2)
    kept = [one.uri for one in cloudckpt.list_checkpoints(f"{run}/checkpoints")]
    resumed = job("accelerate_job.py", "--steps=0", f"--project={run}", "--load=newest")

    assert kept == [f"{run}/checkpoints/checkpoint_1", f"{run}/checkpoints/checkpoint_2"]
    assert resumed[0]["count"] == 3
    assert not [*(tmp_path / "cwd").iterdir()]


def test_paths_go_accelerates_way_and_folded_uris_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = CloudAccelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(cloudckpt.InvalidURIError, match="s3://bucket/run"):
        accelerator.save_state(Path("s3://bucket/run"))
    assert not [*tmp_path.iterdir()]

    accelerator.save_state(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "model.safetensors").exists()
    accelerator.load_state(tmp_path / "step-1")
