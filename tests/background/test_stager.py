"""The stager's memory: kept from save to save, locked while it is read, given back at the end."""

import errno
import gc
import itertools
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from unittest import mock

import pytest
import torch

from cloudckpt.background import arena as arenas
from cloudckpt.background import stager as stagers
from cloudckpt.checkpointer import Stager
from cloudckpt.config import MIB
from cloudckpt.errors import ClosedError, SaveInProgressError, StagingMemoryError
from dcp.children import in_a_child
from dcp.values import assert_same, numbered

from .waiting import open_files

PATIENCE = 120.0  # seconds


# ---- the arena


@pytest.mark.parametrize(
    ("sizes", "arena_sizes"),
    [
        ([10, 20, 30], [10, 20, 30]),
        ([40, 30, 20], [40, 40, 40]),
        ([40, 19, 30], [40, 19, 30]),
        ([10, 1, 10], [10, 10, 10]),  # too small to be worth it
    ],
    ids=["grows", "is kept", "shrinks below half", "is small"],
)
def test_an_arena_fits_what_is_staged(stager, sizes, arena_sizes):
    held = []
    for size in sizes:
        state = {"t": torch.full((size * MIB,), size, dtype=torch.uint8)}
        staged = stager.begin(state, 0)
        assert_same(staged.state_dict, state)
        held.append(staged.arena)
        staged.release()
    assert [arena.size // MIB for arena in held] == arena_sizes
    for one, other in itertools.pairwise(held):
        assert (one is other) == (one.size == other.size)


def test_it_gives_back_what_it_opened_and_leaves_nothing_in_shared_memory():
    gc.collect()
    files, names = open_files(), os.listdir("/dev/shm")
    for _ in range(3):
        stager = Stager()
        for size in (1, 20, 5):
            stager.stage({"t": torch.ones(size * MIB // 4)})
            assert os.listdir("/dev/shm") == names
        assert open_files() <= files + 2
        stager.close()
        stager.close()
    assert open_files() == files


@pytest.mark.parametrize("has_fallocate", [True, False])
@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_state_is_staged_where_memory_is_not_allocated_ahead(
    has_fallocate, has_memfd, monkeypatch
):
    def not_here(*_: object) -> None:
        raise OSError(errno.EINVAL, "not on this file system")

    monkeypatch.setattr(os, "posix_fallocate", not_here)
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate")
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    files = open_files()
    with Stager() as stager:
        state = {"t": numbered(10_000)}
        assert_same(stager.stage(state), state)
    gc.collect()
    assert open_files() == files


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), OverflowError, ValueError])
@pytest.mark.parametrize("step", ["os.posix_fallocate", "mmap.mmap"])
def test_an_arena_that_can_not_be_had_leaves_no_open_file(step, error, monkeypatch):
    monkeypatch.setattr(step, mock.Mock(side_effect=error))
    files = open_files()
    with pytest.raises(StagingMemoryError, match="could not be allocated"):
        arenas.Arena(MIB)
    assert open_files() == files


def test_an_annex_that_is_closed_early_writes_to_no_file_that_is_opened_later(tmp_path):
    annex = arenas.Annex()
    annex.append(memoryview(b"x"))
    annex.close()
    with (tmp_path / "other").open("wb", 0) as other:  # gets the number of the annex's file
        del annex
        assert os.fstat(other.fileno()).st_size == 0


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_copy_outlives_its_stager_and_is_all_that_is_kept(is_closed):
    gc.collect()  # of what other tests have dropped
    files, stager = open_files(), Stager()
    copy = stager.stage({"t": numbered(1000)})
    if is_closed:
        stager.close()
    del stager
    gc.collect()
    with Stager() as other:
        other.stage({"t": torch.zeros(1000)})
    assert_same(copy, {"t": numbered(1000)})
    del copy
    gc.collect()
    assert open_files() == files


def _beyond_the_limit() -> tuple[str, bool]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, resource.RLIM_INFINITY))
    stager, files = Stager(), open_files()
    with pytest.raises(StagingMemoryError) as caught:
        stager.stage({"t": torch.zeros(9 * MIB, dtype=torch.uint8)})
    assert open_files() == files
    stager.stage({"t": torch.zeros(7 * MIB, dtype=torch.uint8)})  # the trainer goes on
    return str(caught.value), isinstance(caught.value, MemoryError)


