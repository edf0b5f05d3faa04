"""The script for a GPU, with the device replaced by a CPU."""

import subprocess
import sys
from contextlib import nullcontext

import cloudckpt
import gpu

CPU = ["--device", "cpu", "--mib", "1"]


def test_the_script_finds_all_values_equal_to_the_bit(tmp_path):
    command = [sys.executable, "-W", "ignore", gpu.__file__, *CPU, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = "each dtype and layout", "AdamW", "DTensors", "stall of async_save", "beside a save"
    for row in rows:
        assert row in done.stdout
    assert "DIFFER" not in done.stdout


def test_the_script_fails_where_a_value_differs(tmp_path, monkeypatch, capsys):
    """A load that leaves the tensors as they were."""
    monkeypatch.setattr(cloudckpt, "load", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "alone", lambda device: nullcontext())
    for needs_processes in ("distributed", "stalls", "steps"):
        monkeypatch.setattr(gpu, needs_processes, lambda *_: None)
    assert gpu.main([*CPU, "--folder", str(tmp_path)]) == 1
    assert "DIFFER" in capsys.readouterr().out
