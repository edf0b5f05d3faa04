"""What is around the tensors of a staged copy: made anew, as deep as it goes."""

import collections.abc
import threading
import types
from collections import OrderedDict, namedtuple

import pytest

from cloudckpt.errors import StagingError
from dcp.values import assert_same, numbered

Point = namedtuple("Point", "x y")


class ReadOnly(collections.abc.Mapping):
    """A mapping that can't be copied."""

    def __init__(self, content):
        self._content, self._lock = content, threading.Lock()

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


@pytest.mark.parametrize("kind", [types.MappingProxyType, ReadOnly])
def test_a_mapping_that_cannot_be_copied_becomes_the_dict_that_it_is_saved_as(stager, kind):
    shared, inner = numbered(5), {"n": [1]}
    state = {"shared": shared, "m": kind({"t": numbered(3), "shared": shared, "d": inner})}
    state["inner"] = inner
    staged = stager.stage(state)
    state["m"]["t"].fill_(-1)
    inner["n"].append(2)
    assert type(staged["m"]) is dict
    assert_same(staged["m"], {"t": numbered(3), "shared": numbered(5), "d": {"n": [1]}})
    assert staged["m"]["shared"] is staged["shared"]
    assert staged["m"]["d"] is staged["inner"]


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"lock": threading.Lock()}, "lock"),
        ({"t": numbered(3), "a": {"b": [1, {"gen": (n for n in "x")}]}}, "a.b.1.gen"),
        ({"m": ReadOnly({"t": numbered(3), "lock": threading.Lock()})}, "m.lock"),
        ({"model": OrderedDict(fine=1, bad=Point(1, threading.Lock()))}, "model.bad"),
    ],
    ids=["at the top", "deep", "in a mapping", "in a named tuple"],
)
def test_a_value_that_cannot_be_copied_is_named(stager, state, path):
    with pytest.raises(StagingError, match="can't be copied") as caught:
        stager.stage(state)
    assert caught.value.item == path
    assert caught.value.cause is not None
    assert_same(stager.stage({"t": numbered(3)}), {"t": numbered(3)})  # its memory is free again
