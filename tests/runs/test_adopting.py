"""A step that was staged when its trainers were killed is finished without them, and restored."""

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import cloudckpt
from background.waiting import eventually, processes_of
from cloudckpt import CheckpointManager
from cloudckpt.checkpoint.objects import WrittenObject, is_pending_name, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.config import MIB
from cloudckpt.dcp.global_plan import record_of
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import CheckpointCorruptError, IncompleteSaveError
from cloudckpt.runs import Preemption, adopting
from cloudckpt.runs.adopting import adopt
from runs.orphans import job, settled, values_at

KILLED = -signal.SIGKILL


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_pending_name(path.name))


def is_pending(run: Path | str, config: cloudckpt.Config | None = None) -> bool:
    """Whether a saving process has reported: a job that comes earlier knows nothing of the step."""
    return any(one.is_pending for one in cloudckpt.list_checkpoints(run, config=config))


def killed(folder: Path, world: int = 1, **options) -> None:
    """A job that has committed step 1, and has sent step 2 when all its ranks are killed."""
    ended = job(folder, world, last=2, dies_at=2, how="at its commit", **options)
    assert [code for code, _ in ended] == [KILLED] * world
    assert settled()


def test_what_was_staged_is_restored(tmp_path) -> None:
    ended = job(tmp_path, 2, last=2, dies_at=2)
    assert [code for code, _ in ended] == [KILLED] * 2
    assert eventually(lambda: is_pending(tmp_path / "run"))
    assert job(tmp_path, 2) == [(0, (2, True))] * 2  # they may still be sending
    assert settled()
    assert not left(tmp_path / "run" / "step-2")
    assert cloudckpt.verify(str(tmp_path / "run" / "step-2")).items == 6
    assert cloudckpt.inspect(str(tmp_path / "run" / "step-2")).notes.step == 2
    found = {"weight": torch.zeros(12, 5000), "bias": torch.zeros(7), "log": []}
    dcp.load(found, checkpoint_id=str(tmp_path / "run" / "step-2"), no_dist=True)
    assert torch.equal(found["weight"], values_at(2)["weight"])
    assert found["log"] == [0, 1]


@pytest.mark.parametrize("replicas", ["warn", "refuse", "trust"])
def test_what_differs_between_ranks_is_said(tmp_path, replicas, caplog) -> None:
    ended = job(tmp_path, 2, last=2, dies_at=2, differs=True)
    assert [code for code, _ in ended] == [KILLED] * 2
    assert settled()
    where, config = str(tmp_path / "run" / "step-2"), cloudckpt.Config(replicas=replicas)
    if replicas == "refuse":
        with pytest.raises(IncompleteSaveError, match="per_rank"):
            adopt(where, config=config)
    else:
        adopt(where, config=config)
        assert ("per_rank" in caplog.text) == (replicas == "warn")


def test_the_next_job_may_have_another_number_of_ranks(tmp_path) -> None:
    killed(tmp_path, 2)
    assert len(left(tmp_path / "run" / "step-2")) == 2
    assert job(tmp_path, 3) == [(0, (2, True))] * 3
    assert job(tmp_path, 1) == [(0, (2, True))]


def test_what_it_refers_to_is_kept_for_it(tmp_path) -> None:
    """The step that was staged shares bytes with the one before, which is deleted then."""
    killed(tmp_path, 2, incremental=True)
    older, newer = (str(tmp_path / "run" / f"step-{step}") for step in (1, 2))
    assert job(tmp_path, 2, incremental=True) == [(0, (2, True))] * 2
    assert list(cloudckpt.inspect(newer).shared) == [f"file://{older}"]
    cloudckpt.delete(older)
    cloudckpt.sweep(str(tmp_path / "run"), older_than=0)
    assert cloudckpt.verify(newer).items == 6
    cloudckpt.delete(newer)
    assert not list((tmp_path / "run").glob("step-*"))


