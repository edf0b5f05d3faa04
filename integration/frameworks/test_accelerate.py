import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import cloudckpt
from cloudckpt.integrations.accelerate import load_state, save_state
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
    more = job("accelerate_job.py", "--steps=1", f"--load={run}/step-3", ranks=3)
    assert [one["rank"] for one in (*same, *more)] == [0, 1, 0, 1, 0]  # there is no third one
    assert [one["drawn"] for one in more[:2]] == [one["drawn"] for one in first]
    assert alone[0]["kind"] == "Parameter"
    assert alone[0]["losses"][0] == pytest.approx(straight[0]["losses"][3], rel=1e-4)
    assert [one["count"] for one in (*same, *alone)] == [6, 6, 6]
    names = {item.name for item in cloudckpt.inspect(f"{run}/step-3").items}
    assert {"model_0.first.weight", "optimizer_0.state.second.bias.exp_avg"} <= names
    assert {"files.random_states_0.pkl", "files.scheduler.bin"} <= names
    assert not [*(tmp_path / "cwd").iterdir()]


def test_the_newest_and_what_the_job_loaded_are_kept(job: Job, run: str, tmp_path: Path) -> None:
    job("accelerate_job.py", "--steps=3", f"--run={run}")
    kept = [one.step for one in cloudckpt.list_checkpoints(run)]
    resumed = job("accelerate_job.py", "--steps=3", f"--run={run}", f"--load={run}/step-3", ranks=2)
    later = [one.step for one in cloudckpt.list_checkpoints(run)]

    assert kept == [2, 3]
    assert later == [3, 5, 6]
    assert [one["count"] for one in resumed] == [6, 6]
    assert [one["step"] for one in resumed] == [6, 6]  # also where there was no rank before
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


def test_an_optimizer_is_saved_with_the_models_that_have_its_parameters(
    accelerator: Accelerator, run: str
) -> None:
    first, second = accelerator._models[0], torch.nn.Linear(3, 3)
    of_second = torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)
    of_both = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.9)
    second, *optimizers = accelerator.prepare(second, of_second, of_both)
    (first(torch.ones(1, 2)).sum() + second(torch.ones(1, 3)).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = repr([optimizer.state_dict() for optimizer in optimizers])
    save_state(accelerator, f"{run}/step-1")
    for optimizer in optimizers:
        optimizer.step()
    load_state(accelerator, f"{run}/step-1")
    assert repr([optimizer.state_dict() for optimizer in optimizers]) == expected

    other = torch.nn.Linear(1, 1)
    accelerator.prepare(torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(cloudckpt.errors.ConfigError, match="optimizer 2 has parameters of a model"):
        save_state(accelerator, f"{run}/step-2")


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

    def after(save: Any, load: Any, place: str) -> list[Any]:
        first = made()
        train(*first, before)
        save(first[0], place)
        train(*first, 2)
        second = made()
        if has_gradients:
            back(*second[:2])
        load(second[0], place)
        states = [len(one[2].state_dict()["state"]) for one in (first, second)]
        gradients = second[1].used.weight.grad
        train(*second, 2)
        return [*(one[1].used.weight.tolist() for one in (first, second)), states, gradients]

    theirs = after(Accelerator.save_state, Accelerator.load_state, str(tmp_path / "step-1"))
    assert repr(after(save_state, load_state, f"{run}/step-1")) == repr(theirs)


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
    save_state(accelerator, f"{run}/step-1")
    names = {item.name for item in cloudckpt.inspect(f"{run}/step-1").items}
    assert "files.unet/weights.pt" in names
    assert not any(name.startswith("model_0") for name in names)

    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    loading = accelerator.register_load_state_pre_hook(load)
    load_state(accelerator, f"{run}/step-1")
    assert torch.equal(model.weight, expected)

    saving.remove()
    loading.remove()
    with pytest.raises(cloudckpt.errors.MissingKeyError, match="model_0"):
        load_state(accelerator, f"{run}/step-1")
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    with pytest.raises(cloudckpt.errors.MissingKeyError, match="no hook loaded it"):
        load_state(accelerator, f"{run}/step-1")


def test_an_object_that_was_not_registered_at_the_save_is_named(
    accelerator: Accelerator, run: str
) -> None:
    save_state(accelerator, f"{run}/step-1")
    accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    with pytest.raises(cloudckpt.errors.MissingKeyError, match="but 1 now"):
        load_state(accelerator, f"{run}/step-1")
