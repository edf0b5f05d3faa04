from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.integrations import lightning as ours
from results import Job


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("model_parallel", 2, 1), ("model_parallel", 1, 2), ("fsdp", 2, 1)],
)
def test_sharded_training_goes_on_with_another_number_of_ranks(
    job: Job, run: str, tmp_path: Path, strategy: str, before: int, after: int
) -> None:
    how = f"--strategy={strategy}"
    straight = job("lightning_job.py", f"{run}/straight", "--steps=6", how, ranks=1)[0]
    job("lightning_job.py", run, "--steps=3", how, ranks=before)
    resumed = job("lightning_job.py", run, "--steps=6", "--resume=latest", how, ranks=after)

    assert [one["step"] for one in resumed] == [6] * after
    assert resumed[0]["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert cloudckpt.latest(run) == f"{run}/step-6"
    assert not [*(tmp_path / "cwd").iterdir()]


def test_a_sharded_checkpoint_is_one_of_named_tensors(job: Job, run: str) -> None:
    job("lightning_job.py", run, "--steps=1", ranks=2)

    state = {"state_dict": {"net.0.weight": torch.zeros(16, 8)}}
    cloudckpt.load(state, checkpoint_id=f"{run}/step-1")
    assert state["state_dict"]["net.0.weight"].any()
    names = {item.name for item in cloudckpt.inspect(f"{run}/step-1").items}
    assert "optimizer_0.state.net.2.bias.exp_avg" in names


def test_training_that_is_not_sharded_goes_on_through_the_plugin(
    job: Job, run: str, tmp_path: Path
) -> None:
    straight = job("lightning_job.py", f"{run}/straight", "--steps=4", "--strategy=ddp")[0]
    job("lightning_job.py", run, "--steps=2", "--strategy=ddp", ranks=2)
    resumed = job("lightning_job.py", run, "--steps=4", "--strategy=ddp", "--resume=latest")[0]

    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)
    assert not [*(tmp_path / "cwd").iterdir()]


@pytest.mark.parametrize(("strategy", "ranks"), [("model_parallel", 2), ("ddp", 1)])
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
    environment: dict[str, str], run: str
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


def test_the_plugin_goes_lightnings_way_with_paths(tmp_path: Path) -> None:
    plugin = ours.CloudCheckpointIO()
    plugin.save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == {"epoch": 2}
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"epoch": 2}
    plugin.remove_checkpoint(tmp_path / "last.ckpt")
    assert not [*tmp_path.iterdir()]


def test_a_folded_uri_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cloudckpt.InvalidURIError, match="s3://bucket/run"):
        ours.CloudCheckpointIO().save_checkpoint({"epoch": 2}, Path("s3://bucket/run"))
    assert not [*tmp_path.iterdir()]
