"""A run of Ray Train that crashes once, on two workers."""

import os
import sys
from typing import Any

import pyarrow.fs
import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(told: dict[str, Any]) -> None:
    from ray.train import report
    from ray.train.v2.api.report_config import CheckpointUploadMode

    import cloudckpt
    from cloudckpt.integrations.ray import checkpoint, run_uri, uri_of

    state = {"weight": torch.zeros(4), "step": 0}
    newest = ray.train.get_checkpoint()
    if newest is not None:
        cloudckpt.load(state, checkpoint_id=uri_of(newest))
    for step in range(state["step"] + 1, 7):
        state["weight"] += 1
        state["step"] = step
        if step == 4 and newest is None:
            raise RuntimeError("it is to crash here")
        uri = f"{run_uri()}/step-{step}"
        cloudckpt.save(state, checkpoint_id=uri)
        seen = {"step": step, "sum": state["weight"].sum().item(), "crashed": newest is not None}
        mode = CheckpointUploadMode.NO_UPLOAD
        report(seen, checkpoint=checkpoint(uri), checkpoint_upload_mode=mode)


if __name__ == "__main__":
    server = os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
    files = pyarrow.fs.S3FileSystem(endpoint_override=server, scheme="http", region="us-east-1")
    ray.init(num_cpus=3, include_dashboard=False)
    run = RunConfig(
        name="run",
        storage_path=sys.argv[1],
        storage_filesystem=files,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    ended = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
    print("ENDED", ended.checkpoint.path, ended.metrics)
