"""The saving process of one trainer: used again and again, and replaced when it dies."""

import errno
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import cloudckpt
from cloudckpt import BackgroundOptions
from cloudckpt.background import arena as arenas
from cloudckpt.background import process
from cloudckpt.background.process import _Worker
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.background.sender import CurrentSave, Sending
from cloudckpt.config import MIB
from cloudckpt.errors import SaveProcessError, StagingMemoryError
from dcp.values import numbered
from evolving.values import FORMS
from faults.states import BIG
from support.wire.faults import s3_error

from .saves import PATIENCE, PROCESS, WireGate, begin, kill, pid_of, step_at, stopped
from .waiting import eventually, is_running, open_files


def saver(**arguments) -> AsyncSaver:
    return AsyncSaver(no_dist=True, kind=PROCESS, **arguments)


@pytest.fixture(scope="module")
def one(_own_surroundings):
    """A saver, which tests share."""
    with saver() as one:
        yield one


@pytest.fixture
def gate(proxy) -> Iterator[WireGate]:
    """What sends to ``shaky`` stops before it."""
    gate = WireGate(proxy, "PutObject")
    yield gate
    gate.open()


# ---- one process for all saves


@pytest.mark.parametrize("where", ["local", "s3"])
def test_one_process_carries_out_all_saves_and_never_imports_torch(one, where, request):
    place = request.getfixturevalue(where)
    pids = set()
    for step in range(3):
        assert isinstance(begin(one, step, place).result(PATIENCE), Metadata)
        pids.add(pid_of(one))
        assert step_at(place) == step
    (pid,) = pids
    with open(f"/proc/{pid}/maps") as file:
        mapped = file.read()
    assert ("awscrt" in mapped, "libtorch" in mapped) == (True, False)


def forms(step: int, large: Sequence[str]) -> dict:
    """Values in any form: small, more of them than a slab holds, large, and none of tensors."""
    state: dict[str, object] = {
        f"t{number}": numbered(number % 700, first=number + step, dtype=torch.float64)
        for number in range(3000)
    }
    for form in large:
        state |= {f"{n} {form}": FORMS[form](numbered(n, 700)[:, 1:]) for n in (3, 700)}
    return state | {"text": "x" * 300_000 * step, "nested": [numbered(3), (1, None)]}


OF_STAGERS = [(None, ["", "turned", "spaced", "inside", "parameter"]), (BlockingAsyncStager(), [])]


@pytest.mark.parametrize(("stager", "kept"), OF_STAGERS, ids=["ours", "of torch"])
def test_the_objects_are_those_that_the_trainer_itself_would_write_to_the_byte(local, stager, kept):
    here, beside = (local.at(name).having(memory_budget=32 * MIB) for name in ("here", "beside"))
    with saver(stager=stager) as one:
        for state in (forms(step, kept) for step in (1, 1, 2)):  # also by the plan of before
            cloudckpt.save(state, checkpoint_id=here.uri, config=here.config, no_dist=True)
            one.save(state, beside.writer()).written.result(PATIENCE)
            first, second = ([p.read(name) for name in p.data()] for p in (here, beside))
            assert len(first) > 0
            assert first == second


class Casting(DefaultSavePlanner):
    """Makes tensors on the fly."""

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found.clone() if isinstance(found, torch.Tensor) else found


def _mapped(pid: int) -> int:
    """How many staged copies, and additions to them, a process sees."""
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:cloudckpt-staging" in line for line in file)


def test_behind_a_save_the_process_holds_no_memory_of_the_trainers(one, local):
    for planner in (None, Casting()):
        begin(one, 1, local, planner, nbytes=20 * MIB).result(PATIENCE)
        assert eventually(lambda: _mapped(pid_of(one)) == 0)


