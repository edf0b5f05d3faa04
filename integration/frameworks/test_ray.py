import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cloudckpt

HERE = Path(__file__).parent
pytestmark = pytest.mark.xdist_group("ray")  # it is started once


@pytest.fixture(scope="module")
def place(environment: dict[str, str]) -> str:
    return "s3://frameworks/of-ray"


@pytest.fixture(scope="module")
def seen(
    environment: dict[str, str], place: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What all runs of the job have told; Ray is started once for them."""
    folder = tmp_path_factory.mktemp("ray")
    path = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
    told = {"CRASHED": str(folder / "crashed"), "RESULTS": str(folder / "results"), "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, str(HERE / "ray_job.py"), place],
        env={**environment, **told, "PYTHONPATH": path},
        cwd=folder,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    seen: dict[str, Any] = json.loads((folder / "results0").read_text())
    return seen


def test_a_run_goes_on_after_a_crash(seen: dict[str, Any], place: str) -> None:
    assert seen["crashed"]["loss"] == seen["crashed"]["sum"] == 24.0
    assert seen["crashed"]["uri"] == f"{place}/ours/run/step-6"


def test_a_run_that_is_begun_anew_goes_on_and_keeps_what_it_is_told_to(
    seen: dict[str, Any], place: str
) -> None:
    assert seen["begun anew"]["uri"] == f"{place}/ours/run/step-8"
    assert seen["begun anew"]["sum"] == 32.0
    assert _steps(f"{place}/ours/run") == [7, 8]


def test_checkpoints_that_are_reported_in_the_background_stay_where_they_are(
    seen: dict[str, Any], place: str
) -> None:
    run = f"{place}/pyarrow/run"
    assert seen["in background"] == {"loss": 12.0, "uri": f"{run}/step-3", "sum": 12.0}
    assert _steps(run) == [2, 3]


def _steps(run: str) -> list[int | None]:
    """Of all folders of a run, Ray's own copies included if it makes any."""
    return [one.step for one in cloudckpt.list_checkpoints(run)]
