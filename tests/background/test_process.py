"""The saving process of one trainer: used again and again, and replaced when it dies."""

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import (
    BackgroundOptions,
    CheckpointConflictError,
    CloudStorageWriter,
    CredentialsError,
    SaveProcessError,
    StagingError,
    StagingMemoryError,
)
from cloudckpt.background import arena as arenas
from cloudckpt.background import server
from cloudckpt.background.handoff import Job
from cloudckpt.background.process import _Life
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.config import MIB
from dcp.values import assert_same, blank_like, numbered
from faults.states import SMALL, filled

from .saves import PATIENCE, Gate, Refusing, begin, step_at
from .waiting import eventually, is_running

NICE = 7
IO_LEVEL = 6


def saver(**arguments) -> AsyncSaver:
    return AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS, **arguments)


@pytest.fixture(scope="module")
def one(_own_surroundings):
    """A saver with two buffers; its process costs seconds to start, so tests share it."""
    options = BackgroundOptions(nice=NICE, io_priority=IO_LEVEL, when_busy="double_buffer")
    with saver(options=options) as one:
        yield one


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path)


def pid_of(one: AsyncSaver) -> int:
    assert one._process is not None
    assert one._process.pid is not None
    return one._process.pid


def kill(pid: int) -> None:
    """Ends a process, and waits until it has ended."""
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_running(pid))


# ---- one process for all saves


def test_one_process_carries_out_all_saves(one, local):
    pids = set()
    for step in range(5):
        assert isinstance(begin(one, step, local).result(PATIENCE), Metadata)
        pids.add(pid_of(one))
        assert step_at(local) == step
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_values_of_all_kinds_cross(one, local):
    base = numbered(60, 50)
    state = {
        "base": base,
        "rows": base[7:9],
        "transposed": base.t(),
        "bfloat16": numbered(33, dtype=torch.bfloat16)[1:],
        "bool": numbered(9) > 3,
        "float8": numbered(17).to(torch.float8_e4m3fn),
        "conjugated": numbered(5, dtype=torch.complex64).conj(),
        "no dimension": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(numbered(4)),
        "nested": {"list": [numbered(3), "text", (1, None)]},
    }
    future = one.save(state, local.writer())
    future.written.result(PATIENCE)
    loaded = blank_like(state)
    cloudckpt.load(loaded, checkpoint_id=local.uri, config=local.config)
    state["parameter"] = loaded["parameter"] = None
    state["conjugated"] = state["conjugated"].resolve_conj()
    assert_same(loaded["nested"]["list"][0], numbered(3))
    del loaded["nested"], state["nested"]
    assert_same(loaded, state)


def test_the_trainer_changes_its_tensors_meanwhile(one, local, gate):
    state = filled(1, SMALL)
    future = one.save(state, local.writer(), planner=gate).written
    gate.wait()
    state["weight"].fill_(-1)
    state["bias"].fill_(-1)
    gate.open()
    future.result(PATIENCE)
    assert step_at(local) == 1


def test_the_trainer_is_told_what_was_sent(one, local):
    writer = local.writer()
    one.save(filled(1, SMALL), writer).written.result(PATIENCE)
    assert writer.transferred.bytes >= SMALL


def test_an_arena_that_grows_does_not_push_out_the_other_one(one, local):
    for step, size in enumerate([20, 20, 20, 30, 20, 30, 20, 50, 20]):
        begin(one, step, local, nbytes=size * MIB).result(PATIENCE)
    assert step_at(local, 20 * MIB) == 8


