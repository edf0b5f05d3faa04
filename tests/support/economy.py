"""What makes all tests cheaper: import these names into a ``conftest``.

torch and the like are imported by fixtures: the process that hands tests out to others needs none.
"""

import gc
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# files that take longest, the longest first: others run beside them; begun last, one of them would
# keep a single worker busy while the other cores have nothing to do
_LONG = (
    "faults/test_hangs.py",
    "tests/test_docs.py",
    "faults/test_conflicts.py",
    "background/test_trainers.py",
    "cli/test_ranks.py",
    "evolving/test_drawn.py",
    "runs/test_lines.py",
    "runs/test_ends_of_jobs.py",
    "gpu/test_gpu.py",
    "doctor/test_examination.py",
    "faults/test_load.py",
    "faults/test_save.py",
    "background/test_process.py",
    "dcp/test_processes.py",
    "stores/test_s3_dialects.py",
    "faults/test_ranks.py",
    "runs/test_adopting.py",
)

gc.disable()  # until all is collected: nearly all that is made until then stays


# what `make test-fast` runs: rooms whose tests decide by themselves, without processes and servers
_FAST_ROOMS = ("checkpoint", "stores", "tests", "transfer")
_SLOW_FIXTURES = frozenset({"ranks", "s3_url", "stub_server"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Rooms without a fast test are not even imported where only fast ones are asked for."""
    room = collection_path.is_dir() and collection_path.name not in (*_FAST_ROOMS, "support")
    return True if room and "fast" in config.option.markexpr.split() else None


def _turn(item: pytest.Item) -> int:
    """The place of a file among the longest; that of all others is behind."""
    path = item.path.as_posix()
    return next((turn for turn, name in enumerate(_LONG) if path.endswith(name)), len(_LONG))


def _is_fast(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    is_short = _turn(item) == len(_LONG) and _SLOW_FIXTURES.isdisjoint(fixtures)
    return is_short and item.path.parent.name in _FAST_ROOMS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(_is_fast, items):
        item.add_marker("fast")
    items.sort(key=_turn)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All that was imported and collected stays: no collection of garbage need look at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torch() -> None:
    """The tensors are small, and threads that wait for the next one keep all cores busy.

    That holds for child processes, too, if they are begun from now on.
    """
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """What a test has put into a store in memory goes with it: together it is gigabytes."""
    from support import memory_store

    before = set(memory_store._buckets)
    yield
    for name in memory_store._buckets.keys() - before:
        memory_store._buckets.pop(name).objects.clear()


@pytest.fixture(scope="session", autouse=True)
def cheap_sessions_of_boto() -> Iterator[None]:
    """botocore derives the same things for each session: from megabytes of JSON what it knows of
    AWS, and of each of hundreds of handlers whether it takes any keywords. That is nine tenths of
    the time in which a store of S3 is opened, as nearly every test does."""
    import botocore.compat
    import botocore.hooks
    import botocore.loaders
    import botocore.session

    def accepts_kwargs(function: Callable[..., Any]) -> bool:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None:
            return bool(botocore.compat.accepts_kwargs(function))
        return bool(code.co_flags & inspect.CO_VARKEYWORDS)

    loader = botocore.loaders.create_loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", lambda *paths: loader)
        patch.setattr(botocore.hooks, "accepts_kwargs", accepts_kwargs)
        yield
