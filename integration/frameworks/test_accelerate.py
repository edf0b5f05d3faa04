import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import ProjectConfiguration

import cloudckpt
import cloudckpt.integrations.accelerate  # after which the plain Accelerator takes URIs
from results import Job


@pytest.fixture(autouse=True)
def installed() -> None:
    """Again, as tests of other files may have uninstalled what an import does but once."""
    cloudckpt.install()


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
    assert {"files.random_states_1.pkl", "files.scheduler.bin"} <= names
    assert not [*(tmp_path / "cwd").iterdir()]


def test_named_checkpoints_rotate_in_the_project_and_the_newest_is_loaded(
    job: Job, run: str, tmp_path: Path
) -> None:
    job("accelerate_job.py", "--steps=3", f"--project={run}")
    kept = [one.uri for one in cloudckpt.list_checkpoints(f"{run}/checkpoints")]
    resumed = job("accelerate_job.py", "--steps=1", f"--project={run}", "--load=newest", ranks=2)
    later = [one.uri for one in cloudckpt.list_checkpoints(f"{run}/checkpoints")]

    assert kept == [f"{run}/checkpoints/checkpoint_1", f"{run}/checkpoints/checkpoint_2"]
    assert later == [f"{run}/checkpoints/checkpoint_2", f"{run}/checkpoints/checkpoint_3"]
    assert [one["count"] for one in resumed] == [4, 4]
    assert [one["step"] for one in resumed] == [4, 4]  # also where there was no rank before
    assert not [*(tmp_path / "cwd").iterdir()]


def test_failures_are_told_to_every_rank_and_leave_the_checkpoint_before(
    job: Job, run: str
) -> None:
    saving = [f"--save={run}/step-1", "--save=s3://no-such-bucket/run", f"--save={run}/step-2"]
    [left] = job(
        "accelerate_job.py",
        "--fsdp",
        "--steps=1",
        "--killed-in=step-2",
        *saving,
        ranks=2,
        killed=[1],
    )
    assert left["failures"] == ["BucketNotFoundError", "ProcessGroupError"]
    assert cloudckpt.latest(run) == f"{run}/step-1"


@pytest.fixture
def accelerator(environment: dict[str, str]) -> Accelerator:
    made = Accelerator(cpu=True)
    made.prepare(torch.nn.Linear(2, 2))
    return made


def test_paths_go_accelerates_way_and_folded_uris_nowhere(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cloudckpt.errors.InvalidURIError, match="s3://bucket/run"):
        accelerator.save_state(Path("s3://bucket/run"))
    with pytest.raises(cloudckpt.errors.InstallError, match=r"cloudckpt\.hf\.save"):
        accelerator.save_model(accelerator._models[0], "s3://bucket/run")
    assert not [*tmp_path.iterdir()]

    accelerator.save_state(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "model.safetensors").exists()
    accelerator.load_state(tmp_path / "step-1")


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(3, 3)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_training_goes_on_as_after_a_local_save(
    environment: dict[str, str], run: str, tmp_path: Path, before: int, has_gradients: bool
) -> None:
    def made() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = _Branches()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))

    def back(accelerator: Accelerator, model: Any) -> None:
        accelerator.backward(model(torch.ones(1, 3)).square().sum())

    def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            back(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()

    def after(place: str) -> list[Any]:
        first = made()
        train(*first, before)
        first[0].save_state(place)
        train(*first, 2)
        second = made()
        if has_gradients:
            back(*second[:2])
        second[0].load_state(place)
        states = [len(one[2].state_dict()["state"]) for one in (first, second)]
        gradients = second[1].used.weight.grad
        train(*second, 2)
        return [*(one[1].used.weight.tolist() for one in (first, second)), states, gradients]

    assert repr(after(f"{run}/step-1")) == repr(after(str(tmp_path / "step-1")))


def test_hooks_save_and_load_what_they_take_upon_themselves(
    accelerator: Accelerator, run: str
) -> None:
    """As the training scripts of diffusers have them."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text(json.dumps({"models": len(models)}))
        torch.save(weights.pop(), Path(folder) / "unet" / "weights.pt")

    def load(models: list[Any], folder: str) -> None:
        assert json.loads((Path(folder) / "unet" / "config.json").read_text()) == {"models": 1}
        models.pop().load_state_dict(torch.load(Path(folder) / "unet" / "weights.pt"))

    model = accelerator._models[0]
    saving = accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(f"{run}/step-1")
    names = {item.name for item in cloudckpt.inspect(f"{run}/step-1").items}
    assert "files.unet/weights.pt" in names
    assert not any(name.startswith("model_0") for name in names)

    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    loading = accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(f"{run}/step-1")
    assert torch.equal(model.weight, expected)

    saving.remove()
    loading.remove()
    with pytest.raises(cloudckpt.errors.MissingKeyError, match="model_0"):
        accelerator.load_state(f"{run}/step-1")
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    with pytest.raises(cloudckpt.errors.MissingKeyError, match="no hook has loaded it"):
        accelerator.load_state(f"{run}/step-1")


def test_a_name_that_is_older_than_what_is_there_is_refused(
    environment: dict[str, str], run: str
) -> None:
    def made(iteration: int) -> Accelerator:
        project = ProjectConfiguration(
            run, automatic_checkpoint_naming=True, total_limit=1, iteration=iteration
        )
        return Accelerator(cpu=True, project_config=project)

    with pytest.raises(
        cloudckpt.errors.CheckpointNotFoundError, match="no checkpoint was saved yet"
    ):
        made(0).load_state()
    made(3).save_state()
    with pytest.raises(
        cloudckpt.errors.CheckpointExistsError, match="checkpoint_3 is there already"
    ):
        made(0).save_state()
    resumed = made(0)
    resumed.load_state()
    resumed.save_state()
    assert cloudckpt.latest(f"{run}/checkpoints", step_name="checkpoint_{step}") == (
        f"{run}/checkpoints/checkpoint_4"
    )


def test_logs_that_would_be_written_to_a_local_folder_of_a_uri_are_refused(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(run, automatic_checkpoint_naming=True)
    with pytest.raises(cloudckpt.errors.InstallError, match="a local logging_dir"):
        TensorBoardTracker("run", project.logging_dir)
    assert not [*tmp_path.iterdir()]


def test_uninstall_leaves_accelerate_as_it_was() -> None:
    assert "cloudckpt" in Accelerator.save_state.__code__.co_filename
    cloudckpt.uninstall()
    try:
        for method in (Accelerator.save_state, Accelerator.load_state, Accelerator.save_model):
            assert "cloudckpt" not in method.__code__.co_filename
    finally:
        cloudckpt.install()
