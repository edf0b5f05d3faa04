from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import cloudckpt
from cloudckpt.integrations import lightning as ours
from results import Job


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("model_parallel", 2, 1), ("fsdp", 2, 1), ("ddp", 2, 1), ("ddp", 1, 2)],
)
def test_training_goes_on_with_another_number_of_ranks(
    job: Job, run: str, tmp_path: Path, strategy: str, before: int, after: int
) -> None:
    how = f"--strategy={strategy}"
    straight = job("lightning_job.py", f"{run}/straight", "--steps=4", how, ranks=1)[0]
    job("lightning_job.py", run, "--steps=2", how, ranks=before)
    resumed = job("lightning_job.py", run, "--steps=4", "--resume=latest", how, ranks=after)

    assert [one["step"] for one in resumed] == [4] * after
    assert resumed[0]["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)
    of_layers = [f"net.{layer}.{name}" for layer in (0, 2) for name in ("bias", "weight")]
    assert [one["restored"] for one in resumed] == [of_layers] * after
    assert cloudckpt.latest(run) == f"{run}/step-4"
    assert not [*(tmp_path / "cwd").iterdir()]


@pytest.mark.parametrize("strategy", ["model_parallel", "ddp"])
def test_each_rank_gets_its_own_random_state_and_position_back(
    job: Job, run: str, strategy: str
) -> None:
    how = f"--strategy={strategy}"
    first = job("lightning_job.py", run, "--steps=2", how, ranks=2)
    assert first[0]["drawn"] != first[1]["drawn"]
    same = job("lightning_job.py", run, "--steps=3", f"--resume={run}/step-2", how, ranks=2)
    assert [one["drawn"] for one in same] == [one["drawn"] for one in first]
    assert [one["position"] for one in same] == [0, 1]

    more = job("lightning_job.py", run, "--steps=4", f"--resume={run}/step-2", how, ranks=3)
    assert [one["drawn"] for one in more[:2]] == [one["drawn"] for one in first]
    assert more[2]["drawn"] not in [one["drawn"] for one in first]
    assert [one["position"] for one in more] == [0, 1, 0]  # there is no third one


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("model_parallel", []),
        ("ddp", []),
        ("ddp", ["--callback"]),
        ("async", ["--callback"]),
    ],
)
def test_a_failure_to_save_is_told_to_every_rank(job: Job, strategy: str, more: list[str]) -> None:
    how = [f"--strategy={strategy}", *more]
    ended = job("lightning_job.py", "s3://no-such-bucket/run", "--steps=2", *how, ranks=2)
    assert [one["failure"] for one in ended] == ["BucketNotFoundError"] * 2


@pytest.mark.parametrize("strategy", ["model_parallel", "async"])
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    job: Job, run: str, strategy: str
) -> None:
    how = [f"--strategy={strategy}", "--callback"]
    [left] = job(
        "lightning_job.py", run, "--steps=4", "--killed-in=step-3", *how, ranks=2, killed=[1]
    )
    training_hears_first = ["RuntimeError"] if strategy == "async" else []
    assert left["failure"] in ["ProcessGroupError", *training_hears_first]
    assert cloudckpt.latest(run) == f"{run}/step-2"
    resumed = job("lightning_job.py", run, "--steps=3", "--resume=latest", *how, ranks=2)
    assert [one["failure"] for one in resumed] == ["", ""]
    assert cloudckpt.latest(run) == f"{run}/step-3"


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("model_parallel", 2), ("ddp", 1), ("async", 2), ("async-ddp", 2)]
)
def test_the_best_and_the_last_are_kept_and_training_goes_on_from_the_last(
    job: Job, run: str, tmp_path: Path, strategy: str, ranks: int
) -> None:
    how = [f"--strategy={strategy}", "--callback"]
    first = job("lightning_job.py", run, "--steps=4", *how, ranks=ranks)[0]
    names = [one.uri.removeprefix(f"{run}/") for one in cloudckpt.list_checkpoints(run)]
    best = sorted(sorted(range(4), key=first["losses"].__getitem__)[:2])
    assert names == [*(f"step-{index + 1}" for index in best), "last"]
    assert first["last"] == f"{run}/last"

    resumed = job("lightning_job.py", run, "--steps=6", "--resume=last", *how)[0]
    assert resumed["step"] == 6
    assert len(resumed["losses"]) == 2
    assert not [*(tmp_path / "cwd").iterdir()]


def test_the_plugin_gives_back_what_it_was_given_and_removes_it(
    environment: dict[str, str], run: str, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = ours.CloudCheckpointIO()
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    given = {
        "state_dict": {"weight": torch.arange(4.0)},
        "optimizer_states": [optimizer],
        "callbacks": {"Saving{'mode': 'min'}": {"best": None}},
        "epoch": 2,
    }
    plugin.save_checkpoint(given, f"{run}/last")
    loaded = plugin.load_checkpoint(f"{run}/last")
    assert torch.equal(loaded["state_dict"].pop("weight"), given["state_dict"].pop("weight"))
    assert loaded == given

    plugin.remove_checkpoint(f"{run}/last")
    plugin.remove_checkpoint(f"{run}/last")
    assert not cloudckpt.exists(f"{run}/last")
    assert not caplog.records
    plugin.remove_checkpoint("s3://no-such-bucket/run/last")  # on one rank only
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def _trainer(**options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 2,
    }
    return lightning.pytorch.Trainer(accelerator="cpu", devices=1, **{**quiet, **options})


def test_each_entrance_of_the_trainer_takes_uris(
    environment: dict[str, str], run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugins = [ours.CloudCheckpointIO()]
    saving = ours.CloudModelCheckpoint(run, every_n_train_steps=1, save_last=True)
    trainer = _trainer(max_steps=2, callbacks=[saving], plugins=plugins, limit_val_batches=0)
    model = BoringModel()
    trainer.fit(model)
    for name in ("test", "validate", "predict"):
        other = BoringModel()
        getattr(_trainer(plugins=plugins), name)(other, ckpt_path=saving.last_model_path)
        assert torch.equal(other.layer.weight, model.layer.weight)

    trainer.save_checkpoint(f"{run}/weights", weights_only=True)
    names = {item.name for item in cloudckpt.inspect(f"{run}/weights").items}
    assert names == {"state_dict.layer.weight", "state_dict.layer.bias", "other_values"}
    assert not [*tmp_path.iterdir()]


def test_lightnings_plugin_saves_by_ours_in_the_background(
    environment: dict[str, str], run: str
) -> None:
    def plugin() -> AsyncCheckpointIO:
        return AsyncCheckpointIO(ours.CloudCheckpointIO())

    saving = ours.CloudModelCheckpoint(run, every_n_train_steps=1, save_top_k=-1)
    _trainer(max_steps=2, callbacks=[saving], plugins=[plugin()]).fit(BoringModel())
    assert cloudckpt.latest(run) == f"{run}/step-2"

    trainer = _trainer(max_steps=1, plugins=[plugin()], enable_checkpointing=False)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("s3://no-such-bucket/run/step-1")
    with pytest.raises(cloudckpt.errors.BucketNotFoundError):
        trainer.strategy.teardown()
