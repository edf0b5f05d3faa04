"""How much memory a save or a load takes beside the state itself."""

import ctypes

import torch

import cloudckpt
from cloudckpt import Config
from support.forks import child

from .places import Place

MIB = 1024 * 1024
_SIDE = 4096  # an int32 square of 64 MiB
_BUDGET = 32 * MIB


def _square() -> torch.Tensor:
    return torch.arange(_SIDE * _SIDE, dtype=torch.int32).view(_SIDE, _SIDE)


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of the resident set is the present size from here on


def _growth(place: Place) -> dict[str, int]:
    """By how many bytes each step exceeds, at its peak, what was in memory before."""
    torch.set_num_threads(1)
    square, room, grown = _square(), _square().zero_(), {}

    def step(name: str, action, tensor: torch.Tensor, where: str) -> None:
        here = place.at(where)
        _forget_peak()
        before = _status("VmRSS")
        action({"t": tensor}, checkpoint_id=here.uri, config=here.config)
        grown[name] = _status("VmHWM") - before

    # first everything once and small, for what is allocated but once
    place.at("warm").save({"t": square[:64].t()})
    place.at("warm").load({"t": room[:64].t()})

    step("saving a contiguous tensor", cloudckpt.save, square, "plain")
    step("loading into a contiguous tensor", cloudckpt.load, room, "plain")
    assert torch.equal(room, square)
    step("saving a transposed tensor", cloudckpt.save, square.t(), "transposed")
    step("saving every second column", cloudckpt.save, square[:, ::2], "strided")
    room.zero_()
    step("loading into a transposed tensor", cloudckpt.load, room.t(), "plain")
    assert torch.equal(room, square.t())
    step("loading what was transposed", cloudckpt.load, room, "transposed")
    assert torch.equal(room, square.t())
    room.zero_()
    step("loading into every second column", cloudckpt.load, room[:, ::2], "strided")
    assert torch.equal(room[:, ::2], square[:, ::2])
    step("loading into another dtype", cloudckpt.load, room.view(torch.float32), "plain")
    assert torch.equal(room.view(torch.float32)[0], square[0].float())
    return grown


def test_memory_stays_within_the_budget_in_saves_and_loads_of_all_kinds(local):
    place = local.having(memory_budget=_BUDGET)
    with child(_growth, patience=250.0, place=place) as running:
        _, growth = running.wait()
    assert len(growth) == 8
    assert max(growth.values()) <= _BUDGET + 16 * MIB, {k: v // MIB for k, v in growth.items()}


def test_any_memory_budget_that_is_accepted_works(local):
    value = b"x" * 20_000
    local.save({"v": value})
    (info,) = local.reader().read_metadata().storage_data.values()
    aligned = -(-info.length // 64) * 64
    budget = 16 * (99 * aligned + info.length)  # a hundred of them fill a slab to its last byte
    config = Config(memory_budget=budget)
    state = {f"v{number}": value for number in range(150)}
    cloudckpt.save(state, checkpoint_id=local.uri, config=config)
    loaded = dict.fromkeys(state)
    cloudckpt.load(loaded, checkpoint_id=local.uri, config=config)
    assert loaded == state