def test_memory_that_the_trainer_has_given_back_is_given_back_here_too(one, local):
    def held() -> int:
        with open(f"/proc/{pid_of(one)}/smaps_rollup") as file:
            return next(int(line.split()[1]) // 1024 for line in file if line.startswith("Pss:"))

    for step, size in enumerate([1, 1, 1]):
        begin(one, step, local, nbytes=size * MIB).result(PATIENCE)
    before = held()
    for step, size in enumerate([90, 90, 1, 1, 1]):
        begin(one, step, local, nbytes=size * MIB).result(PATIENCE)
    assert held() < before + 45


class Talking(DefaultSavePlanner):
    """Logs when its data is asked for."""

    def resolve_data(self, write_item):
        logging.getLogger("background.far").warning("saving %s", write_item.index.fqn)
        try:
            raise ValueError("deep")
        except ValueError:
            logging.getLogger("background.far").exception("it went wrong")
        return super().resolve_data(write_item)


def test_what_the_process_logs_reaches_the_trainers_logging(one, local, caplog):
    begin(one, 1, local, Talking()).result(PATIENCE)
    records = [record for record in caplog.records if record.name == "background.far"]
    assert "saving weight" in [record.getMessage() for record in records]
    assert any("ValueError: deep" in (record.exc_text or "") for record in records)


def test_the_process_learns_of_credentials_that_the_trainer_has_been_given(
    one, s3_config, bucket, monkeypatch
):
    config = dataclasses.replace(s3_config, connections=5)  # no store is open yet that has these

    def save():
        writer = CloudStorageWriter(f"s3://{bucket}/run", config=config)
        return one.save(filled(1, SMALL), writer).written.result(PATIENCE)

    monkeypatch.setenv("AWS_SESSION_TOKEN", "with white space behind ")
    with pytest.raises(CredentialsError, match="AWS_SESSION_TOKEN ends in white space"):
        save()
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    assert isinstance(save(), Metadata)


class Telling(DefaultSavePlanner):
    """Logs the surroundings of its process."""

    def resolve_data(self, write_item):
        told = f"{os.environ.get('OF_LATE')} in {os.getcwd()}"
        logging.getLogger("background.far").warning(told)
        return super().resolve_data(write_item)


def test_a_new_process_has_the_surroundings_that_its_trainer_has_by_then(
    one, local, monkeypatch, tmp_path, caplog
):
    begin(one, 1, local).result(PATIENCE)  # what forks is there already
    monkeypatch.setenv("OF_LATE", "set")
    monkeypatch.chdir(tmp_path)
    with saver() as other:
        begin(other, 2, local, Telling()).result(PATIENCE)
    assert f"set in {tmp_path}" in caplog.messages


def test_the_process_yields_the_cpu(one, local):
    begin(one, 1, local).result(PATIENCE)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid_of(one)) == min(19, own + NICE)


class Prioritised(DefaultSavePlanner):
    """Logs the I/O priority that a new thread of its process has."""

    def resolve_data(self, write_item):
        with ThreadPoolExecutor(1) as pool:
            number = pool.submit(threading.get_native_id).result()
            found = psutil.Process(number).ionice()
        logging.getLogger("background.far").warning("class %d, level %d", *found)
        return super().resolve_data(write_item)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has I/O priorities")
def test_the_process_and_its_threads_yield_the_disk(one, local, caplog):
    own = psutil.Process().ionice()
    begin(one, 1, local, Prioritised()).result(PATIENCE)
    found = psutil.Process(pid_of(one)).ionice()
    assert (found.ioclass, found.value) == (psutil.IOPRIO_CLASS_BE, IO_LEVEL)
    assert f"class {psutil.IOPRIO_CLASS_BE:d}, level {IO_LEVEL}" in caplog.messages
    assert psutil.Process().ionice() == own


def test_several_savers_have_a_process_each(one, local, gate):
    with saver(stager=BlockingAsyncStager()) as other:
        first = begin(one, 1, local.at("1"), gate)
        gate.wait()
        begin(other, 2, local.at("2")).result(PATIENCE)  # tensors that are in no arena
        assert step_at(local.at("2")) == 2
        assert not first.done()
        gate.open()
        first.result(PATIENCE)
        pid = pid_of(other)
        assert pid != pid_of(one)
    assert not is_running(pid)
    assert step_at(local.at("1")) == 1


# ---- failures


