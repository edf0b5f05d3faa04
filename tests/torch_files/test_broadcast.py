"""Loading by broadcast: whatever befalls one rank, every rank is told, and none is left waiting."""

import weakref

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import events
from cloudckpt.errors import ConfigError, RanksFailedError
from cloudckpt.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from cloudckpt.torch_files import broadcast
from dcp.places import Place
from dcp.values import numbered


@pytest.fixture(scope="module")
def model(places) -> Place:
    """A file of several tensors."""
    folder = places("local")
    torch.save({"t": numbered(2200, 2200), "u": numbered(4, 5)}, f"{folder.path}/model.pt")
    return folder.at("model.pt")


def load(place: Place, *, group=None, **options):
    state = {"t": torch.zeros(2200, 2200), "u": torch.zeros(4, 5)}
    reader = BroadcastingTorchSaveReader(place.uri, config=place.having(**options).config)
    cloudckpt.load(
        state, storage_reader=reader, planner=DynamicMetaLoadPlanner(), process_group=group
    )
    assert torch.equal(state["t"], numbered(2200, 2200))
    assert torch.equal(state["u"], numbered(4, 5))
    return reader


def _of_some(place: Place) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        load(place, group=group)


def test_a_load_of_some_ranks_is_refused_on_each_of_them(model, ranks):
    errors = ranks.errors(3, _of_some, model)
    assert [type(error) for error in errors] == [ConfigError, ConfigError, type(None)]


def _interrupted(place: Place, rank: int, where: str) -> None:
    """Has an interrupt come on one rank, with the second tensor."""
    module, name = {
        "room": (BroadcastingTorchSaveReader, "_room"),
        "copying": (broadcast, "copy_into"),
    }[where]
    original, calls = getattr(module, name), []

    def second(*args, **options):
        calls.append(1)
        found = original(*args, **options)
        if dist.get_rank() == rank and len(calls) == 2:
            raise KeyboardInterrupt
        return found

    setattr(module, name, second)
    try:
        load(place)
    finally:
        setattr(module, name, original)


@pytest.mark.parametrize("at", ["0 room", "1 copying"])
def test_an_interrupt_of_one_rank_does_not_leave_the_other_waiting(at, model, ranks):
    rank, where = int(at[0]), at[2:]
    errors = ranks.errors(2, _interrupted, model, rank, where)
    assert type(errors[rank]) is KeyboardInterrupt
    assert type(errors[1 - rank]) is RanksFailedError
    assert errors[1 - rank].failures == {rank: "KeyboardInterrupt: "}


def _without_memory(place: Place) -> None:
    def fail(*_):
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(BroadcastingTorchSaveReader, "_room", fail)
        load(place)


def test_a_rank_without_memory_for_a_tensor_is_told_before_it_is_sent(model, ranks):
    errors = ranks.errors(2, _without_memory, model)
    assert all("none left" in str(error) for error in errors)


def _told(place: Place) -> tuple[list[tuple[str, int, int]], int]:
    rooms, most, original = weakref.WeakSet(), [], BroadcastingTorchSaveReader._room

    def room(*args):
        most.append(1 + len(rooms))
        rooms.add(found := original(*args))
        return found

    with pytest.MonkeyPatch.context() as patched, events.record(place.uri) as timeline:
        patched.setattr(BroadcastingTorchSaveReader, "_room", room)
        reader = load(place)
    received = 0 if reader.transferred is None else reader.transferred.nbytes
    return [(one.phase, one.rank, one.nbytes - received) for one in timeline.events], max(most)


def test_each_rank_tells_of_its_load_and_has_room_for_one_large_tensor_at_a_time(model, ranks):
    assert ranks(2, _told, model) == [([("load", 0, 0)], 1), ([("load", 1, 0)], 1)]
