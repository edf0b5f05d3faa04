from pathlib import Path

import pytest

from results import Job


@pytest.mark.parametrize("framework", ["lightning", "fabric", "accelerate", "trainer"])
def test_the_code_of_the_page_saves_and_loads(
    job: Job, run: str, tmp_path: Path, framework: str
) -> None:
    told = job("page_job.py", framework, run, ranks=2)
    assert [one["latest"] for one in told] == [f"{run}/step-{told[0]['step']}"] * 2
    assert not [*(tmp_path / "cwd").iterdir()]
