"""What crosses a process boundary, and saving on its other side."""

import threading

import torch

import cloudckpt
from cloudckpt.format_utils import torch_save_to_dcp

from .children import in_a_child
from .places import Place
from .values import assert_same, numbered


def _save_and_load(place: Place, first: int) -> bool:
    state = {"t": numbered(300_000, first=first), "small": numbered(10), "n": {"step": first}}
    place.save(state)
    loaded = {"t": torch.zeros(300_000), "small": torch.zeros(10), "n": {"step": None}}
    place.load(loaded)
    assert_same(loaded, state)
    return True


def _check(place: Place, first: int) -> None:
    state = {"t": torch.zeros(300_000)}
    place.load(state)
    assert_same(state["t"], numbered(300_000, first=first))


def _as_a_child(place: Place) -> bool:
    _check(place.at("parent"), 1)
    return _save_and_load(place.at("child"), 1000)


def test_a_forked_child_saves_and_loads_after_its_parent_has(s3):
    assert _save_and_load(s3.at("parent"), 1)
    assert in_a_child("fork", _as_a_child, s3)
    assert _save_and_load(s3.at("parent"), 2)  # its connections are still its own
    _check(s3.at("child"), 1000)


def _without_threads_of_torch(uri: str) -> bool:
    """Most of what cloudckpt does, where torch counts on threads that the fork did not copy."""
    torch.set_num_threads(2)
    state = {name: torch.ones(3) for name in "abc"}
    cloudckpt.save(state, checkpoint_id=f"{uri}/first", no_dist=True)
    torch.save(state, f"{uri}/file.pt")
    torch_save_to_dcp(f"{uri}/file.pt", f"{uri}/second")
    cloudckpt.copy(f"{uri}/first", f"{uri}/third")
    cloudckpt.verify(f"{uri}/third")
    return True


def test_a_forked_child_does_not_wait_for_threads_of_torch_for_a_few_tensors(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1_000_000).sum()  # starts the threads, which no child has
        assert in_a_child("fork", _without_threads_of_torch, str(tmp_path), deadline=60.0)
    finally:
        torch.set_num_threads(before)


def test_a_child_forked_in_the_midst_of_reads_saves(s3):
    """Whatever lock of ours another thread holds at that moment is free in the child.

    The other threads only read metadata: of torch itself not every function survives such a fork.
    """
    _save_and_load(s3.at("parent"), 1)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def keep_reading() -> None:
        try:
            while not stop.is_set():
                s3.at("parent").reader().read_metadata()
        except BaseException as error:  # noqa: BLE001 - raised below
            wrong.append(error)

    threads = [threading.Thread(target=keep_reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for attempt in range(3):
            assert in_a_child("fork", _save_and_load, s3.at(f"child-{attempt}"), attempt)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
