import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

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
    how = ["--fsdp"] if kind == "DTensor" else ["--asynchronous"]
    straight = job("trainer_job.py", f"{run}/straight", "--steps=4", *how, ranks=before)[0]
    shutil.rmtree(tmp_path / "results-scratch")
    first = job("trainer_job.py", run, "--steps=2", *how, ranks=before)
    shutil.rmtree(tmp_path / "results-scratch")
    resumed = job("trainer_job.py", run, "--steps=4", *how, ranks=after)

    assert {one["kind"] for one in (*first, *resumed)} == {kind}
    assert resumed[0]["losses"] == pytest.approx(straight["losses"], rel=1e-3)
    assert all(one["step"] == 4 and one["is_gone"] for one in resumed)
    if before == after:
        assert [one["drawn"] for one in resumed] == [one["drawn"] for one in first]
    kept = [one.step for one in cloudckpt.list_checkpoints(run) if one.step is not None]
    assert kept == [2, 3, 4]  # and the one that was restored


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


def _trainer(folder: Path, saved: CloudCheckpointCallback, steps: int, **options: Any) -> Trainer:
    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "labels": tokens} for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        **{"save_steps": 1, "save_total_limit": 1, **options},
    )
    model = LlamaForCausalLM(SHAPE)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[saved])


def _steps(run: str) -> list[int | None]:
    return [one.step for one in cloudckpt.list_checkpoints(run) if one.is_committed]


def test_checkpoints_are_sent_while_training_goes_on_and_leave_the_local_disk(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    def made() -> CloudCheckpointCallback:
        return CloudCheckpointCallback(run, max_to_keep=2, asynchronous=True, keep_local=False)

    _trainer(tmp_path, made(), 4).train()
    assert _steps(run) == [3, 4]
    assert not [*tmp_path.iterdir()]

    saved = made()
    trainer = _trainer(tmp_path, saved, 6)
    restored = saved.restore()
    assert restored is not None
    assert Path(restored).parent.parent == tmp_path  # where there is room
    trainer.train(resume_from_checkpoint=restored)
    assert _steps(run) == [4, 5, 6]  # and the one that was restored
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_to_save_ends_the_training_or_is_logged(
    environment: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:
    saved = CloudCheckpointCallback("s3://no-such-bucket/run", asynchronous=asynchronous)
    trainer = _trainer(tmp_path, saved, 3)
    with pytest.raises(cloudckpt.errors.StoreError, match="no-such-bucket"):
        trainer.train()
    assert trainer.state.global_step == 1  # the run can't be claimed

    patient = CloudCheckpointCallback(
        "s3://no-such-bucket/run", asynchronous=asynchronous, keep_local=False, on_failure="log"
    )
    trainer = _trainer(tmp_path, patient, 3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("saving or resuming failed, and the job continues") == 3
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def test_the_best_checkpoint_is_kept_and_comes_to_a_fresh_node(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 0.0,  # no later one is better than the first
        "load_best_model_at_end": True,
    }
    saved = CloudCheckpointCallback(run, max_to_keep=1)
    _trainer(tmp_path / "first", saved, 3, **best).train()
    assert _steps(run) == [1, 3]

    saved = CloudCheckpointCallback(run, max_to_keep=1)
    trainer = _trainer(tmp_path / "fresh", saved, 4, **best)
    trainer.train(resume_from_checkpoint=saved.restore())
    assert trainer.state.best_model_checkpoint == str(tmp_path / "fresh" / "checkpoint-1")
    assert (tmp_path / "fresh" / "checkpoint-1" / "model.safetensors").exists()
    assert _steps(run) == [1, 3, 4]  # the best, the one that was restored, and the newest
    with pytest.raises(cloudckpt.errors.ConfigError, match="keep_local=False"):
        _trainer(tmp_path, CloudCheckpointCallback(run, keep_local=False), 1, **best)


def test_the_best_saved_checkpoint_is_kept_though_a_step_that_was_not_saved_is_better(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    measured = {1: 0.1, 2: 0.9, 3: 0.95, 4: 0.2, 5: 0.1, 6: 0.1}

    def made(folder: str, steps: int) -> tuple[CloudCheckpointCallback, Trainer]:
        saved = CloudCheckpointCallback(run, max_to_keep=1)
        trainer = _trainer(
            tmp_path / folder,
            saved,
            steps,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="quality",
            greater_is_better=True,
        )
        trainer.compute_metrics = lambda _: {"quality": measured[trainer.state.global_step]}
        return saved, trainer

    made("first", 4)[1].train()
    assert _steps(run) == [2, 4]
    saved, trainer = made("fresh", 6)
    trainer.train(resume_from_checkpoint=saved.restore())
    assert trainer.state.best_model_checkpoint == str(tmp_path / "fresh" / "checkpoint-2")
    assert _steps(run) == [2, 4, 6]  # the best, the one that was restored, and the newest


def test_what_the_trainer_writes_when_it_is_told_to_end_is_saved(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    class Notice(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            [callback] = (
                one
                for one in trainer.callback_handler.callbacks
                if isinstance(one, JITCheckpointCallback)
            )
            callback.jit_manager.is_checkpoint_requested = state.global_step == 2

    saved = CloudCheckpointCallback(run)
    trainer = _trainer(tmp_path, saved, 4, save_strategy="no", enable_jit_checkpoint=True)
    trainer.add_callback(Notice())
    trainer.train()
    assert trainer.state.global_step == 3  # the step that it was at is finished
    assert _steps(run) == [2]


def test_a_checkpoint_of_something_else_is_refused(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    cloudckpt.save({"../outside": torch.zeros(4, dtype=torch.uint8)}, checkpoint_id=f"{run}/step-1")
    cloudckpt.save({"weight": torch.zeros(4)}, checkpoint_id=f"{run}/step-2")
    for step in (1, 2):
        with pytest.raises(cloudckpt.errors.ConfigError) as caught:
            CloudCheckpointCallback(run).restore(step)
        assert caught.value.uri == f"{run}/step-{step}"


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
    with pytest.raises(cloudckpt.errors.CheckpointCorruptError):
        saved.restore(2)
