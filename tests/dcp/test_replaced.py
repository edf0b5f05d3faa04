"""Loads beside writers of the same location are of one save, and call nothing damaged."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    MissingKeyError,
)
from cloudckpt.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    torch_save_to_dcp,
)
from cloudckpt.stores.registry import open_store
from cloudckpt.torch_files.torch_file import write_torch_file
from cloudckpt.transfer import retry
from cloudckpt.uri import CheckpointURI

from .layouts import LAYOUTS, Layout, spread
from .places import Place

SIZE = 200_000  # of a tensor: some objects and requests
TRIES = 5


def state_of(step: int) -> dict:
    """Every element is the step, so that a mix shows."""
    return {
        "large": torch.full((SIZE,), float(step)),
        "small": torch.full((4, 6), step),
        "nested": {"step": step, "list": [step, torch.full((3,), step)]},
    }


def save(place: Place, step: int) -> None:
    place.save(state_of(step), no_dist=True)


def load(place: Place) -> int:
    place.load(state := state_of(-1), no_dist=True)
    return step_of(state)


def step_of(state: dict) -> int:
    found = {
        *map(int, state["large"].aminmax()),
        *map(int, state["small"].aminmax()),
        *map(int, state["nested"]["list"][1].aminmax()),
        state["nested"]["step"],
        state["nested"]["list"][0],
    }
    assert len(found) == 1, f"a mix of steps: {found}"
    return found.pop()


@contextlib.contextmanager
def overtaken(
    place: Place, verb: str, suffix: str, writer: Callable[[], None], times: int = 1
) -> Iterator[list[str]]:
    """Within, ``writer`` runs before the first requests of a kind; yields the keys of these."""
    store = open_store(CheckpointURI.parse(place.uri), place.config)
    inner, lock, seen, busy = getattr(store, verb), threading.Lock(), [], threading.Event()

    @functools.wraps(inner)
    def after_the_writer(key, *arguments, **options):
        if not busy.is_set():  # the writer makes such requests, too, in several threads
            with lock:
                if suffix in key and len(seen) < times:
                    seen.append(key)
                    busy.set()
                    writer()
                    busy.clear()
        return inner(key, *arguments, **options)

    setattr(store, verb, after_the_writer)
    try:
        yield seen
    finally:
        delattr(store, verb)


REQUESTS = [("get_range", ".metadata"), ("get_range", ".distcp")]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("verb", "suffix"), REQUESTS)
def test_a_load_that_is_overtaken_begins_anew_or_ends_by_name(
    verb, suffix, verify, local, monkeypatch
):
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.0)
    place, steps = local.having(verify=verify), iter(range(1, 100))

    def overtake() -> None:
        save(place, next(steps))

    overtake()
    with overtaken(place, verb, suffix, overtake) as seen:
        assert load(place) == 2
    assert len(seen) == 1
    with (
        overtaken(place, verb, suffix, overtake, times=99) as seen,
        pytest.raises(CheckpointReplacedError) as caught,
    ):
        load(place)
    assert caught.value.uri == place.uri
    assert TRIES <= len(seen) <= 2 * TRIES  # two objects are read at once

    def delete() -> None:
        for name in sorted(place.names()):
            os.unlink(f"{place.path}/{name}")

    with overtaken(place, verb, suffix, delete), pytest.raises(CheckpointNotFoundError):
        load(place)


def test_a_partial_load_keeps_no_value_of_a_checkpoint_that_was_replaced(local):
    local.save({"kept": torch.zeros(SIZE), "gone": torch.zeros(SIZE)}, no_dist=True)
    state, requests = {"kept": torch.ones(SIZE), "gone": torch.ones(SIZE)}, iter(range(9))

    def overtake() -> None:
        if next(requests):  # the first is of the index
            local.save({"kept": torch.zeros(SIZE)}, no_dist=True)

    with (
        overtaken(local, "get_range", ".distcp", overtake, times=2),
        pytest.raises(MissingKeyError, match="replaced while it was loaded"),
    ):
        local.load(state, no_dist=True, strict=False)


# ---- files of torch.save


def write(file: Place, step: int) -> None:
    write_torch_file(state_of(step), CheckpointURI.parse(file.uri), file.config)


def test_a_file_that_is_replaced_while_it_is_converted_is_read_anew(s3):
    file, target = s3.at("model.pt"), s3.at("dcp")
    write(file, 1)
    # the first requests read its directory
    steps = iter(range(2, 100))
    with overtaken(file, "get_range", ".pt", lambda: write(file, next(steps)), times=2) as seen:
        torch_save_to_dcp(file.uri, target.uri, config=file.config)
    assert len(seen) == 2
    assert load(target) == 3


# ---- many ranks


def _spread(step: int, *, blank: bool = False) -> dict:
    state = state_of(step)
    rows = Layout((dist.get_world_size(),), LAYOUTS["2 rows"].placements)
    return {**state, **spread({"small": state["small"]}, rows, blank=blank)}


def _load_spread(place: Place) -> int:
    state = _spread(-1)
    place.load(state)
    return step_of({**state, "small": state["small"].full_tensor()})


def _overtake_on(rank: int, place: Place) -> int:
    """Loads; on one of the ranks, a writer overtakes the load."""
    if dist.get_rank() != rank:
        return _load_spread(place)
    with overtaken(place, "get_range", ".distcp", lambda: save(place, 2)) as seen:
        found = _load_spread(place)
    assert len(seen) == 1
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_begin_anew_when_one_was_overtaken(rank, s3, ranks):
    save(s3, 1)
    assert ranks(2, _overtake_on, rank, s3) == [2, 2]


def _load_file(file: Place) -> int:
    state = _spread(-1)
    reader = BroadcastingTorchSaveReader(file.uri, config=file.config)
    cloudckpt.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    return step_of({**state, "small": state["small"].full_tensor()})


def _load_replaced_file(file: Place, skip: int) -> int:
    if dist.get_rank() != 0:
        return _load_file(file)
    requests = iter(range(100))

    def replace() -> None:
        if next(requests) == skip:
            write(file, 2)

    with overtaken(file, "get_range", ".pt", replace, times=99):
        return _load_file(file)


@pytest.mark.parametrize("skip", range(4))
def test_a_file_that_is_replaced_while_it_is_broadcast_is_of_one_version(skip, local, ranks):
    file = local.at("model.pt")
    write(file, 1)
    assert ranks(2, _load_replaced_file, file, skip) in ([1, 1], [2, 2])
