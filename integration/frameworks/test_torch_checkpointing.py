from pathlib import Path

import pytest

import cloudckpt
from cloudckpt.integrations.torch_checkpointing import CloudStorage, CloudStorageConfig
from results import Job

WEIGHT = [float(number) for number in range(64)]


@pytest.fixture
def storage(environment: dict[str, str]) -> CloudStorage:
    return CloudStorageConfig().create_storage()


@pytest.mark.parametrize(
    ("before", "how", "after"),
    [
        (1, "in background", 2),
        (2, "in background", 1),
        (2, "at once", 2),
    ],
)
def test_what_was_saved_is_loaded_by_any_number_of_ranks(
    job: Job, run: str, storage: CloudStorage, tmp_path: Path, before: int, how: str, after: int
) -> None:
    job("torch_checkpointing_job.py", f"{run}/step-7", f"--save={how}", ranks=before)
    assert storage.ls(Path(run)) == ["step-7"]  # nothing is left of the folder that was renamed
    assert cloudckpt.files.load_file(f"{run}/step-7/.cloudckpt-files")
    assert not cloudckpt.sweep(run, older_than=0).objects
    loaded = job("torch_checkpointing_job.py", f"{run}/step-7", ranks=after)
    assert loaded == [{"weight": WEIGHT}] * after
    assert not [*(tmp_path / "cwd").iterdir()]


def test_what_has_no_resharder_comes_back_to_its_rank(job: Job, run: str) -> None:
    path = f"{run}/step-7"
    job("torch_checkpointing_job.py", path, "--save=at once", "--own", ranks=2)
    same = job("torch_checkpointing_job.py", path, "--own", ranks=2)
    assert [one["own"] for one in same] == [0, 1]


def test_what_one_rank_failed_to_save_is_not_there(
    job: Job, run: str, storage: CloudStorage
) -> None:
    path = f"{run}/step-7"
    told = job("torch_checkpointing_job.py", path, "--save=at once", "--failing-rank=1", ranks=2)
    assert "this rank is to fail" in told[1]["failure"]
    assert "failure" in told[0]  # that the other one did not come
    assert not storage.exists(Path(path))
    [after] = job("torch_checkpointing_job.py", path)
    assert "failure" in after


def test_a_save_that_was_killed_leaves_nothing_and_is_done_again(
    job: Job, run: str, storage: CloudStorage
) -> None:
    path, how = f"{run}/step-7", "at once"
    job("torch_checkpointing_job.py", path, f"--save={how}", "--killed", ranks=2, killed=[0, 1])
    assert not storage.exists(Path(path))
    assert not storage.exists(Path(run))
    loaded = job("torch_checkpointing_job.py", path, f"--save={how}", ranks=2)
    assert loaded == [{"weight": WEIGHT}] * 2
    assert job("torch_checkpointing_job.py", path) == [{"weight": WEIGHT}]
    left = cloudckpt.sweep(run, older_than=0).objects
    assert left
    assert job("torch_checkpointing_job.py", path) == [{"weight": WEIGHT}]


def test_the_newest_are_kept_and_nothing_of_another_run_is_deleted(
    storage: CloudStorage, run: str
) -> None:
    for folder in (run, f"{run}-resumed-from"):
        for step in range(1, 6):
            source, target = Path(f"{folder}/tmp_step-{step}"), Path(f"{folder}/step-{step}")
            storage.write(source / "metadata.pkl", b"%d" % step)
            storage.rename(source, target, is_directory=True)
    for name in storage.ls(Path(run))[:-2]:
        storage.rmdir(Path(run) / name)
    assert storage.ls(Path(run)) == ["step-4", "step-5"]
    assert storage.read(Path(f"{run}/step-5/metadata.pkl")) == b"5"
    before = Path(f"{run}-resumed-from")
    assert [storage.read(before / name / "metadata.pkl") for name in storage.ls(before)] == [
        b"%d" % step for step in range(1, 6)
    ]
    assert not cloudckpt.sweep(run, older_than=0).objects
    newest, pending = Path(f"{run}/step-5"), Path(f"{run}/tmp_step-6/metadata.pkl")
    assert (storage.isdir(newest), storage.getsize(newest / "metadata.pkl")) == (True, 1)
    assert storage.remap_path(newest) == f"{run}/step-5"
    with storage.stream_write(pending) as file:
        file.write(b"6")
    assert storage.stream_read(pending).read() == b"6"
    storage.delete(pending)
    assert not storage.exists(pending)
