"""Loading by broadcast: whatever befalls one rank, every rank is told, and none is left waiting."""

import weakref

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import events
from cloudckpt.errors import ConfigError, KeyCollisionError, RanksFailedError
from cloudckpt.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from cloudckpt.torch_files import broadcast
from dcp.places import Place
from dcp.values import numbered


@pytest.fixture(scope="module")
def model(places) -> Place:
    """A file of several tensors."""
    folder = places("local")
    content = {"t": numbered(2200, 2200), "u": numbered(4, 5), "v": numbered(3)}
    torch.save(content, f"{folder.path}/model.pt")
    return folder.at("model.pt")


def load(place: Place, *, group=None, **options):
    state = {"t": torch.zeros(2200, 2200), "u": torch.zeros(4, 5), "v": torch.zeros(3)}
    reader = BroadcastingTorchSaveReader(place.uri, config=place.having(**options).config)
    cloudckpt.load(
        state, storage_reader=reader, planner=DynamicMetaLoadPlanner(), process_group=group
    )
    assert torch.equal(state["t"], numbered(2200, 2200))
    assert torch.equal(state["u"], numbered(4, 5))
    assert torch.equal(state["v"], numbered(3))
    return reader


def _of_some(place: Place) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        load(place, group=group)


def test_a_load_of_some_ranks_is_refused_on_each_of_them(model, ranks):
    errors = ranks.errors(3, _of_some, model)
    assert [type(error) for error in errors] == [ConfigError, ConfigError, type(None)]


def _sharing(place: Place, *names: str) -> None:
    room, own = torch.zeros(5), torch.zeros(4)
    views = {"u": room[:4], "v": room[1:], "w": own if dist.get_rank() else room[:4]}
    reader = BroadcastingTorchSaveReader(place.uri, config=place.config)
    state = {name: views[name] for name in names}
    cloudckpt.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner())


@pytest.mark.parametrize("names", ["uv", "vu", "wu"])
def test_tensors_of_one_memory_refuse_different_values_on_each_rank(names, local, ranks):
    content = {"u": torch.ones(4), "v": torch.ones(4), "w": numbered(4)}
    torch.save(content, f"{local.path}/model.pt")
    raised = ranks.errors(2, _sharing, local.at("model.pt"), *names)
    assert [*map(type, raised)] == [KeyCollisionError if "w" in names else type(None)] * 2


def _failing(place: Place, at: str, error: type[BaseException]) -> None:
    """Has an error come on one rank, with the second tensor."""
    rank, _, where = at.partition(" ")
    module = BroadcastingTorchSaveReader if where == "_room" else broadcast
    original, calls = getattr(module, where), []

    def second(*args, **options):
        calls.append(1)
        found = original(*args, **options)
        if dist.get_rank() == int(rank) and len(calls) == 2:
            raise error("of one rank")
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, where, second)
        load(place)


@pytest.mark.parametrize("at", ["0 _room", "1 copy_into"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_of_one_rank_does_not_leave_the_other_waiting(at, error, model, ranks):
    errors = ranks.errors(2, _failing, model, at, error)
    rank = int(at[0])
    assert type(errors[rank]) is (error if error is KeyboardInterrupt else RanksFailedError)
    assert type(errors[1 - rank]) is RanksFailedError
    assert errors[1 - rank].failures == {rank: f"{error.__name__}: of one rank"}


def _told(place: Place) -> tuple[list[tuple[str, int, int]], list[int]]:
    rooms, rooms_at_once, original = weakref.WeakSet(), [], BroadcastingTorchSaveReader._room

    def room(*args):
        rooms_at_once.append(1 + len(rooms))
        rooms.add(found := original(*args))
        return found

    with pytest.MonkeyPatch.context() as patched, events.record(place.uri) as timeline:
        patched.setattr(BroadcastingTorchSaveReader, "_room", room)
        reader = load(place)
    received = 0 if reader.transferred is None else reader.transferred.nbytes
    return [(one.phase, one.rank, one.nbytes - received) for one in timeline.events], rooms_at_once


def test_each_rank_tells_of_its_load_and_has_room_for_a_large_tensor_or_small_ones(model, ranks):
    rooms = [1, 1, 2]  # the small ones are broadcast together
    assert ranks(2, _told, model) == [([("load", rank, 0)], rooms) for rank in range(2)]