def test_a_value_that_cannot_be_sent_is_named(one, local):
    state = {"t": numbered(3), "scheduler": {"step": lambda: 1}}
    error = one.save(state, local.writer()).written.exception(PATIENCE)
    assert isinstance(error, StagingError)
    assert "'scheduler' (a dict) can't be sent to the saving process" in str(error)
    begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_planner_that_the_process_cannot_import_is_an_error_with_a_name(one, local, monkeypatch):
    module = types.ModuleType("only_in_the_trainer")
    exec("from torch.distributed.checkpoint import DefaultSavePlanner\n"
         "class Planner(DefaultSavePlanner): pass", module.__dict__)  # fmt: skip
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pid = pid_of(one)
    error = begin(one, 1, local, module.Planner()).exception(PATIENCE)
    assert isinstance(error, SaveProcessError)
    assert "importable" in str(error)
    assert "only_in_the_trainer" in str(error)
    begin(one, 2, local).result(PATIENCE)
    assert pid_of(one) == pid


def test_what_fails_in_the_process_is_told_and_harms_no_other_save(one, local):
    pid = pid_of(one)
    error = begin(one, 1, local, Refusing()).exception(PATIENCE)
    assert "the dog ate it" in str(error)
    begin(one, 2, local).result(PATIENCE)
    assert (step_at(local), pid_of(one)) == (2, pid)


