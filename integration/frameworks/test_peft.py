"""LoRA with PEFT: what goes to the store, at first and later, and how a run goes on."""

from typing import Any

import pytest

import cloudckpt
from results import Job

BASE = 2 * (4 * 64**2 + 3 * 2 * 64**2) * 4
"""Bytes of the matrices in the layers of the base."""
RANKS = {"lightning": 1, "lightning-sharded": 2, "accelerate": 2, "trainer": 1}


def _sent(ended: list[dict[str, Any]]) -> dict[str, int]:
    """The bytes of each save, of all ranks; of whole checkpoints one saves."""
    return {uri: sum(one["sent"].get(uri, 0) for one in ended) for uri in ended[0]["sent"]}


def _model_in(uri: str) -> set[str]:
    found = {item.name for item in cloudckpt.inspect(uri).items}
    return {name for name in found if name.startswith(("model_0.", "state_dict."))}


def test_the_trainer_saves_adapters_only_and_goes_on(job: Job, run: str) -> None:
    straight = job("peft_job.py", "trainer", run, "--steps=4", ranks=1)
    sent = _sent(straight)
    assert len(sent) == 4
    assert max(sent.values()) < BASE / 3
    third = [*sent][2]
    assert all(".lora_" in name for name in _model_in(third))
    how = ["--steps=4", f"--resume={third}"]
    resumed = job("peft_job.py", "trainer", f"{run}/resumed", *how, ranks=1)
    assert resumed[0]["losses"][-1] == pytest.approx(straight[0]["losses"][-1], rel=1e-4)


@pytest.mark.parametrize("framework", ["lightning", "lightning-sharded", "accelerate"])
def test_the_base_is_saved_once_if_saves_are_incremental_and_is_loaded(
    job: Job, run: str, framework: str
) -> None:
    ranks = RANKS[framework]
    straight = job("peft_job.py", framework, run, "--steps=4", "--incremental", ranks=ranks)
    sent = _sent(straight)
    first, second, third, _ = sent
    assert sent[first] > BASE
    assert max(sent[uri] for uri in sent if uri != first) < BASE / 3
    assert any("k_proj.weight" in name for name in _model_in(third))
    assert not cloudckpt.exists(first)  # the frameworks keep two
    assert not cloudckpt.exists(second)
    cloudckpt.verify(third)

    how = ["--steps=4", "--base=7", f"--resume={third}"]  # in which the base is another one
    resumed = job("peft_job.py", framework, f"{run}/resumed", *how, ranks=ranks)
    assert resumed[0]["losses"][-1] == pytest.approx(straight[0]["losses"][-1], rel=1e-4)
