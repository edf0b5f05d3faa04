from pathlib import Path

import pytest

from results import Job


@pytest.mark.parametrize("strategy", ["model_parallel", "ddp"])
def test_what_fabric_saves_on_two_ranks_it_loads_on_one(
    job: Job, run: str, tmp_path: Path, strategy: str
) -> None:
    kind = f"--strategy={strategy}"
    first = job("fabric_job.py", kind, f"--save={run}/step-2", ranks=2)[0]
    second = job("fabric_job.py", kind, f"--load={run}/step-2", f"--save={run}/step-4", ranks=1)[0]
    third = job("fabric_job.py", kind, f"--load={run}/step-4", ranks=2)

    losses = first["losses"] + second["losses"] + third[0]["losses"]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 6
    assert [one["step"] for one in third] == [6, 6]
    assert third[1]["rest"] == {"name": "of this run"}
    assert (second["own"], second["position"]) == (0, 0)
    more = job("fabric_job.py", kind, f"--load={run}/step-2", ranks=3)
    assert [one["own"] for one in more] == [0, 1, None]
    assert [one["position"] for one in more] == [0, 1, None]
    assert not [*(tmp_path / "cwd").iterdir()]
