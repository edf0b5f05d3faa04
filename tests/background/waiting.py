"""Waiting for something to become so, with an end, or with an interrupt."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

__all__ = [
    "eventually",
    "interrupted",
    "is_running",
    "open_files",
    "processes_of",
    "staged_copies",
]


def eventually(condition: Callable[[], bool], seconds: float = 150.0) -> bool:
    """Whether a condition holds within some seconds; it is looked at again and again."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def interrupted(owner: object, wait: str) -> Iterator[None]:
    """Ctrl-C strikes when the block calls a function, given by its name, to wait."""
    with (
        mock.patch.object(owner, wait, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        yield


def open_files() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def staged_copies() -> int:
    """How many staged copies this process has memory for."""
    with open("/proc/self/maps") as file:
        return sum("memfd:cloudckpt-staging" in line for line in file)


def is_running(pid: int) -> bool:
    """Whether a process has a thread left; its parent may not have asked for its end yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def processes_of(family: str) -> list[int]:
    """The processes that have the name of a family in their environment, orphans included."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"FAMILY={family}\0".encode() in file.read():
                    found.append(int(pid))
        except OSError:
            pass  # it has ended, or is another user's
    return found
