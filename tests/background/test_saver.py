"""One save after the other: whose turn it is, what is told, and the end."""

import concurrent.futures
import gc
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import cloudckpt
from cloudckpt import BackgroundOptions, errors
from cloudckpt.background.process import _Worker
from cloudckpt.background.save import Save
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig, make_async_checkpointer
from dcp.children import in_a_child
from dcp.places import Place
from dcp.values import assert_same, blank_like
from faults.states import SMALL, filled

from .saves import PATIENCE, PROCESS, THREAD, Gate, Late, Lock, Refusing, begin, pid_of, step_at
from .waiting import eventually, interrupted, is_running, open_files, staged_copies


def saver(**options) -> AsyncSaver:
    return AsyncSaver(no_dist=True, options=BackgroundOptions(**options))


# ---- whose turn it is


def test_a_save_that_waits_too_long_says_so_and_the_next_works(local, gate):
    with saver(patience=0.05) as one:
        first = begin(one, 1, local.at("1"), gate)
        gate.wait()
        with pytest.raises(errors.SaveInProgressError, match=r"not finished within 0\.05 s"):
            begin(one, 2, local.at("2"))
        gate.open()
        first.result(PATIENCE)
        one.close()
    assert step_at(local.at("1")) == 1
    assert local.at("2").names() == []


def test_a_save_that_could_not_be_copied_does_not_occupy_its_place(local, monkeypatch):
    """The other ranks still hear of it when the next one begins."""
    may_fail, prepared = threading.Event(), Save.prepared

    def slow_to_fail(job):
        assert job.failure is None or may_fail.wait(PATIENCE)
        return prepared(job)

    monkeypatch.setattr(Save, "prepared", slow_to_fail)
    with saver() as one, ThreadPoolExecutor(1) as pool:
        second = one.save({"lock": Lock()}, local.writer()).written
        third = pool.submit(begin, one, 3, local)
        concurrent.futures.wait([third], 0.2)
        may_fail.set()
        assert isinstance(second.exception(PATIENCE), errors.StagingError)
        third.result(PATIENCE).result(PATIENCE)
    assert step_at(local) == 3


@pytest.mark.parametrize("other", [False, True], ids=["to its place", "led elsewhere"])
def test_a_writer_of_the_callers_may_be_given_again_while_it_is_in_use(local, gate, other):
    config = local.having(background=BackgroundOptions(patience=PATIENCE)).config
    writer = Place(f"{local.uri}/1", config).writer()
    second_place = local.at("2") if other else local.at("1")

    def save(step: int, **options):
        return cloudckpt.async_save(filled(step, SMALL), storage_writer=writer, **options)

    with ThreadPoolExecutor(1) as pool:
        first = save(1, planner=gate)
        gate.wait()
        second = pool.submit(save, 2, checkpoint_id=second_place.uri)
        assert not second.done()
        gate.open()
        first.result(PATIENCE)
        second.result(PATIENCE).result(PATIENCE)
    cloudckpt.checkpointer.close_async_savers()
    assert step_at(second_place) == 2
    assert writer.checkpoint_id == second_place.uri
    if other:
        assert step_at(local.at("1")) == 1


# ---- the end


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_closing_waits_for_the_save_and_gives_back_memory_files_threads_and_processes(
    local, gate, kind
):
    gc.collect()
    begin_files, before = open_files(), staged_copies()
    threads = threading.active_count()
    for step in range(3):
        one = AsyncSaver(no_dist=True, kind=kind)
        future = begin(one, step, local, gate)  # which the first opens
        gate.wait()
        worker = one._process._worker if kind == PROCESS else None
        with ThreadPoolExecutor(1) as pool:
            closed = pool.submit(one.close)
            assert gate.is_open or not concurrent.futures.wait([closed], 0.2).done
            gate.open()
            closed.result(PATIENCE)
        assert future.done()
        assert worker is None or worker._process.returncode == 0  # by itself
        assert step_at(local) == step
        del one, future, worker
    gc.collect()
    assert (open_files(), staged_copies()) == (begin_files, before)
    assert threading.active_count() <= threads


INTERRUPTED = {THREAD: (concurrent.futures, "wait"), PROCESS: (_Worker, "end")}


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_closing_again_does_what_an_interrupt_has_kept_from_being_done(local, gate, kind):
    gc.collect()
    before = staged_copies()
    one = AsyncSaver(no_dist=True, kind=kind)
    future = begin(one, 1, local, gate)
    gate.wait()
    if kind == PROCESS:  # it is ended behind the save
        gate.open()
        pid = pid_of(one)
    with interrupted(*INTERRUPTED[kind]):
        one.close()
    gate.open()
    one.close()
    assert future.done()
    assert kind == THREAD or eventually(lambda: not is_running(pid))
    gc.collect()
    assert staged_copies() == before
    with pytest.raises(errors.ClosedError):
        begin(one, 2, local)


# ---- failures


def test_a_saver_whose_thread_can_not_be_started_is_not_made(monkeypatch):
    refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(errors.AsyncSaveError):
        saver()


