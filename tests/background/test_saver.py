"""One save after the other in a thread of the trainer: whose turn it is, and what is told."""

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import cloudckpt
from cloudckpt import (
    BackgroundOptions,
    BucketNotFoundError,
    ClosedError,
    SaveInProgressError,
    StagingError,
    StagingMemoryError,
)
from cloudckpt.background import arena as arenas
from cloudckpt.background.saver import AsyncSaver
from dcp.children import in_a_child
from dcp.places import Place
from dcp.values import assert_same, blank_like, numbered
from faults.states import SMALL, filled

from .saves import PATIENCE, Gate, Lock, Refusing, begin, step_at
from .waiting import open_files


def saver(**options) -> AsyncSaver:
    return AsyncSaver(no_dist=True, options=BackgroundOptions(**options))


def _arenas() -> int:
    """How many staged copies this process has memory for."""
    with open("/proc/self/maps") as file:
        return sum("memfd:cloudckpt-staging" in line for line in file)


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path)


# ---- whose turn it is


def test_a_save_waits_for_the_one_before(local, gate):
    with saver() as one, ThreadPoolExecutor(1) as pool:
        first = begin(one, 1, local.at("1"), gate)
        gate.wait()
        second = pool.submit(begin, one, 2, local.at("2"))
        assert not second.done()
        gate.open()
        second.result(PATIENCE).result(PATIENCE)
        assert first.done()
    assert [step_at(local.at("1")), step_at(local.at("2"))] == [1, 2]


def test_a_save_that_waits_too_long_says_so_and_the_next_works(local, gate):
    with saver(patience=0.05) as one:
        first = begin(one, 1, local.at("1"), gate)
        gate.wait()
        with pytest.raises(SaveInProgressError, match=r"not ended within 0\.05 s"):
            begin(one, 2, local.at("2"))
        gate.open()
        first.result(PATIENCE)
        one.close()
    assert step_at(local.at("1")) == 1
    assert local.at("2").names() == []


def test_a_save_is_skipped_while_another_is_under_way(local, gate):
    with saver(when_busy="skip") as one:
        first = begin(one, 1, local, gate)
        gate.wait()
        skipped = [begin(one, step, local) for step in (2, 3)]
        assert all(future.skipped for future in skipped)
        assert [future.result(0) for future in skipped] == [None, None]
        gate.open()
        assert isinstance(first.result(PATIENCE), Metadata)
        assert not first.skipped
        assert step_at(local) == 1
        last = begin(one, 4, local)
        assert isinstance(last.result(PATIENCE), Metadata)
        assert not last.skipped
    assert step_at(local) == 4


def test_two_buffers_let_two_saves_be_under_way_and_no_third(local, gate):
    gc.collect()
    before = _arenas()
    with saver(when_busy="double_buffer", patience=0.05) as one:
        first = begin(one, 1, local.at("1"), gate)
        gate.wait()
        second = begin(one, 2, local.at("2"))
        with pytest.raises(SaveInProgressError):
            begin(one, 3, local.at("3"))
        assert _arenas() <= before + 2
        gate.open()
        for future in (first, second):
            future.result(PATIENCE)
        for step in range(4, 8):
            begin(one, step, local.at(str(step))).result(PATIENCE)
        assert _arenas() <= before + 2
    assert [step_at(local.at(str(step))) for step in (1, 2, 4, 7)] == [1, 2, 4, 7]
    assert local.at("3").names() == []


def test_two_saves_to_one_place_are_refused(local, gate):
    with saver(when_busy="double_buffer") as one:
        first = begin(one, 1, local, gate)
        gate.wait()
        with pytest.raises(SaveInProgressError, match="to this place") as caught:
            begin(one, 2, local)
        assert caught.value.uri == local.uri
        gate.open()
        first.result(PATIENCE)
        assert step_at(local) == 1
        begin(one, 3, local).result(PATIENCE)
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
    cloudckpt.close_async_savers()
    assert step_at(second_place) == 2
    assert writer.checkpoint_id == second_place.uri
    if other:
        assert step_at(local.at("1")) == 1


def test_one_writer_is_not_used_by_two_saves_at_once(local, gate):
    writer = local.at("1").writer()
    with saver(when_busy="double_buffer") as one:
        first = one.save(filled(1, SMALL), writer, planner=gate).written
        gate.wait()
        with pytest.raises(SaveInProgressError):
            one.save(filled(2, SMALL), writer, checkpoint_id=local.at("2").uri)
        gate.open()
        first.result(PATIENCE)
    assert step_at(local.at("1")) == 1


# ---- the end


def test_a_save_that_was_asked_for_cannot_be_cancelled(local, gate):
    with saver() as one:
        future = begin(one, 1, local, gate)
        gate.wait()
        assert not future.cancel()
        gate.open()
        assert isinstance(future.result(PATIENCE), Metadata)
        assert not future.cancel()
    assert not future.cancelled()


def test_closing_waits_for_what_is_under_way(local, gate):
    one = saver()
    future = begin(one, 1, local, gate)
    gate.wait()
    threading.Timer(0.05, gate.open).start()
    one.close()
    assert future.done()
    assert step_at(local) == 1


