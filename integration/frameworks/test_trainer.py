import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cloudckpt
from cloudckpt.integrations.transformers import CloudCheckpointCallback
from results import Job

SHAPE = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("Parameter", 2, 1), ("DTensor", 2, 2), ("DTensor", 2, 1)]
)
def test_a_fresh_node_goes_on_from_the_newest_checkpoint(
    job: Job, run: str, tmp_path: Path, kind: str, before: int, after: int
) -> None:
    fsdp = ["--fsdp"] if kind == "DTensor" else []
    straight = job("trainer_job.py", f"{run}/straight", "--steps=5", *fsdp, ranks=before)[0]
    shutil.rmtree(tmp_path / "results-scratch")
    first = job("trainer_job.py", run, "--steps=3", *fsdp, ranks=before)
    shutil.rmtree(tmp_path / "results-scratch")
    resumed = job("trainer_job.py", run, "--steps=5", *fsdp, ranks=after)

    assert {one["kind"] for one in (*first, *resumed)} == {kind}
    assert resumed[0]["losses"] == pytest.approx(straight["losses"], rel=1e-3)
    assert all(one["step"] == 5 and one["is_gone"] for one in resumed)
    kept = [one.step for one in cloudckpt.list_checkpoints(run) if one.step is not None]
    assert kept == [4, 5]


def test_a_checkpoint_has_the_small_files_and_comes_back_as_it_was(
    job: Job, run: str, tmp_path: Path
) -> None:
    job("trainer_job.py", run, "--steps=1")
    restored = CloudCheckpointCallback(run).restore(1)

    assert restored is not None
    folder = Path(restored)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 1
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= names


def test_what_would_make_a_local_folder_of_a_uri_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cloudckpt.install()
    model = LlamaForCausalLM(SHAPE)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(cloudckpt.InstallError, match="CloudCheckpointCallback"):
        TrainingArguments("s3://bucket/run", use_cpu=True)
    with pytest.raises(cloudckpt.InvalidURIError, match="s3://bucket/run"):
        TrainingArguments(Path("s3://bucket/run"), use_cpu=True)
    for saving in (trainer.save_model, model.save_pretrained):
        with pytest.raises(cloudckpt.InstallError, match=r"cloudckpt\.hf\.save"):
            saving("s3://bucket/run")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_restored_of_an_empty_run(environment: dict[str, str], run: str) -> None:
    assert CloudCheckpointCallback(run).restore() is None


def test_a_checkpoint_of_something_else_is_refused(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    cloudckpt.save({"../outside": torch.zeros(4, dtype=torch.uint8)}, checkpoint_id=f"{run}/step-1")
    cloudckpt.save({"weight": torch.zeros(4)}, checkpoint_id=f"{run}/step-2")
    for step in (1, 2):
        with pytest.raises(cloudckpt.ConfigError, match="is no file of a"):
            CloudCheckpointCallback(run).restore(step)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        content = torch.full((100_000,), step, dtype=torch.uint8)
        cloudckpt.save({"folder/file": content}, checkpoint_id=f"{run}/step-{step}")
    [data] = (run / "step-2").glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[50_000] ^= 1
    data.write_bytes(damaged)

    saved = CloudCheckpointCallback(str(run))
    restored = saved.restore()
    assert restored is not None
    assert (Path(restored) / "folder" / "file").read_bytes() == bytes([1]) * 100_000
    with pytest.raises(cloudckpt.CheckpointCorruptError):
        saved.restore(2)