def test_on_s3(tmp_path, bucket, s3_config) -> None:
    run = f"s3://{bucket}/run"
    ended = job(tmp_path, 2, run=run, last=2, dies_at=2, config=s3_config)
    assert [code for code, _ in ended] == [KILLED] * 2
    assert eventually(lambda: is_pending(run, s3_config))
    assert job(tmp_path, 2, run=run, config=s3_config) == [(0, (2, True))] * 2


def test_the_steps_of_a_job_that_has_claimed_the_run_since_stay_as_they_are(tmp_path) -> None:
    killed(tmp_path)
    assert job(tmp_path, last=1, adopt_wait=0.0) == [(0, (1, True))]  # did not save: no claim
    (tmp_path / "run" / "step-1" / ".metadata").unlink()
    assert job(tmp_path, last=1, adopt_wait=0.0) == [(0, (None, True))]  # claims, saves step 1
    with pytest.raises(IncompleteSaveError, match="another job has claimed the run"):
        adopt(str(tmp_path / "run" / "step-2"))
    assert job(tmp_path) == [(0, (1, True))]
    cloudckpt.sweep(str(tmp_path / "run"), older_than=0)
    assert [one.step for one in cloudckpt.list_checkpoints(str(tmp_path / "run"))] == [1]


def test_who_is_silent_is_not_waited_for(tmp_path, monkeypatch) -> None:
    killed(tmp_path, 2)
    folder = tmp_path / "run" / "step-2"
    (folder / left(folder)[1]).unlink()
    monkeypatch.setattr(adopting, "_SILENT_LOOKS", 2)
    with pytest.raises(
        IncompleteSaveError, match="of 2 ranks, 1 have finished, 0 are uploading, and 1 have"
    ):
        adopt(str(folder), wait=1000.0)


def test_a_process_that_is_still_sending_is_waited_for(tmp_path) -> None:
    killed(tmp_path)
    folder = tmp_path / "run" / "step-2"
    (name,) = left(folder)
    whole = (folder / name).read_bytes()
    sending = Pending.parse(whole, "file:///x")
    sent = [0]

    def told(*_: object) -> None:
        sent[0] += 1
        unfinished = Pending(
            save=sending.save,
            rank=0,
            ranks=1,
            job=sending.job,
            attempt=sending.attempt,
            plan=b"",
            record=b"",
            notes=b"",
            sent=sent[0],
        )
        (folder / name).write_bytes(whole if sent[0] == 4 else unfinished.to_bytes())

    told()
    with mock.patch.object(adopting.time, "sleep", side_effect=told):
        adopt(str(folder))
    assert sent == [4]
    assert cloudckpt.verify(str(folder)).items == 4


def test_what_another_process_commits_meanwhile_is_restored(tmp_path) -> None:
    killed(tmp_path)
    folder, state = tmp_path / "run" / "step-2", {"bias": torch.zeros(7)}
    (name,) = left(folder)
    whole = (folder / name).read_bytes()
    unfinished = replace(Pending.parse(whole, "file:///x"), plan=b"", record=b"", objects=None)
    (folder / name).write_bytes(unfinished.to_bytes())

    def committed(*_: object) -> None:
        if not cloudckpt.exists(str(folder)):
            (folder / name).write_bytes(whole)
            adopt(str(folder))

    with (
        mock.patch.object(adopting.time, "sleep", side_effect=committed),
        CheckpointManager(str(tmp_path / "run"), preemption=Preemption(signals=())) as manager,
    ):
        assert manager.restore(state) == 2
    assert torch.equal(state["bias"], values_at(2)["bias"])


