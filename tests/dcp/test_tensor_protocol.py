"""A tensor that declares by attributes which parts of a larger one it holds is saved as these.

It is torch's protocol ``CheckpointableTensor``. States, and how they are spread over the ranks, are
drawn: parts of any size and place, several in one tensor, on some of the ranks only.
"""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
import cloudckpt.hf
from cloudckpt import CheckpointManager
from cloudckpt.checkpointer import CheckpointerConfig, close_async_savers
from cloudckpt.dcp import save_plan
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import IncompleteSaveError, KeyCollisionError, UnsupportedTensorError

from .places import Place
from .values import assert_same, numbered

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
of_protocol = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch has the protocol from 2.14 on"
)

Box = tuple[tuple[int, int], ...]
"""By dimension, where a part begins and how long it is."""


def declaring(tensor, shape, offsets, local_offsets, sizes):
    for name, value in zip(FIELDS, (shape, offsets, local_offsets, sizes), strict=True):
        setattr(tensor, name, value)
    return tensor


def _of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in box)]


def holding(full: torch.Tensor, boxes: Sequence[Box], margin: int = 0, kind=tuple) -> torch.Tensor:
    """A tensor with parts of a larger one, each below the one before.

    Args:
        full: The larger one.
        boxes: The parts.
        margin: How many elements are around each that are no part of anything.
        kind: Of the sequences in its attributes.
    """
    rows = sum(box[0][1] + margin for box in boxes) + margin
    others = [max([box[dim][1] for box in boxes], default=0) for dim in range(1, full.dim())]
    made = torch.full((rows, *(other + 2 * margin for other in others)), 77, dtype=full.dtype)
    row, places = margin, []
    for box in boxes:
        places.append(kind([row, *[margin] * len(others)]))
        sizes = [length for _, length in box]
        _of(made, tuple(zip(places[-1], sizes, strict=True))).copy_(_of(full, box))
        row += sizes[0] + margin
    return declaring(
        made,
        kind(full.shape),
        kind([kind([start for start, _ in box]) for box in boxes]),
        kind(places),
        kind([kind([length for _, length in box]) for box in boxes]),
    )


def _boxes(draw: random.Random, shape: Sequence[int]) -> list[Box]:
    """Parts that make up a tensor, in a grid."""
    cuts = []
    for length in shape:
        inner = draw.sample(range(1, length), min(length - 1, draw.randrange(3)))
        at = [0, *sorted(inner), length]
        cuts.append([(first, stop - first) for first, stop in itertools.pairwise(at)])
    return list(itertools.product(*cuts))


FULL = {
    "wide": numbered(7, 9, first=1),
    "vector": numbered(23, first=100).to(torch.bfloat16),
    "cube": numbered(4, 5, 3, dtype=torch.int64, first=200),
    "large": numbered(300, 257, first=300),
}


def _full(step: int) -> dict:
    return {name: tensor + step for name, tensor in FULL.items()}


def spread(step: int, seed: int) -> dict:
    """What this rank has of a state; all have the same seed.

    Args:
        step: Tells the values of one save from those of others.
        seed: Of the way in which it is spread.
    """
    draw, rank, own = random.Random(seed), dist.get_rank(), {}
    for name, full in _full(step).items():
        by_rank: list[list[Box]] = [[] for _ in range(dist.get_world_size())]
        for box in _boxes(draw, full.shape):
            draw.choice(by_rank).append(box)
            if draw.random() < 0.2:  # a part that several ranks have
                other = draw.choice(by_rank)
                other.extend([box] if box not in other else [])
        tensor = holding(full, by_rank[rank], draw.randrange(3), draw.choice([tuple, list]))
        is_parameter, is_left_out = draw.random() < 0.3, draw.random() < 0.5
        if is_parameter and full.is_floating_point():
            values = vars(tensor)
            tensor = torch.nn.Parameter(tensor)
            vars(tensor).update(values)
        if by_rank[rank] or not is_left_out:
            own[name] = tensor
    return {"model": own, "step": step}


def _blank(state: dict) -> dict:
    """Room for what it holds, with its attributes."""
    room = {name: torch.full_like(tensor, 77) for name, tensor in state["model"].items()}
    for name, tensor in state["model"].items():
        vars(room[name]).update(vars(tensor))
    return {"model": room, "step": None}


def _check(step: int, load) -> None:
    """Whether what was saved can be loaded whole, and spread in another way."""
    whole = {"model": _full(-1), "step": None}
    load(whole)
    assert_same(whole, {"model": _full(step), "step": step})
    for seed in (step, step + 1000):
        expected = spread(step, seed)
        found = _blank(expected)
        load(found)
        for name, tensor in expected["model"].items():
            assert_same(found["model"][name].detach(), tensor.detach(), name)


def _spoil(state: dict) -> None:
    """Changes everything that a save must not look at once it has returned."""
    for tensor in state["model"].values():
        with torch.no_grad():
            tensor.fill_(55)
        for name in FIELDS:
            if isinstance(getattr(tensor, name), list):
                getattr(tensor, name).clear()


def _by_save(place: Place, step: int, state: dict) -> Place:
    place.save(state)
    return place


def _by_incremental_save(place: Place, step: int, state: dict) -> Place:
    place = place.at(f"step-{step}").having(incremental=True)
    place.save(state)
    return place


def _by_manager(place: Place, step: int, state: dict) -> Place:
    options = CheckpointerConfig(config=place.having(incremental=True).config)
    with CheckpointManager(place.uri, checkpointer=options) as manager:
        assert manager.save(step, state)
        _spoil(state)
    return place.at(f"step-{step}")


