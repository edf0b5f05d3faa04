"""The server of docs/gcs.md, for those who try gs:// without an account."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import Config, GCSOptions

ROOT = Path(__file__).parents[1]


@pytest.mark.only_on("gcp-storage-emulator")
def test_the_front_that_the_page_starts_takes_a_checkpoint_in_parts():
    (line,) = [
        line.split()
        for line in (ROOT / "docs" / "gcs.md").read_text().splitlines()
        if "gcs_front.py bucket" in line
    ]
    path, _, script, bucket, _, _ = (word.replace("clone/", f"{ROOT}/") for word in line)
    name, value = path.split("=")
    command = [sys.executable, script, bucket, "--port", "0"]
    environment = {**os.environ, name: value}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[1].partition("=")[2]
            options = GCSOptions(endpoint_url=url)
            config = Config(gcs=options, conditional_writes="off", part_size=5 << 20)
            state, loaded = {"w": torch.randn(3 << 20)}, {"w": torch.zeros(3 << 20)}
            place = {"checkpoint_id": f"gs://{bucket}/run/step-1", "config": config}
            cloudckpt.save(state, no_dist=True, **place)
            cloudckpt.load(loaded, no_dist=True, **place)
        finally:
            server.send_signal(signal.SIGINT)
    assert torch.equal(loaded["w"], state["w"])
    assert server.returncode == 0
