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
    [(1, "in background", 2), (2, "in background", 1), (2, "at once", 2)],
)
def test_what_was_saved_is_loaded_by_any_number_of_ranks(
    job: Job, run: str, storage: CloudStorage, tmp_path: Path, before: int, how: str, after: int
) -> None:
    job("torch_checkpointing_job.py", f"{run}/step-7", f"--save={how}", ranks=before)
    assert storage.ls(Path(run)) == ["step-7"]  # nothing is left of the folder that was renamed
    loaded = job("torch_checkpointing_job.py", f"{run}/step-7", ranks=after)
    assert loaded == [{"weight": WEIGHT}] * after
    assert not [*(tmp_path / "cwd").iterdir()]


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


def test_a_place_that_is_taken_is_not_renamed_to(storage: CloudStorage, run: str) -> None:
    storage.write(Path(f"{run}/tmp_a/x"), b"new")
    storage.write(Path(f"{run}/a/x"), b"old")
    with pytest.raises(FileExistsError):
        storage.rename(Path(f"{run}/tmp_a"), Path(f"{run}/a"), is_directory=True)
    assert storage.read(Path(f"{run}/a/x")) == b"old"
    with pytest.raises(FileNotFoundError):
        storage.rename(Path(f"{run}/nothing"), Path(f"{run}/b"), is_directory=True)


def test_a_renaming_that_was_cut_off_is_invisible_and_done_again(
    storage: CloudStorage, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Path(f"{run}/tmp_a"), Path(f"{run}/a")
    for name in ("x", "deep/y"):
        storage.write(source / name, name.encode())
    files, _ = storage._at(source)
    copy = type(files).copy_files

    def cut_off(self: object, pairs: list[tuple[str, str]]) -> None:
        copy(self, pairs[:1])
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "copy_files", cut_off)
        with pytest.raises(ConnectionError):
            storage.rename(source, target, is_directory=True)
    assert not storage.exists(target)
    assert not storage.isdir(target)
    assert storage.ls(Path(run)) == ["tmp_a"]

    storage.rename(source, target, is_directory=True)
    assert storage.ls(Path(run)) == ["a"]
    assert storage.ls(target) == ["deep", "x"]
    assert storage.read(target / "deep" / "y") == b"deep/y"
    assert storage.glob(f"{run}/a*") == [f"{run}/a"]
    storage.rmdir(target)
    assert not storage.exists(target)


def test_files_are_streamed_replaced_and_measured(storage: CloudStorage, run: str) -> None:
    path = Path(f"{run}/x")
    with storage.stream_write(path) as file:
        file.write(b"0123456789")
    assert storage.getsize(path) == 10
    with storage.stream_read(path) as file:
        assert file.seek(4) == 4
        room = bytearray(3)
        assert file.readinto(room) == 3
    assert bytes(room) == b"456"
    storage.write(Path(f"{run}/y"), b"new")
    storage.rename(Path(f"{run}/y"), path)
    assert storage.read(path) == b"new"
    assert storage.ls(Path(run)) == ["x"]
    storage.delete(path)
    assert not storage.exists(path)
    assert storage.remap_path(path) == f"{run}/x"


def test_local_paths_are_refused(storage: CloudStorage, tmp_path: Path) -> None:
    with pytest.raises(cloudckpt.errors.InvalidURIError, match="LocalFileSystemStorageConfig"):
        storage.exists(tmp_path)
