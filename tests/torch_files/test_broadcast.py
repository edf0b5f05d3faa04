"""Loading by broadcast: whatever befalls one rank, every rank is told, and none is left waiting."""

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


def load(place: Place, *, group=None, reader_group=None, **options):
    state = {"t": torch.zeros(2200, 2200), "u": torch.zeros(4, 5)}
    reader = BroadcastingTorchSaveReader(
        place.uri, process_group=reader_group, config=place.having(**options).config
    )
    cloudckpt.load(
        state, storage_reader=reader, planner=DynamicMetaLoadPlanner(), process_group=group
    )
    assert torch.equal(state["t"], numbered(2200, 2200))
    assert torch.equal(state["u"], numbered(4, 5))
    return reader


def _without_group(place: Place, of: tuple[int, ...]) -> None:
    group = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank < 2:
        load(place, group=group, reader_group=None if rank in of else group)


@pytest.mark.parametrize("of", [(0, 1), (0,), (1,)])
def test_a_reader_of_another_group_than_the_load_is_told_on_every_rank(of, model, ranks):
    errors = ranks.errors(3, _without_group, model, of)
    assert [type(error) for error in errors] == [ConfigError, ConfigError, type(None)]
    assert "process_group" in str(errors[0])


def _interrupted(place: Place, rank: int, where: str) -> None:
    """Has an interrupt come on one rank, with the second tensor."""
    module, name = {
        "room": (BroadcastingTorchSaveReader, "_room"),
        "telling": (broadcast.dist, "all_reduce"),
        "waiting": (broadcast.dist, "broadcast"),
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


@pytest.mark.parametrize("at", ["0 room", "1 telling", "0 waiting", "1 waiting", "1 copying"])
def test_an_interrupt_of_one_rank_does_not_leave_the_other_waiting(at, model, ranks):
    rank, where = int(at[0]), at[2:]
    errors = ranks.errors(2, _interrupted, model, rank, where)
    assert type(errors[rank]) is KeyboardInterrupt
    assert type(errors[1 - rank]) is RanksFailedError
    assert "KeyboardInterrupt" in str(errors[1 - rank])


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


def _told(place: Place) -> list[tuple[str, int, int]]:
    with events.record(place.uri) as timeline:
        reader = load(place)
    received = 0 if reader.transferred is None else reader.transferred.nbytes
    return [(event.phase, event.rank, event.nbytes - received) for event in timeline.events]


def test_each_rank_tells_of_its_load(model, ranks):
    assert ranks(2, _told, model) == [[("load", 0, 0)], [("load", 1, 0)]]
