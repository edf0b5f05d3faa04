"""A step that was staged when its trainers were killed is finished without them, and restored."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from cloudckpt.checkpoint.objects import WrittenObject, is_pending_name, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.dcp.global_plan import record_of
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import CheckpointCorruptError, IncompleteSaveError
from cloudckpt.runs import adopting
from cloudckpt.runs.adopting import adopt
from runs.managed import flip, managed
from runs.orphans import job, settled, values_at

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Callable[..., Path]:
    """Copies a run whose job has committed step 1, and was killed when all of step 2 was sent."""

    @functools.cache
    def run_of(world: int, which: int, **options) -> Path:
        folder = tmp_path_factory.mktemp("dead")
        ended = job(folder, world, last=2, dies_at=2, how="at its commit", **options)
        assert [code for code, _ in ended] == [KILLED] * world
        assert settled()
        return folder / "run"

    def copied(to: Path, world: int = 1, which: int = 0, **options) -> Path:
        shutil.copytree(run_of(world, which, **options), to / "run")
        return to / "run" / "step-2"

    return copied


def left(step: Path) -> list[Path]:
    """The records of saving processes."""
    return sorted(path for path in step.iterdir() if is_pending_name(path.name))


def restored(run: object, config: cloudckpt.Config | None = None, **options) -> int | None:
    """The step that the next job restores."""
    state = {"weight": torch.zeros(12, 5000), "bias": torch.zeros(7)}
    with managed(run, config, **options) as manager:
        step = manager.restore(state)
    expected = values_at(step or 0)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    return step


@pytest.mark.parametrize("where", ["a disk", "S3"])
def test_what_was_staged_is_restored(tmp_path, where, bucket, s3_config) -> None:
    run = str(tmp_path / "run") if where == "a disk" else f"s3://{bucket}/run"
    ended = job(tmp_path, 2, run=run, last=2, dies_at=2, config=s3_config)
    assert [code for code, _ in ended] == [KILLED] * 2
    found = functools.partial(cloudckpt.list_checkpoints, run, config=s3_config)
    assert eventually(lambda: any(one.is_pending for one in found()))
    assert job(tmp_path, 2, run=run, config=s3_config) == [(0, (2, True))] * 2  # still sending
    assert settled()
    assert cloudckpt.verify(f"{run}/step-2", config=s3_config).items == 6
    assert cloudckpt.inspect(f"{run}/step-2", config=s3_config).notes.step == 2
    if where == "a disk":
        assert not left(tmp_path / "run" / "step-2")
        state = {"weight": torch.zeros(12, 5000), "bias": torch.zeros(7), "log": []}
        dcp.load(state, checkpoint_id=f"{run}/step-2", no_dist=True)
        assert torch.equal(state["weight"], values_at(2)["weight"])
        assert state["log"] == [0, 1]


@pytest.mark.parametrize("replicas", ["warn", "refuse", "trust"])
def test_what_differs_between_ranks_is_said(tmp_path, dead, replicas, caplog) -> None:
    where, config = dead(tmp_path, 2, differs=True), cloudckpt.Config(replicas=replicas)
    if replicas == "refuse":
        with pytest.raises(IncompleteSaveError, match="per_rank"):
            adopt(where, config=config)
    else:
        adopt(where, config=config)
        assert ("per_rank" in caplog.text) == (replicas == "warn")


def test_the_next_job_may_have_another_number_of_ranks(tmp_path, dead) -> None:
    assert len(left(dead(tmp_path, 2))) == 2
    assert job(tmp_path, 3) == [(0, (2, True))] * 3
    assert restored(tmp_path / "run") == 2


def test_what_it_refers_to_is_kept_for_it(tmp_path, dead) -> None:
    """The step that was staged shares bytes with the one before, which is deleted then."""
    newer = dead(tmp_path, 2, incremental=True)
    older = newer.parent / "step-1"
    assert restored(newer.parent) == 2
    assert list(cloudckpt.inspect(newer).shared) == [older.as_uri()]
    cloudckpt.delete(older)
    cloudckpt.sweep(newer.parent, older_than=0)
    assert cloudckpt.verify(newer).items == 6
    cloudckpt.delete(newer)
    assert not list(newer.parent.glob("step-*"))


def test_the_steps_of_a_job_that_has_claimed_the_run_since_stay_as_they_are(tmp_path, dead) -> None:
    step = dead(tmp_path)
    assert restored(step.parent, adopt_wait=0.0) == 1  # which claims nothing
    with managed(step.parent, adopt_wait=0.0) as manager:
        assert manager.restore({"bias": torch.zeros(7)}) == 1
        manager.save(3, values_at(3))
    with pytest.raises(IncompleteSaveError, match="no longer belongs to the job"):
        adopt(step)
    assert restored(step.parent) == 3
    cloudckpt.sweep(step.parent, older_than=0)
    assert [one.step for one in cloudckpt.list_checkpoints(step.parent)] == [1, 3]


def test_who_is_silent_is_not_waited_for(tmp_path, dead, monkeypatch) -> None:
    step = dead(tmp_path, 2)
    left(step)[1].unlink()
    monkeypatch.setattr(adopting, "_SILENT_LISTINGS", 2)
    with pytest.raises(IncompleteSaveError, match=r"of 2 ranks, finished: 1, .*: 0, .*: 1"):
        adopt(step, wait=1000.0)


@pytest.mark.parametrize("who", ["its process", "another job"])
def test_a_step_that_is_still_sent_is_waited_for_whoever_commits_it(tmp_path, dead, who) -> None:
    step = dead(tmp_path)
    [record] = left(step)
    whole = record.read_bytes()
    unfinished = replace(Pending.parse(whole, "file:///x"), objects=None)
    sent = [0]

    def told(*_: object) -> None:
        sent[0] += 1
        is_whole = sent[0] == 4 and not cloudckpt.exists(step)
        record.write_bytes(whole if is_whole else unfinished.so_far(sent[0]).to_bytes())
        if is_whole and who == "another job":
            adopt(step)

    told()
    with mock.patch.object(adopting.time, "sleep", side_effect=told):
        assert restored(step.parent) == 2
    assert sent == [4]
    assert cloudckpt.verify(step).items == 4


def test_two_that_adopt_at_once_commit_one_checkpoint(tmp_path, dead) -> None:
    step, start, commit = dead(tmp_path), threading.Barrier(2), adopting.commit

    def together(*args, **options):
        start.wait(60)
        return commit(*args, **options)

    with mock.patch.object(adopting, "commit", together), ThreadPoolExecutor(2) as threads:
        assert [*threads.map(adopt, [step, step])] == [None, None]
    assert cloudckpt.verify(step).items == 4
    assert not left(step)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_nothing_is_restored_whose_data_are_not_as_they_were_sent(tmp_path, dead, damage) -> None:
    step = dead(tmp_path)
    data = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        flip(data, *range(0, data.stat().st_size, 20))
    assert restored(step.parent) == 1
    if damage != "changed":  # which a local folder does not tell before it is read
        assert not cloudckpt.exists(step)


def test_two_saves_are_never_mixed(tmp_path, dead) -> None:
    step, other = (dead(tmp_path / str(number), 2, number) for number in range(2))
    left(step)[1].unlink()
    for path in other.glob("__1*"):
        path.rename(step / path.name)
    with pytest.raises(IncompleteSaveError, match="of 2 ranks, finished: 1"):
        adopt(step, wait=0.0)


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("by", ["claim", "age"])
def test_of_two_complete_saves_that_of_the_job_that_has_the_run_or_the_newest_is_committed(
    tmp_path, dead, by, chosen
) -> None:
    both = tmp_path / "both" / "step-2"
    for number in range(2):
        step = dead(tmp_path / str(number), 1, number)
        shutil.copytree(step, both, dirs_exist_ok=True)
        [record] = left(step)
        if by == "age":  # of two saves of no job
            pending = Pending.parse(record.read_bytes(), record.name)
            (both / record.name).write_bytes(replace(pending, job="").to_bytes())
            os.utime(both / record.name, (0, time.time() - 60 * (number != chosen)))
        elif number == chosen:
            shutil.copy(step.parent / ".cloudckpt-job.json", both.parent)
    adopt(both, wait=0.0)
    of_chosen = {path.name for path in (tmp_path / str(chosen)).rglob("__*")}
    found = dcp.FileSystemReader(str(both)).read_metadata().storage_data.values()
    assert {one.relative_path for one in found} <= of_chosen


def test_a_run_says_what_is_pending(tmp_path, dead) -> None:
    run = dead(tmp_path).parent
    found = cloudckpt.list_checkpoints(run)
    assert [(one.step, one.is_committed, one.is_pending) for one in found] == [
        (1, True, False),
        (2, False, True),
    ]
    assert cloudckpt.latest(run) == (run / "step-1").as_uri()


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_saving_process_outlives_its_trainer_as_long_as_it_may(
    tmp_path, monkeypatch, seconds
) -> None:
    monkeypatch.setenv("CLOUDCKPT_ASYNC_OUTLIVE", str(seconds))
    monkeypatch.setenv("FAMILY", "of-what-is-left")
    how = "at once" if seconds else "at its commit"
    ended = job(tmp_path, last=2, dies_at=2, how=how)
    assert ended[0][0] == KILLED
    assert eventually(lambda: not processes_of("of-what-is-left"), 60)
    assert settled()
    if not seconds:
        assert not left(tmp_path / "run" / "step-2")
        assert restored(tmp_path / "run") == 1


TOLD = Pending(
    save="5.1",
    rank=0,
    ranks=1,
    job="",
    attempt="00112233445566ff",
    plan=b"names" * 9,
    notes=b"",
    objects=(WrittenObject(0, 0, "fedcba9876543210", 800, 6, 90, 5, "step-1"),),
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


@given(data=st.data())
def test_a_record_that_says_anything_else_is_refused_by_name_or_taken_at_its_word(
    dead, tmp_path_factory, data
) -> None:
    """Its checksum is right: somebody has made it so."""
    [record] = left(dead(tmp_path_factory.mktemp("record")))
    said = Pending.parse(record.read_bytes(), "file:///x")
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
    try:
        adopt(record.parent)
    except IncompleteSaveError:
        assert not cloudckpt.exists(record.parent)


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
        plan=told,
        record=Record(extents=sent.extents).to_bytes(),
        objects=tuple(sent.objects),
    )
    (tmp_path / "run" / "step-1" / pending_name(0, TOLD.attempt)).write_bytes(pending.to_bytes())
    adopt(uri)
    assert cloudckpt.verify(uri).items == len(names)
