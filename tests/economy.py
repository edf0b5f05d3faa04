"""What makes all tests cheaper: import these names into a ``conftest``."""

import gc
import os

import pytest
import torch

__all__ = ["one_thread_of_torch", "pytest_collection_finish"]


def pytest_collection_finish() -> None:
    """All that was imported and collected stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torch() -> None:
    """The tensors are small, and threads that wait for the next one keep all cores busy.

    That holds for child processes, too, if they are begun from now on.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