def test_what_happens_in_the_process_is_told_in_the_trainer(one, shaky, proxy):
    proxy.inject(s3_error(500, "InternalError"), operation="PutObject", path="*.distcp*", times=1)
    saved = begin(one, 1, shaky)
    saved.result(PATIENCE)
    assert "retry" in {event.phase for event in saved.timeline.events}
    assert saved.transferred.retries == 1


def test_the_process_learns_of_credentials_that_the_trainer_has_been_given(
    one, shaky, proxy, monkeypatch
):
    place = shaky.having(connections=5)  # no store is open yet that has these
    begin(one, 0, shaky).result(PATIENCE)  # the process is there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OFLATE")
    begin(one, 1, place).result(PATIENCE)
    [sent] = proxy.requests("PutObject", "*.distcp*")[-1:]
    assert "Credential=OFLATE/" in sent.header("Authorization")


def test_a_new_process_has_the_surroundings_of_its_trainer_and_shows_no_secret(
    local, monkeypatch, tmp_path
):
    monkeypatch.setenv("OF_LATE", "set")
    monkeypatch.chdir(tmp_path)
    with saver() as other:
        begin(other, 2, local).result(PATIENCE)
        pid = pid_of(other)
        with open(f"/proc/{pid}/environ") as file:
            assert "OF_LATE=set\0" in file.read()
        with open(f"/proc/{pid}/cmdline") as file:
            assert os.environ["AWS_SECRET_ACCESS_KEY"] not in file.read()
        assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.getsid(pid) == pid


# ---- failures


NO_FILES = mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))


@pytest.mark.parametrize(
    ("owner", "name", "value", "why"),
    [
        (sys, "executable", "/nowhere/python", "/nowhere/python"),
        (multiprocessing, "Pipe", NO_FILES, "Too many open files"),
        (os, "dup", NO_FILES, "Too many open files"),
    ],
)
def test_a_process_that_can_not_be_started_is_told_by_name(owner, name, value, why):
    before = open_files()
    with mock.patch.object(owner, name, value), pytest.raises(SaveProcessError, match=why):
        saver()
    assert open_files() == before


def test_a_process_that_ends_before_it_is_ready_fails_the_save(monkeypatch, local):
    monkeypatch.setattr(process, "_BEGIN", "raise SystemExit(3)  # {}")
    with saver() as other:
        error = begin(other, 1, local).exception(PATIENCE)
    assert isinstance(error, SaveProcessError)
    assert "ended with exit code 3 before it was ready" in str(error)
    assert local.names() == []


def test_a_lack_of_memory_for_what_is_in_no_arena_fails_the_save_too(local, monkeypatch):
    with saver(stager=BlockingAsyncStager()) as one:
        with monkeypatch.context() as patch:
            patch.setattr(arenas, "available_memory", lambda: 1000)
            error = begin(one, 1, local, nbytes=9 * MIB).exception(PATIENCE)
        assert isinstance(error, StagingMemoryError)
        assert "adds to its staged copy" in str(error)
        begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits another process on Linux only")
@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [("RLIMIT_AS", MIB, "ulimit -v"), ("RLIMIT_NOFILE", 3, "ulimit -n")],
)
def test_a_process_that_can_not_take_over_the_copy_says_so(one, local, limit, most, message):
    begin(one, 1, local, Casting()).result(PATIENCE)
    pid, number = pid_of(one), getattr(resource, limit)
    before = resource.prlimit(pid, number)
    resource.prlimit(pid, number, (most, before[1]))
    try:
        error = begin(one, 2, local, Casting(), nbytes=20 * MIB).exception(PATIENCE)
    finally:
        resource.prlimit(pid, number, before)
    assert isinstance(error, SaveProcessError)
    assert message in str(error)
    begin(one, 3, local, Casting()).result(PATIENCE)
    assert (step_at(local), pid_of(one)) == (3, pid)


# ---- deaths