def test_memory_that_the_kernel_refuses_is_an_error_that_says_how_much_is_needed():
    message, is_memory_error = in_a_child("fork", _beyond_the_limit)
    assert "needs 9 MiB" in message
    assert "File too large" in message
    assert is_memory_error


def test_memory_that_can_not_be_pinned_is_given_back(monkeypatch):
    refused = mock.Mock(side_effect=StagingMemoryError("no more locked memory"))
    monkeypatch.setattr(arenas, "_pin", refused)
    gc.collect()
    before = open_files()
    for _ in range(5):
        with pytest.raises(StagingMemoryError, match="locked"):
            arenas.Arena(MIB, pin=True)
    gc.collect()
    assert open_files() == before


# ---- the lease


def test_a_copy_that_is_held_is_never_written_to(stager):
    staged = stager.stage({"t": numbered(1000)})
    with pytest.raises(SaveInProgressError, match=r"still reads the staged copy after 0\.05 s"):
        stager.stage({"t": torch.zeros(1000)})
    assert_same(staged["t"], numbered(1000))


def test_a_copy_waits_for_the_one_before_and_goes_on_with_its_release():
    stager = Stager(patience=PATIENCE)
    first = stager.begin({"t": numbered(10)}, 0)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(stager.stage, {"t": numbered(10, first=5)})
        assert not wait([second], 0.1).done
        assert_same(first.state_dict["t"], numbered(10))
        first.release()
        assert_same(second.result(PATIENCE)["t"], numbered(10, first=5))


def test_an_interrupt_ends_a_copy_before_its_memory_is_used_again(monkeypatch):
    """Its threads read the trainer's tensors, and write to the buffer."""
    copying, begun, writing = threading.Event(), threading.Event(), []
    copy_all = stagers._copy_all

    def slowly(pairs):
        writing.append(None)
        begun.set()
        copying.wait(0.5)
        copy_all(pairs)
        writing.pop()

    def interrupt():
        assert begun.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(stagers, "_copy_all", slowly)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        with Stager(threads=2) as stager:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                stager.stage({"t": numbered(40 * MIB // 4)})
            assert writing == []
            monkeypatch.undo()
            assert_same(stager.stage({"t": numbered(9)}), {"t": numbered(9)})
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join(PATIENCE)


class _Interrupt:
    """Ctrl-C at one of the places where Python looks for it: as a call begins, or C returns."""

    def __init__(self, place: int) -> None:
        self._left = place

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name in ("end",):  # of a finalizer, in which an interrupt is lost
            return
        if event in ("call", "c_return") and code.co_filename == stagers.__file__:
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def test_no_interrupt_of_a_copy_loses_its_memory():
    with Stager(patience=0) as stager:
        for place in range(1, 1000):
            sys.setprofile(_Interrupt(place))
            try:
                stager.stage({"t": numbered(10)})
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                sys.setprofile(None)
            gc.collect()
            assert_same(stager.stage({"t": numbered(10)}), {"t": numbered(10)})
        assert place > 10


def _stage_in_a_fork(stager: Stager) -> None:
    with pytest.raises(ClosedError, match="make a new one"):
        stager.stage({"t": torch.zeros(10)})
    stager.close()


def test_a_forked_process_must_not_write_to_the_copy_of_its_parent(stager):
    held = stager.stage({"t": numbered(10)}).pop("t")
    in_a_child("fork", _stage_in_a_fork, stager)
    assert_same(held, numbered(10))


def _blocks(process: int, file: os.stat_result) -> int | None:
    """The size of an arena's file as a process has it open; None if it has not."""
    for name in os.listdir(f"/proc/{process}/fd"):
        found = os.stat(f"/proc/{process}/fd/{name}")
        if os.path.samestat(found, file):
            return found.st_blocks
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of another process's files")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_memory_is_given_back_though_a_forked_child_maps_it():
    """The workers of a DataLoader live as long as an epoch, or as long as the training."""
    stager = Stager()
    staged = stager.begin({"t": torch.ones(8 * MIB // 4)}, 0)
    view, file = staged.state_dict["t"][:10], os.fstat(staged.arena.fd)
    if (child := os.fork()) == 0:
        signal.pause()
    try:
        staged.release()
        stager.stage({"t": torch.ones(32 * MIB // 4)})  # in a new arena
        assert _blocks(child, file) == 8 * MIB // 512
        assert view.tolist() == [1] * 10  # somebody still has a part of the old one
        del view
        assert _blocks(child, file) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    stager.close()
