"""The script for a GPU, with the device replaced by a CPU."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("gpu.py")


def run(tmp_path, *arguments, **changes):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--device", "cpu", "--mib", "4"]
    command += ["--folder", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, **changes)


def test_the_script_finds_all_values_equal_to_the_bit(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = "each dtype and layout", "AdamW", "DTensors", "stall of async_save", "beside a save"
    for row in rows:
        assert row in done.stdout
    assert "DIFFER" not in done.stdout


def test_the_script_fails_where_a_value_differs(tmp_path, monkeypatch):
    """A load that leaves the tensors as they were."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parents[2] / 'src')!r})\n"
        "import cloudckpt\n"
        "cloudckpt.load = lambda *_, **__: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFER" in done.stdout
