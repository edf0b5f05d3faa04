import os
import subprocess
import sys
from pathlib import Path

import cloudckpt

HERE = Path(__file__).parent


def test_a_run_goes_on_after_a_crash_and_keeps_what_it_is_told_to(
    environment: dict[str, str], run: str, tmp_path: Path
) -> None:
    path = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, str(HERE / "ray_job.py"), run.removeprefix("s3://")],
        env={**environment, "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": path},
        cwd=tmp_path,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "'step': 6, 'sum': 24.0, 'crashed': True" in ended.stdout
    found = cloudckpt.list_checkpoints(f"{run}/run")
    assert [one.step for one in found] == [5, 6]  # and no copies of Ray's
