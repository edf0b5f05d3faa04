"""I/O priorities: what can't be had is refused before a process is started, not in the midst."""

import multiprocessing
import sys

import psutil
import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import BackgroundOptions, ConfigError, MissingDependencyError
from cloudckpt.background import worker
from cloudckpt.background.saver import AsyncSaver
from dcp.children import in_a_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has I/O priorities")


def refused(kind=ConfigError, **options) -> str:
    """Why a saver is not made; and it leaves no process behind."""
    before = multiprocessing.active_children()
    with pytest.raises(kind) as caught:
        AsyncSaver(
            no_dist=True,
            kind=AsyncCheckpointerType.PROCESS,
            options=BackgroundOptions(**options),
        )
    assert multiprocessing.active_children() == before
    return str(caught.value)


def _idle() -> tuple[int, int]:
    worker.yield_to_trainer(0, "idle")
    return tuple(map(int, psutil.Process().ionice()))


def test_idle_is_the_class_below_all_levels():
    assert in_a_child("fork", _idle)[0] == int(psutil.IOPRIO_CLASS_IDLE)


def test_a_missing_psutil_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert "pip install 'cloudckpt[priority]'" in refused(
        MissingDependencyError, io_priority="idle"
    )


def test_a_system_without_io_priorities_is_told(monkeypatch):
    monkeypatch.setattr(worker.sys, "platform", "darwin")
    assert "only Linux" in refused(io_priority=3)


def test_a_kernel_without_io_priorities_is_told(monkeypatch):
    def fail(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(psutil.Process, "ionice", fail)
    assert "Function not implemented" in refused(io_priority=3)


def test_a_thread_needs_no_io_priority(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with AsyncSaver(no_dist=True, options=BackgroundOptions(io_priority="idle")):
        pass


def test_a_priority_that_can_not_be_had_in_the_process_is_only_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "psutil", None)
    worker.yield_to_trainer(0, 5)
    assert "the I/O priority stays as it is" in caplog.text
