"""Cases that the machine has found, or that were found before there was one, made small."""

import pytest

from .cases import CHECKS, Case, Fault, Save, Segment
from .machine import carry_out
from .states import Component
from .values import Each, Own, Plain, Tensor, Value, numbers

_TWO = {"a0": Own((0,), Tensor((100,))), "a1": Own((1,), Tensor((100,)))}
_THREE = {"a": Plain(0), "b": Plain(0), "c": Plain(0)}

_OF_EACH = {
    "pos": Each(numbers(2)),
    "app": Component(
        {
            "random": Each(Value("random of torch")),
            "n": [Each({"w": Tensor((3,)), "none": Plain({})})],
        }
    ),
    "some": Own((1,), {"state": Each(Component({"v": Each(numbers(3))}))}),
}
_WAYS = ["save", "async thread", "async process", "manager", "adopted"]

_OWN = [numbers(10), numbers(20_000), numbers(30_000), numbers(10)]


def _case(world: int, *saves: Save) -> Case:
    return Case([Segment(world, list(saves))])


CASES = {
    "a list of one rank outgrows packing, and another rank's items stay where they were": _case(
        2, *(Save({**_TWO, "history": Own((0,), history)}) for history in _OWN)
    ),
    "a rank has no element of a tensor of a newer type, in a saving process": _case(
        2, Save({"a": Tensor((1,), "float8_e5m2", placed="rows")}, by="async process")
    ),
    "copies of all ranks, and those of some, are compared where a step is adopted": _case(
        4, Save({"some": Tensor((64,), placed="blocks"), "all": Plain(1)}, by="adopted")
    ),
    "a save that fails on one rank leaves what was there, and the next one works": _case(
        2,
        *(
            Save({**_TWO, "step": Plain(1)}, by=by, fault=fault)
            for by in ("save", "thread checkpointer")
            for fault in (None, Fault("unpicklable", 1), Fault("disk", 1, 1), None)
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_found_once_is_not_there_any_more(name, ranks, places):
    case = CASES[name]
    assert {save.checks for save in case.saves} == {CHECKS}
    assert carry_out(case, ranks, places(case.store)) == []


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 2)])
def test_values_of_each_rank_come_back_on_another_number_of_ranks(
    saved_by, loaded_by, ranks, places
):
    together = ("together",)
    saves = [Save(_OF_EACH, by=way, to=way, checks=together) for way in _WAYS]
    saves += [Save(_OF_EACH, to=to, incremental=True, checks=together) for to in ("first", "next")]
    segments = [Segment(saved_by, saves), Segment(loaded_by, [Save(_THREE, checks=together)])]
    assert carry_out(Case(segments), ranks, places("local")) == []
