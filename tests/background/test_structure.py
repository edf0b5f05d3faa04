"""What is around the tensors of a staged copy: made anew, as deep as it goes."""

import collections.abc
import io
import threading
import types
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from cloudckpt.errors import StagingError
from dcp.values import assert_same, numbered

Point = namedtuple("Point", "x y")


def test_containers_keep_their_types_and_order(stager):
    state = {
        "ordered": OrderedDict([("z", numbered(2)), ("a", 1)]),
        "tuple": (numbered(3), "x", None, 1 + 2j, b"bytes", torch.float16, torch.Size([2])),
        "named": Point(numbered(4), [1, {"deep": numbered(5)}]),
        "empty": [{}, [], ()],
        3: "a key that is no text",
    }
    staged = stager.stage(state)
    assert_same(staged, state)
    assert type(staged["named"]) is Point
    assert list(staged["ordered"]) == ["z", "a"]


def test_a_dict_of_the_users_is_copied_as_what_it_is(stager):
    counts = collections.defaultdict(list, {"a": [numbered(3)]})
    staged = stager.stage({"counts": counts})["counts"]
    counts["a"][0].fill_(-1)
    assert type(staged) is collections.defaultdict
    assert staged["b"] == []
    assert_same(staged["a"][0], numbered(3))


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


def test_one_object_in_two_places_stays_one_object(stager):
    shared, tensor = {"lr": [0.1]}, numbered(2)
    array = np.arange(3)
    state = {"a": shared, "b": [shared], "c": tensor, "d": (tensor,), "e": array, "f": [array]}
    staged = stager.stage(state)
    assert staged["a"] is staged["b"][0]
    assert staged["c"] is staged["d"][0]
    assert staged["e"] is staged["f"][0]
    assert staged["a"] is not shared
    assert staged["e"] is not array


def test_a_structure_that_holds_itself_is_copied(stager):
    cyclic: dict = {"t": numbered(3)}
    cyclic["self"], cyclic["list"] = cyclic, [cyclic]
    staged = stager.stage({"c": cyclic})["c"]
    assert staged["self"] is staged
    assert staged["list"][0] is staged


def test_mutable_values_are_copied_deeply(stager):
    class Counter:
        def __init__(self) -> None:
            self.seen = {"n": 1}

    counter, array, file = Counter(), np.arange(4), io.BytesIO(b"abc")
    file.seek(2)
    state = {"counter": counter, "array": array, "file": file, "set": {1}, "raw": bytearray(b"x")}
    staged = stager.stage(state)
    counter.seen["n"], array[:] = 2, 9
    file.write(b"defg")
    state["set"].add(2)
    state["raw"][0] = 0
    assert staged["counter"].seen == {"n": 1}
    assert staged["array"].tolist() == [0, 1, 2, 3]
    assert staged["file"].getvalue() == b"abc"
    assert (staged["set"], staged["raw"]) == ({1}, bytearray(b"x"))


def test_what_the_trainer_changes_later_never_reaches_the_copy(stager):
    inner = [numbered(3)]
    state = {"t": numbered(70_000), "small": numbered(5), "d": {"n": 1, "l": inner}}
    staged = stager.stage(state)
    for tensor in (state["t"], state["small"], inner[0]):
        tensor.fill_(-1)
    inner.append(1)
    state["d"]["n"] = 2
    del state["small"]
    expected = {"t": numbered(70_000), "small": numbered(5), "d": {"n": 1, "l": [numbered(3)]}}
    assert_same(staged, expected)


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