def test_a_lack_of_memory_fails_the_save_and_training_goes_on(one, local, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(arenas, "available_memory", lambda: 1000)
        error = begin(one, 1, local, nbytes=300 * MIB).exception(PATIENCE)
    assert isinstance(error, StagingMemoryError)
    begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_failure_keeps_no_memory_of_the_process_through_the_next_save(local, gate):
    def arenas() -> int:
        with open(f"/proc/{pid_of(one)}/maps") as file:
            return sum("memfd:cloudckpt-staging" in line for line in file)

    with saver() as one:
        assert begin(one, 1, local, Refusing()).exception(PATIENCE) is not None
        future = begin(one, 2, local, gate, nbytes=90 * MIB)  # in another arena
        gate.wait()
        assert arenas() == 1
        gate.open()
        future.result(PATIENCE)


@pytest.fixture
def _impatient_sockets():
    socket.setdefaulttimeout(30)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("_impatient_sockets")
def test_a_large_message_crosses_whatever_the_default_timeout_of_sockets_is(local):
    with saver() as one:
        for step in (1, 2):
            state = {**filled(step, SMALL), "text": "x" * 8 * 1024**2}
            writer = CloudStorageWriter(local.uri, config=local.config)
            one.save(state, writer).written.result(PATIENCE)
    assert step_at(local) == 2


# ---- deaths


def test_a_process_that_dies_in_a_save_fails_it_and_is_replaced(one, local, gate):
    pid = pid_of(one)
    future = begin(one, 1, local, gate)
    gate.wait()
    kill(pid)
    error = future.exception(PATIENCE)
    assert isinstance(error, SaveProcessError)
    assert "was ended by signal 9" in str(error)
    assert ".metadata" not in local.names()
    begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2
    assert pid_of(one) != pid


def test_a_process_that_dies_between_two_saves_is_replaced(one, local):
    begin(one, 1, local).result(PATIENCE)
    kill(pid_of(one))
    begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_process_that_dies_before_it_is_ready_is_replaced(local):
    with saver() as other:
        kill(pid_of(other))
        begin(other, 1, local).result(PATIENCE)
    assert step_at(local) == 1


def test_an_outcome_that_nobody_waited_for_is_not_taken_for_that_of_the_next_save(one, local, gate):
    begin(one, 0, local).result(PATIENCE)
    pid = pid_of(one)
    with mock.patch.object(_Life, "_receive", side_effect=RuntimeError("lost")):
        error = begin(one, 1, local.at("1"), gate).exception(PATIENCE)
    assert "lost" in str(error)
    assert not is_running(pid)  # it could commit what the next save writes to its memory
    gate.open()
    begin(one, 2, local.at("2")).result(PATIENCE)
    assert step_at(local.at("2")) == 2


def test_a_process_that_wakes_up_late_cannot_overwrite(one, s3, gate):
    begin(one, 0, s3).result(PATIENCE)
    future = begin(one, 1, s3, gate)
    gate.wait()
    os.kill(pid_of(one), signal.SIGSTOP)
    try:
        cloudckpt.save(filled(2, SMALL), checkpoint_id=s3.uri, config=s3.config)
        gate.open()
    finally:
        os.kill(pid_of(one), signal.SIGCONT)
    assert isinstance(future.exception(PATIENCE), CheckpointConflictError)
    assert step_at(s3) == 2
    begin(one, 3, s3).result(PATIENCE)
    assert step_at(s3) == 3


def test_a_process_that_is_asked_to_end_in_a_save_finishes_it(local, gate):
    with saver() as one:
        future, pid = begin(one, 1, local, gate), pid_of(one)
        gate.wait()
        os.kill(pid, signal.SIGTERM)
        assert not eventually(future.done, 1)
        gate.open()
        future.result(PATIENCE)
        begin(one, 2, local.at("2")).result(PATIENCE)  # in a new one: it had said that it ends
        assert eventually(lambda: not is_running(pid))
    assert [step_at(local), step_at(local.at("2"))] == [1, 2]


def test_a_process_that_is_asked_to_end_finishes_what_waits_behind_its_save_too(local, gate):
    with saver(options=BackgroundOptions(when_busy="double_buffer")) as one:
        first, pid = begin(one, 1, local, gate), pid_of(one)
        gate.wait()
        os.kill(pid, signal.SIGTERM)
        second = begin(one, 2, local.at("2"))
        gate.open()
        first.result(PATIENCE)
        second.result(PATIENCE)
        assert eventually(lambda: not is_running(pid))
        begin(one, 3, local.at("3")).result(PATIENCE)
    assert [step_at(place) for place in (local, local.at("2"), local.at("3"))] == [1, 2, 3]


def test_a_signal_that_is_for_the_trainer_does_not_end_what_saves(local):
    with saver() as one:
        begin(one, 1, local).result(PATIENCE)
        assert server._server is not None
        pid = pid_of(one)
        for process in (pid, server._server.process.pid):
            os.kill(process, signal.SIGUSR1)
        begin(one, 2, local).result(PATIENCE)
        assert pid_of(one) == pid
    assert step_at(local) == 2


class Terminating:
    """A Stateful that is asked for its state when SIGTERM comes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def state_dict(self) -> dict:
        os.kill(self._pid, signal.SIGTERM)
        eventually(lambda: not is_running(self._pid), 0.5)
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError


def test_a_process_that_is_asked_to_end_while_the_copy_is_made_carries_out_that_save(local):
    with saver() as one:
        begin(one, 1, local).result(PATIENCE)
        pid = pid_of(one)
        state = {**filled(2, SMALL), "model": Terminating(pid)}
        one.save(state, local.writer()).written.result(PATIENCE)
        assert eventually(lambda: not is_running(pid))
    assert step_at(local) == 2


def test_a_process_that_is_asked_to_end_between_two_saves_does_so_at_once(local):
    with saver() as one:
        begin(one, 1, local).result(PATIENCE)
        pid = pid_of(one)
        os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: not is_running(pid))
        begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_process_that_is_frozen_amid_a_save_is_ended_and_replaced(local, gate):
    with saver(options=BackgroundOptions(heartbeat_timeout=2)) as one:
        begin(one, 0, local).result(PATIENCE)
        future, pid = begin(one, 1, local.at("1"), gate), pid_of(one)
        gate.wait()
        os.kill(pid, signal.SIGSTOP)
        error = future.exception(PATIENCE)
        assert isinstance(error, SaveProcessError)
        assert "no sign of life for 2 s" in str(error)
        assert eventually(lambda: not is_running(pid))
        begin(one, 2, local.at("2")).result(PATIENCE)
    assert step_at(local.at("2")) == 2


def test_a_process_that_is_frozen_before_a_large_job_does_not_hold_up_its_trainer(local):
    with saver(options=BackgroundOptions(heartbeat_timeout=2)) as one:
        begin(one, 0, local).result(PATIENCE)
        pid = pid_of(one)
        os.kill(pid, signal.SIGSTOP)
        state = {"text": "x" * 8 * 1024**2}  # more than the channel takes
        writer = CloudStorageWriter(local.uri, config=local.config)
        error = one.save(state, writer).written.exception(PATIENCE)
        assert isinstance(error, SaveProcessError)
        assert "did not read" in str(error)
        assert eventually(lambda: not is_running(pid))
        begin(one, 2, local).result(PATIENCE)
    assert step_at(local) == 2


def test_a_process_that_saves_for_long_is_heard_of_and_left_alone(local, gate):
    options = BackgroundOptions(heartbeat_timeout=2)
    with saver(options=options) as one:
        future, pid = begin(one, 1, local, gate), pid_of(one)
        gate.wait()
        assert not eventually(future.done, 5)
        gate.open()
        future.result(PATIENCE)
        assert pid_of(one) == pid
    assert step_at(local) == 1


def test_closing_waits_for_the_save_and_ends_the_process(local, gate):
    other = saver(options=BackgroundOptions(close_timeout=PATIENCE))
    future = begin(other, 1, local, gate)
    pid = pid_of(other)
    gate.wait()
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(other.close)
        gate.open()
        closed.result(PATIENCE)
    assert future.done()
    assert eventually(lambda: not is_running(pid))
    assert step_at(local) == 1


def test_closing_again_ends_a_process_that_an_interrupt_has_left(local, gate):
    other = saver(options=BackgroundOptions(close_timeout=PATIENCE))
    future, pid = begin(other, 1, local, gate), pid_of(other)
    gate.wait()
    gate.open()
    future.result(PATIENCE)
    with (
        mock.patch.object(_Life, "end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        other.close()
    assert is_running(pid)
    other.close()
    assert eventually(lambda: not is_running(pid))


def test_closing_ends_a_save_that_takes_too_long(local, gate):
    other = saver(options=BackgroundOptions(close_timeout=0.05))
    future = begin(other, 1, local, gate)
    pid = pid_of(other)
    gate.wait()
    other.close()
    error = future.exception(PATIENCE)
    assert isinstance(error, SaveProcessError)
    assert "because the saver was closed" in str(error)
    assert "did not read" not in str(error)
    assert eventually(lambda: not is_running(pid))
    assert ".metadata" not in local.names()


def test_a_job_that_could_not_be_sent_is_not_blamed_on_a_time_limit(local):
    with saver() as one:
        begin(one, 1, local).result(PATIENCE)
        send = Connection.send

        def refuse(connection, message):
            if isinstance(message, Job):
                raise OSError("no buffer space")
            send(connection, message)

        with mock.patch.object(Connection, "send", refuse):
            error = begin(one, 2, local).exception(PATIENCE)
        assert isinstance(error, SaveProcessError)
        assert "can't be reached" in str(error)
        assert "no buffer space" in str(error)
        begin(one, 3, local).result(PATIENCE)
    assert step_at(local) == 3


def test_a_server_that_no_saving_process_is_left_of_ends(local):
    with mock.patch.object(server, "_server", None), mock.patch.object(server, "_IDLE", 2.0):
        with saver() as one:
            begin(one, 1, local).result(PATIENCE)
            number = server._server.process.pid
            begin(one, 2, local).result(PATIENCE)
        assert eventually(lambda: not is_running(number))
        with saver() as one:
            begin(one, 3, local).result(PATIENCE)
    assert step_at(local) == 3


def test_a_server_that_dies_takes_its_saving_processes_along_and_is_replaced(local, gate):
    with saver() as dying:
        future, pid = begin(dying, 1, local, gate), pid_of(dying)
        gate.wait()
        os.kill(server._server.process.pid, signal.SIGKILL)
        assert isinstance(future.exception(PATIENCE), SaveProcessError)
        assert not is_running(pid)
        gate.open()
        assert ".metadata" not in local.names()
        begin(dying, 2, local).result(PATIENCE)
    assert step_at(local) == 2