def _by_torch(place: Place, step: int, state: dict) -> Place:
    dcp.save(state, checkpoint_id=place.path)
    return place


ROADS = {
    "save": _by_save,
    "incremental": _by_incremental_save,
    "manager": _by_manager,
    "torch": _by_torch,
}


def _saved_by(road: str, place: Place, seeds: Sequence[int]) -> None:
    save_plan._plans.clear()
    try:
        for step, seed in enumerate(seeds, 1):
            there = ROADS[road](place, step, spread(step, seed))
            dist.barrier()
            _check(step, there.load)
            reader = FileSystemReader(there.path)
            if road != "incremental" and road != "manager":  # these refer to other folders
                _check(step, lambda state, reader=reader: dcp.load(state, storage_reader=reader))
            dist.barrier()
    finally:
        close_async_savers()


@of_protocol
@pytest.mark.parametrize("road", ROADS)
def test_parts_come_back_wherever_they_move_between_saves(road, ranks, local):
    seeds = [11, 11, 12, 13] if road != "torch" else [11]
    ranks(3, _saved_by, road, local, seeds)


def _loaded_without_memory(place: Place) -> None:
    """As models that are made on the meta device: torch allocates the tensors."""
    place.save(spread(1, 3))
    expected = spread(1, 4)["model"]
    found = {}
    for name, tensor in expected.items():
        found[name] = tensor.to("meta")
        vars(found[name]).update(vars(tensor))
    place.load({"model": found})
    for name, tensor in expected.items():
        for place_, sizes in zip(tensor.local_offsets, tensor.local_sizes, strict=True):
            box = tuple(zip(place_, sizes, strict=True))
            assert_same(_of(found[name], box).detach(), _of(tensor, box).detach(), name)


@of_protocol
def test_parts_are_loaded_into_tensors_of_the_meta_device(ranks, local):
    ranks(2, _loaded_without_memory, local)


def _good() -> torch.Tensor:
    first = 2 * dist.get_rank()
    return holding(numbered(4, 4), [((first, 2), (0, 4))])


INVALID = {
    "fewer local offsets": {"local_offsets": ()},
    "more sizes": {"local_sizes": ((2, 4), (2, 4))},
    "offsets of another number of dimensions": {"global_offsets": ((0,),)},
    "a shape of another number of dimensions": {"global_shape": (4, 4, 1)},
    "beyond the whole": {"global_offsets": ((3, 0),)},
    "beyond the tensor": {"local_offsets": ((1, 0),)},
    "before the tensor": {"local_offsets": ((-1, 0),)},
    "nothing": {"global_offsets": None},
    "no whole numbers": {"local_offsets": ((0.0, 0.0),)},
}


def _refused(place: Place, attributes: dict) -> list:
    tensor, told = _good(), []
    cloudckpt.save({"m": {"w": tensor}}, checkpoint_id=place.at("good").uri, config=place.config)
    if dist.get_rank() == 1:
        vars(tensor).update(attributes)
    state, options = {"m": {"w": tensor}}, {"config": place.config}
    calls = [
        lambda: cloudckpt.save(state, checkpoint_id=place.at("a").uri, **options),
        *(
            lambda kind=kind: cloudckpt.async_save(
                state, checkpoint_id=place.at("b").uri, async_checkpointer_type=kind, **options
            ).result()
            for kind in AsyncCheckpointerType
        ),
        lambda: cloudckpt.load(state, checkpoint_id=place.at("good").uri, **options),
    ]
    for call in calls:
        with pytest.raises(UnsupportedTensorError) as caught:
            call()
        told.append(caught.value.item)
    close_async_savers()
    return told


@of_protocol
@pytest.mark.parametrize("attributes", INVALID)
def test_invalid_attributes_of_one_rank_are_an_error_on_all_before_anything_is_sent(
    attributes, ranks, local
):
    assert ranks(2, _refused, local, INVALID[attributes]) == [["m.w"] * 4] * 2
    assert {name.split("/")[0] for name in local.names()} == {"good"}


UNLIKE = {
    "parts that overlap": (lambda full: holding(full, [((1, 3), (0, 4))]), IncompleteSaveError),
    "a gap": (lambda full: holding(full, [((3, 1), (0, 4))]), IncompleteSaveError),
    "all of it": (torch.clone, IncompleteSaveError),
    "a tensor of another shape": (lambda full: full[2:].clone(), KeyCollisionError),
    "a part of another": (
        lambda full: declaring(full[2:].clone(), (5, 4), ((2, 0),), ((0, 0),), ((2, 4),)),
        KeyCollisionError,
    ),
}


def _not_fitting(place: Place, unlike: str) -> None:
    make, error = UNLIKE[unlike]
    state = {"w": _good() if dist.get_rank() == 0 else make(numbered(4, 4))}
    with pytest.raises(error) as caught:
        place.save(state)
    assert caught.value.item == "w"


@of_protocol
@pytest.mark.parametrize("unlike", UNLIKE)
def test_parts_that_do_not_fit_those_of_another_rank_are_refused(unlike, ranks, local):
    ranks(2, _not_fitting, local, unlike)
    assert local.names() == []


def test_a_tensor_with_attributes_is_planned_as_this_torch_plans_it():
    """Before 2.14, that is as one without."""
    state = {"w": holding(numbered(7, 9), [((1, 2), (0, 4)), ((3, 4), (4, 5))], margin=2)}
    plans = []
    for planner in (CloudSavePlanner(), DefaultSavePlanner()):
        planner.set_up_planner(state, None, True)
        plans.append(planner.create_local_plan())
    assert plans[0] == plans[1]
    assert len(plans[0].items) == (2 if hasattr(dcp, "CheckpointableTensor") else 1)