def test_two_that_adopt_at_once_commit_one_checkpoint(tmp_path) -> None:
    killed(tmp_path)
    folder, start = tmp_path / "run" / "step-2", threading.Barrier(2)
    failures: list[BaseException] = []
    commit = adopting.commit

    def together(*args, **options):
        start.wait(60)
        return commit(*args, **options)

    def one() -> None:
        try:
            adopt(str(folder))
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    with mock.patch.object(adopting, "commit", together):
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert cloudckpt.verify(str(folder)).items == 4
    assert not left(folder)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_nothing_is_committed_whose_data_are_not_as_they_were_sent(tmp_path, damage) -> None:
    killed(tmp_path)
    folder = tmp_path / "run" / "step-2"
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        changed = bytearray(data.read_bytes())
        changed[len(changed) // 2] ^= 1
        data.write_bytes(changed)
    found = job(tmp_path)
    assert found == [(0, (1, True))]
    if damage != "changed":  # which a local folder does not tell before it is read
        assert not cloudckpt.exists(str(folder))


def test_two_saves_are_never_mixed(tmp_path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        killed(tmp_path / name, 2)
    folder, other = (tmp_path / name / "run" / "step-2" for name in ("one", "other"))
    (folder / left(folder)[1]).unlink()
    for path in other.glob("__1*"):
        path.rename(folder / path.name)
    with pytest.raises(IncompleteSaveError, match="of 2 ranks, 1 have finished"):
        adopt(str(folder), wait=0.0)


def test_of_two_complete_saves_the_one_of_the_job_that_has_the_run_is_committed(tmp_path) -> None:
    runs = [tmp_path / name / "run" for name in ("one", "other")]
    for run in runs:
        run.parent.mkdir()
        killed(run.parent)
    both = tmp_path / "both"
    for run in runs:
        shutil.copytree(run / "step-2", both / "step-2", dirs_exist_ok=True)
    records = {name: (both / "step-2" / name).read_bytes() for name in left(both / "step-2")}
    for run in runs:
        for name, content in records.items():
            (both / "step-2" / name).write_bytes(content)
        shutil.copy(run / ".cloudckpt-job.json", both)
        adopt(str(both / "step-2"), wait=0.0)
        found = dcp.FileSystemReader(str(both / "step-2")).read_metadata().storage_data.values()
        assert {one.relative_path for one in found} <= {path.name for path in run.rglob("__*")}
        (both / "step-2" / ".metadata").unlink()


@pytest.mark.parametrize("newest", ["one", "other"])
def test_of_two_complete_saves_of_no_job_the_newest_is_committed(tmp_path, newest) -> None:
    step = tmp_path / "both" / "step-2"
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        killed(tmp_path / name)
        run = tmp_path / name / "run" / "step-2"
        shutil.copytree(run, step, dirs_exist_ok=True)
        for record in left(run):
            pending = Pending.parse((run / record).read_bytes(), record)
            (step / record).write_bytes(replace(pending, job="").to_bytes())
            os.utime(step / record, (0, time.time() - 60 * (name != newest)))
    adopt(str(step), wait=0.0)
    found = dcp.FileSystemReader(str(step)).read_metadata().storage_data.values()
    of_newest = {path.name for path in (tmp_path / newest).rglob("__*")}
    assert {one.relative_path for one in found} <= of_newest


def test_a_run_says_what_is_pending(tmp_path) -> None:
    killed(tmp_path)
    found = cloudckpt.list_checkpoints(str(tmp_path / "run"))
    assert [(one.step, one.is_committed, one.is_pending) for one in found] == [
        (1, True, False),
        (2, False, True),
    ]
    assert cloudckpt.latest(str(tmp_path / "run")) == (tmp_path / "run" / "step-1").as_uri()


def test_a_process_that_shall_not_outlive_its_trainer_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CLOUDCKPT_ASYNC_OUTLIVE", "0")
    killed(tmp_path)
    assert not left(tmp_path / "run" / "step-2")
    assert job(tmp_path) == [(0, (1, True))]


def test_what_is_left_ends_in_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CLOUDCKPT_ASYNC_OUTLIVE", "1")
    monkeypatch.setenv("FAMILY", "of-what-is-left")
    ended = job(tmp_path, last=2, dies_at=2)
    assert ended[0][0] == KILLED
    assert eventually(lambda: not processes_of("of-what-is-left"), 60)


TOLD = Pending(
    save="5.1",
    rank=1,
    ranks=3,
    job="me",
    attempt="00112233445566ff",
    plan=b"names" * 9,
    record=bytes(range(40)),
    notes=b"{}",
    held=("step-1", "step-2"),
    sent=MIB,
    objects=(
        WrittenObject(1, 0, "0123456789abcdef", 900, 7, 90, 5),
        WrittenObject(0, 0, "fedcba9876543210", 800, 6, 90, 5, "step-1"),
    ),
)


@given(st.data())
def test_what_is_damaged_is_refused_by_name(data) -> None:
    told = bytearray(TOLD.to_bytes())
    if data.draw(st.booleans()):
        told[data.draw(st.integers(0, len(told) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del told[data.draw(st.integers(0, len(told) - 1)) :]
    with pytest.raises(CheckpointCorruptError, match="can't be read"):
        Pending.parse(told, "file:///x")


@pytest.mark.parametrize("attempt", ["x/../../../precious", "00112233445566FF", "0" * 15])
def test_a_name_of_a_save_that_keys_must_not_be_made_of_is_refused(attempt) -> None:
    with pytest.raises(CheckpointCorruptError, match="can't be read"):
        Pending.parse(replace(TOLD, attempt=attempt).to_bytes(), "file:///x")


def _saved_and_left(folder: Path) -> Path:
    """A checkpoint whose trainer has ended before the commit, and its record."""
    ended = job(folder, last=1, dies_at=1, how="at its commit")
    assert ended[0][0] == KILLED
    assert settled()
    (name,) = left(folder / "run" / "step-1")
    return folder / "run" / "step-1" / name


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    return _saved_and_left(tmp_path_factory.mktemp("record"))


@given(data=st.data())
def test_a_record_that_says_anything_else_is_refused_by_name_or_taken_at_its_word(
    record, data
) -> None:
    """Its checksum is right: somebody has made it so."""
    whole = record.read_bytes()
    said = Pending.parse(whole, "file:///x")  # else all of it would be refused
    part = data.draw(st.sampled_from(["plan", "record", "notes"]))
    changed = bytearray(getattr(said, part))
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "grow"])) if changed else "grow"
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        if kind == "flip":
            changed[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 8))]
        else:
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    record.write_bytes(replace(said, **{part: bytes(changed)}).to_bytes())
    metadata = record.parent / ".metadata"
    try:
        adopt(str(record.parent))
    except IncompleteSaveError:
        assert not metadata.exists()
    else:
        metadata.unlink()
    finally:
        record.write_bytes(whole)


def test_what_has_many_names_is_adopted(tmp_path) -> None:
    """Their record becomes a small part of its size when it is compressed."""
    uri, planner = str(tmp_path / "run" / "step-1"), CloudSavePlanner()
    name = "optimizer.state.model.language_model.layers.{}.mlp.experts.{}.down_proj.weight.exp_avg"
    names = [name.format(number // 192, number % 192) for number in range(8_000)]
    planner.set_up_planner(dict.fromkeys(names, torch.ones(2)), None, True)
    plan, writer = planner.create_local_plan(), cloudckpt.CloudStorageWriter(uri)
    writer.set_up_storage_writer(True)
    sent = writer.send(plan, planner)
    told = record_of(plan, Structure(), writer.checksum)
    assert told is not None
    pending = replace(
        TOLD,
        rank=0,
        ranks=1,
        job="",
        plan=told,
        record=Record(extents=sent.extents).to_bytes(),
        notes=b"",
        held=(),
        objects=tuple(sent.objects),
    )
    (tmp_path / "run" / "step-1" / pending_name(0, TOLD.attempt)).write_bytes(pending.to_bytes())
    adopt(uri)
    assert cloudckpt.verify(uri).items == len(names)
