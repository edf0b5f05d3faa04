import importlib.util
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import cloudckpt
import page
from results import Job

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def assets(tmp_path: Path, environment: dict[str, str]) -> None:
    """A tokenizer of some words, and texts of these."""
    words = [f"w{number}" for number in range(200)]
    chance = random.Random(0)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "data").mkdir()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = {word: number for number, word in enumerate([*named.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    texts = ({"text": " ".join(chance.choices(words, k=100))} for _ in range(100))
    (tmp_path / "data" / "data.json").write_text("\n".join(map(json.dumps, texts)))
    environment["ASSETS"] = str(tmp_path)


def _arguments(run: str, tmp_path: Path, *more: str, steps: int = 7) -> list[str]:
    """What docs/frameworks.md shows, with few steps."""
    shown = page.command("torchtitan")
    options = [run if word == "s3://bucket/run" else word for word in shown]
    return [
        *options[options.index("--checkpoint.enable") :],
        *("--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"),
        *("--training.steps", str(steps), "--debug.seed", "1"),
        *("--dump-folder", str(tmp_path / "dump"), *more),
    ]


def test_training_that_was_killed_goes_on_from_the_newest_checkpoint(
    assets: None, job: Job, run: str, tmp_path: Path
) -> None:
    for package in ("s3fs", "gcsfs", "adlfs"):
        assert importlib.util.find_spec(package) is None  # whose part ours have here
    arguments = _arguments(f"{run}/straight", tmp_path)
    straight = job("torchtitan_job.py", *arguments, ranks=2)[0]["losses"]
    assert set(straight) == {str(step) for step in range(1, 8)}
    assert cloudckpt.latest(f"{run}/straight") == f"{run}/straight/step-7"

    arguments = _arguments(run, tmp_path)
    with pytest.raises(AssertionError, match="SIGKILL"):
        job("torchtitan_job.py", *arguments, "--kill-at=5", ranks=2)
    newest = cloudckpt.latest(run)
    assert newest == f"{run}/step-4"

    resumed = job("torchtitan_job.py", *arguments, ranks=2)[0]["losses"]
    assert set(resumed) == {"5", "6", "7"}
    for step, loss in resumed.items():
        assert loss == pytest.approx(straight[step], rel=1e-5)
    found = [one.step for one in cloudckpt.list_checkpoints(run)]
    # torchtitan removes what is older than the two newest each time, and looks before the one
    # that is under way, and never behind the last one
    assert set(found) <= {4, 5, 6, 7}
    assert {6, 7} <= set(found)
    assert not [*(tmp_path / "cwd").iterdir()]
    assert not [*tmp_path.glob("dump/**/*.distcp")]

    path = ["--checkpoint.initial_load_path", f"{run}/step-7"]
    arguments = _arguments(f"{run}/tuned", tmp_path, *path, steps=1)
    first = job("torchtitan_job.py", *arguments, ranks=2)[0]["losses"]["1"]
    assert first < 0.99 * straight["1"]