def test_a_closed_saver_says_so(local):
    one = saver()
    one.close()
    one.close()
    with pytest.raises(ClosedError, match="closed"):
        begin(one, 1, local)


def test_closing_gives_back_memory_files_and_threads(local):
    gc.collect()
    begin_files, before = open_files(), _arenas()
    threads = threading.active_count()
    for step in range(3):
        with saver() as one:
            begin(one, step, local).result(PATIENCE)
    gc.collect()
    assert (open_files(), _arenas()) == (begin_files, before)
    assert threading.active_count() <= threads


def test_closing_all_savers_lets_new_ones_be_made(local):
    for step in (1, 2):
        cloudckpt.async_save(filled(step, SMALL), checkpoint_id=local.uri, config=local.config)
        cloudckpt.close_async_savers()
        assert step_at(local) == step


# ---- failures


def _nowhere(place: Place) -> Place:
    return Place("s3://there-is-no-such-bucket/run", place.config)


def test_a_failure_is_told_by_its_future_and_harms_no_other_save(s3):
    with saver() as one:
        for step in range(3):
            error = begin(one, step, _nowhere(s3)).exception(PATIENCE)
            assert isinstance(error, BucketNotFoundError)
            error = begin(one, step, s3, Refusing()).exception(PATIENCE)
            assert "the dog ate it" in str(error)
            begin(one, step, s3).result(PATIENCE)
            assert step_at(s3) == step


def test_a_value_that_cannot_be_copied_fails_the_save_and_is_named(local):
    with saver() as one:
        future = one.save({"a": {"b": Lock()}, "t": numbered(3)}, local.writer()).written
        error = future.exception(PATIENCE)
        assert isinstance(error, StagingError)
        assert (error.item, error.uri) == ("a.b", local.uri)
        begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_lack_of_memory_fails_the_save_and_training_goes_on(local, monkeypatch):
    with saver() as one, monkeypatch.context() as patch:
        patch.setattr(arenas, "_available", lambda: 1000)
        error = begin(one, 1, local).exception(PATIENCE)
        assert isinstance(error, StagingMemoryError)
        patch.undo()
        begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


class Failing:
    """A Stateful that can't tell its state."""

    def state_dict(self) -> dict:
        raise RuntimeError("no state today")

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError


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
        error = one.save({"model": Failing()}, local.writer()).written.exception(PATIENCE)
        assert "no state today" in str(error)
    loaded = {"model": blank_like(expected)}
    cloudckpt.load(loaded, checkpoint_id=local.uri, config=local.config)
    assert_same(loaded["model"], expected)


# ---- stagers of the caller's


def test_a_blocking_stager_of_torchs_is_used(local):
    options = {"checkpoint_id": local.uri, "config": local.config}
    future = cloudckpt.async_save(filled(3, SMALL), async_stager=BlockingAsyncStager(), **options)
    assert isinstance(future.result(PATIENCE), Metadata)
    assert step_at(local) == 3
    cloudckpt.close_async_savers()


def test_an_asynchronous_stager_of_torchs_gives_two_futures(local):
    stager = DefaultStager(StagingOptions(False, False, True, False))
    options = {"checkpoint_id": local.uri, "config": local.config, "async_stager": stager}
    answer = cloudckpt.async_save(filled(3, SMALL), **options)
    assert isinstance(answer, AsyncSaveResponse)
    assert answer.staging_completion.result(PATIENCE) is None
    assert isinstance(answer.upload_completion.result(PATIENCE), Metadata)
    assert step_at(local) == 3
    answer = cloudckpt.async_save({"t": torch.ones(2).to_sparse()}, **options)
    assert isinstance(answer.upload_completion.exception(PATIENCE), cloudckpt.CheckpointError)
    cloudckpt.close_async_savers()
    stager.close()


# ---- many saves


def test_plans_that_are_cached_follow_the_state_dict(local):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with saver() as one:
        for step in range(50):
            size = 1000 + 10 * (step // 5)  # the same plan for some steps, and then another
            state = {"t": numbered(size, first=step), "step": step, f"own {step // 9}": [step]}
            one.save(state, local.writer(), planner=planner).written.result(PATIENCE)
            loaded = blank_like(state)
            cloudckpt.load(loaded, checkpoint_id=local.uri, config=local.config)
            assert_same(loaded, state)
    assert len(local.data()) <= 2


def _growth(place: Place) -> tuple[float, int]:
    """MiB and files that 40 saves have added, after 10 to warm up."""

    def resident() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    warnings.simplefilter("ignore")
    memory, files = 0.0, 0
    with saver(when_busy="double_buffer") as one:
        for step in range(50):
            if step == 10:
                memory, files = resident(), open_files()
            begin(one, step, place, nbytes=2**20).result(PATIENCE)
        return resident() - memory, open_files() - files


def test_fifty_saves_take_no_more_memory_than_ten(local):
    memory, files = in_a_child("fork", _growth, local)
    assert memory < 30
    assert files <= 1