def test_a_failure_that_is_kept_does_not_keep_the_staged_copy(local, stager):
    gc.collect()
    before = staged_copies()
    with AsyncSaver(no_dist=True, stager=stager) as one:
        kept = begin(one, 1, local, Refusing())
        error = kept.exception(PATIENCE)
        begin(one, 2, local).result(PATIENCE)
    stager.close()
    gc.collect()  # torch 2.9 and 2.15 leave cycles
    assert staged_copies() == before
    lines = "".join(traceback.format_exception(error))
    assert 'raise ArithmeticError("the dog ate it")' in lines
    assert step_at(local) == 2


def test_a_stateful_value_is_asked_when_the_save_is(local, gate):
    model = torch.nn.Linear(40, 3)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with saver() as one:
        future = one.save({"model": model, "x": 1}, local.writer(), planner=gate).written
        gate.wait()
        with torch.no_grad():
            model.weight.zero_()
        gate.open()
        future.result(PATIENCE)
        model.state_dict = mock.Mock(side_effect=RuntimeError("no state today"))
        error = one.save({"model": model}, local.writer()).written.exception(PATIENCE)
        assert "no state today" in str(error)
    loaded = {"model": blank_like(expected)}
    cloudckpt.load(loaded, checkpoint_id=local.uri, config=local.config)
    assert_same(loaded["model"], expected)


# ---- failures that a checkpointer tells


def checkpointer(place: Place, **options) -> AsyncCheckpointer:
    config = place.having(background=BackgroundOptions(**options)).config
    return make_async_checkpointer(CheckpointerConfig(config=config, kind=THREAD))


class FailingGate(Gate):
    """Fails behind its gate."""

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        if self._reads == 2:
            raise ArithmeticError("the dog ate it")
        return found


def test_a_failure_is_told_although_a_save_was_skipped_in_between(local, tmp_path):
    gate = FailingGate(tmp_path)
    one = checkpointer(local, when_busy="skip")
    first = one.save(local.uri, filled(1, SMALL), planner=gate)[1]
    gate.wait()
    assert one.save(local.uri, filled(2, SMALL))[1].skipped
    gate.open()
    assert first.exception(PATIENCE) is not None
    with pytest.raises(errors.CheckpointError, match="the dog ate it"):
        one.close()


def test_closing_before_the_save_has_ended_says_that_it_has_not(local, gate):
    one = checkpointer(local, patience=0.05)
    written = one.save(local.uri, filled(1, SMALL), planner=gate)[1]
    gate.wait()
    with pytest.raises(errors.SaveInProgressError, match=r"not finished within 0\.05 s") as caught:
        one.close()
    assert caught.value.uri == local.uri
    gate.open()
    written.result(PATIENCE)


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_last_save(local, caplog):
    def train() -> None:
        with checkpointer(local) as one:
            one.save(local.uri, filled(1, SMALL), planner=Refusing())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the dog ate it" in caplog.text


# ---- stagers of the caller's


def test_an_asynchronous_stager_of_torchs_gives_two_futures(local):
    stager = DefaultStager(StagingOptions(False, False, True, False))
    options = {"checkpoint_id": local.uri, "config": local.config, "async_stager": stager}
    answer = cloudckpt.async_save(filled(3, SMALL), **options)
    assert isinstance(answer, AsyncSaveResponse)
    assert answer.staging_completion.result(PATIENCE) is None
    assert isinstance(answer.upload_completion.result(PATIENCE), Metadata)
    assert step_at(local) == 3
    answer = cloudckpt.async_save({"t": torch.ones(2).to_sparse()}, **options)
    assert isinstance(
        answer.upload_completion.exception(PATIENCE), cloudckpt.errors.CheckpointError
    )
    cloudckpt.checkpointer.close_async_savers()
    stager.close()


def test_a_stager_is_synchronized_before_its_copy_is_saved(local):
    stager = mock.Mock(AsyncStager, should_synchronize_after_execute=True)
    stager.stage.return_value = copied = blank_like(filled(3, SMALL))
    stager.synchronize_staging.side_effect = lambda: copied.update(filled(3, SMALL))
    with AsyncSaver(no_dist=True, stager=stager) as one:
        one.save(filled(3, SMALL), local.writer()).written.result(PATIENCE)
    assert step_at(local) == 3


@pytest.mark.parametrize("is_future", [False, True])
def test_a_stager_that_returns_no_state_dict_fails_the_save(local, is_future):
    stager = Late()
    stager.copied.set_result(None)
    made = stager.copied if is_future else None
    with (
        mock.patch.object(stager, "stage", return_value=made),
        AsyncSaver(no_dist=True, stager=stager) as one,
    ):
        save = one.save(filled(3, SMALL), local.writer())
        for future in (save.staged, save.written):
            error = future.exception(PATIENCE)
            assert isinstance(error, errors.StagingError)
            assert "returned a NoneType: return a copy" in str(error)
    assert local.names() == []


# ---- many saves


def _growth(place: Place) -> tuple[float, int]:
    """MiB and files that 40 saves have added, after 10 to warm up."""

    def resident() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    warnings.simplefilter("ignore")
    memory, files = 0.0, 0
    with saver() as one:
        for step in range(50):
            if step == 10:
                memory, files = resident(), open_files()
            begin(one, step, place, nbytes=2**20).result(PATIENCE)
        return resident() - memory, open_files() - files


def test_fifty_saves_take_no_more_memory_than_ten(local):
    memory, files = in_a_child("fork", _growth, local)
    assert memory < 30
    assert files <= 1