def test_what_a_dead_process_has_left_in_the_store_is_deleted(one, shaky, proxy):
    shaky = shaky.having(part_size=5 * MIB)
    held = WireGate(proxy, "UploadPart")
    future, pid = begin(one, 1, shaky, nbytes=BIG), pid_of(one)
    held.wait()
    assert shaky.unfinished() != []
    kill(pid)
    assert isinstance(future.exception(PATIENCE), SaveProcessError)
    held.open()
    assert proxy.wait_idle()
    assert (shaky.names(), shaky.unfinished()) == ([], [])


def test_an_outcome_that_nobody_waited_for_is_not_taken_for_that_of_the_next_save(one, local):
    begin(one, 0, local).result(PATIENCE)
    pid = pid_of(one)
    with mock.patch.object(_Worker, "_receive", side_effect=RuntimeError("lost")):
        error = begin(one, 1, local.at("1")).exception(PATIENCE)
    assert "lost" in str(error)
    assert not is_running(pid)  # it could send what the next save writes to its memory
    begin(one, 2, local.at("2")).result(PATIENCE)
    assert step_at(local.at("2")) == 2


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def test_signals_that_are_for_the_trainer_do_not_end_what_saves(one, shaky, gate):
    future = begin(one, 1, shaky)
    gate.wait()
    pid = pid_of(one)  # one that has died before is replaced by now
    for number in SIGNALS:
        os.kill(pid, number)
    gate.open()
    future.result(PATIENCE)
    begin(one, 2, shaky.at("2")).result(PATIENCE)
    assert pid_of(one) == pid
    assert [step_at(shaky), step_at(shaky.at("2"))] == [1, 2]


@pytest.fixture
def short_signs(monkeypatch):
    """A saving process is ended after two seconds without a sign of life."""
    monkeypatch.setattr(process, "_HEARTBEAT_TIMEOUT", 2.0)


def test_a_process_that_is_frozen_amid_a_save_is_ended_and_replaced(local, short_signs):
    with saver() as one:
        begin(one, 0, local).result(PATIENCE)
        with stopped(one) as pid:
            error = begin(one, 1, local.at("1")).exception(PATIENCE)
            assert isinstance(error, SaveProcessError)
            assert "did not respond for 2 s" in str(error)
            assert eventually(lambda: not is_running(pid))
        begin(one, 2, local.at("2")).result(PATIENCE)
    assert step_at(local.at("2")) == 2


def test_a_process_that_saves_for_long_is_heard_of_and_left_alone(shaky, gate, short_signs):
    with saver() as one:
        future, pid = begin(one, 1, shaky), pid_of(one)
        gate.wait()
        assert not eventually(future.done, 5)
        gate.open()
        future.result(PATIENCE)
        assert pid_of(one) == pid
    assert step_at(shaky) == 1


def test_a_saver_that_is_dropped_leaves_no_process(local):
    other = saver()
    begin(other, 1, local).result(PATIENCE)
    pid = pid_of(other)
    del other
    assert eventually(lambda: not is_running(pid))


def test_closing_ends_a_save_that_takes_too_long(shaky, gate):
    other = saver(options=BackgroundOptions(patience=0.05))
    future = begin(other, 1, shaky)
    pid = pid_of(other)
    gate.wait()
    other.close()
    error = future.exception(PATIENCE)
    assert isinstance(error, SaveProcessError)
    assert "because the checkpointer was closed" in str(error)
    assert "did not read" not in str(error)
    assert eventually(lambda: not is_running(pid))
    assert ".metadata" not in shaky.names()


def test_what_a_trainer_gave_before_it_died_is_finished_and_not_the_save_before() -> None:
    current, save = CurrentSave(), Sending(mock.Mock(), mock.Mock())
    current.set(Sending(mock.Mock(), mock.Mock(), ()))
    with ThreadPoolExecutor(1) as watch:
        known = watch.submit(current.wait_until_orphaned, 30, or_sending=True)
        assert not wait([known], 0.2).done  # its settlement and the next save may be unread
        current.set(None)
        current.set(save)
        assert known.result(30)
    assert current.save is save
