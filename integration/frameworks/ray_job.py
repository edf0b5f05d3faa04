"""The run of Ray Train that docs/frameworks.md shows, on two workers, of which one crashes once."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import cloudckpt
import page
from cloudckpt.integrations.ray import checkpoint
from results import tell

SAVE, REPORT = "cloudckpt.save(state, checkpoint_id=uri)", "checkpoint=checkpoint(uri)"
STORAGE = '**storage("s3://bucket/runs")'
IN_BACKGROUND = {
    SAVE: "written = cloudckpt.async_save(state, checkpoint_id=uri)",
    REPORT: "checkpoint=checkpoint(uri, written), "
    "checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC",
}


def make_state() -> dict[str, Any]:
    return {"weight": torch.zeros(4), "step": 0}


def train_step(state: dict[str, Any]) -> float:
    with pytest.raises(
        cloudckpt.errors.ConfigError, match="Ray manages only checkpoints beneath s3://frameworks"
    ):
        checkpoint("s3://elsewhere/step-1")
    state["weight"] += 1
    state["step"] += 1
    crashed = Path(os.environ["CRASHED"])
    if (
        state["step"] == 4
        and ray.train.get_context().get_world_rank() == 0
        and not crashed.exists()
    ):
        crashed.touch()
        raise RuntimeError("it is to crash here")
    return state["weight"].sum().item()


def run(place: str, steps: int, changed: dict[str, str]) -> dict[str, Any]:
    """Runs the page's program; its function is pickled by Ray, with what it uses of this module."""
    here = {STORAGE: f'**storage("{place}")', "10_000": steps, "num_workers=8": "num_workers=2"}
    few = {"num_to_keep=3": "num_to_keep=2", "max_failures=3": "max_failures=1"}
    exec(page.code("Ray Train", {**here, **few, **changed}), globals())
    ended = globals()["result"]
    uri = globals()["uri_of"](ended.checkpoint)
    state = make_state()
    cloudckpt.load(state, checkpoint_id=uri)
    return {"loss": ended.metrics["loss"], "uri": uri, "sum": state["weight"].sum().item()}


def main() -> None:
    place = sys.argv[1]
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20)
    seen = {"crashed": run(f"{place}/ours", 6, {})}
    seen["begun anew"] = run(f"{place}/ours", 8, {})
    pyarrow = {STORAGE: f'storage_path="{place}/pyarrow"'}
    begun_with = {
        "(newest := ray.train.get_checkpoint()) is not None": "state['step'] == 0",
        "uri_of(newest)": f"'{seen['begun anew']['uri']}'",
    }
    seen["in background"] = run(place, 11, IN_BACKGROUND | pyarrow | begun_with)
    tell(**seen)


if __name__ == "__main__":
    main()
