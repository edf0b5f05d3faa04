"""What flattening loses, and what is believed of it."""

import enum
import json
import logging
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from cloudckpt.checkpoint.structure import Flat, Structure
from cloudckpt.errors import CheckpointCorruptError, KeyCollisionError

URI = "s3://bucket/run"
TENSOR = torch.ones(1)


def through_the_store(state):
    """The state as it is loaded: torch's flat names and paths, and what was noted beside them."""
    flat, paths = flatten_state_dict(state)
    structure = Structure.from_json(as_stored(Flat(state).structure()))
    return structure.nested(flat, paths, URI)


def as_stored(structure):
    return json.loads(json.dumps(structure.to_json()))


def shown(value):
    """Types of keys are seen in it; tensors are all one. The order of keys is not kept."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {shown(value[key])}" for key in value)) + "}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)


KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.sampled_from([TENSOR, None, 0, False, "", b"x", (), [], (TENSOR, [TENSOR]), ({1: {}},)])


def containers(children):
    dicts = st.lists(st.tuples(KEYS, children), max_size=4).map(
        # keys that read alike are refused
        lambda rows: dict({str(k): (k, v) for k, v in rows}.values())
    )
    return dicts | st.lists(children, max_size=3)


STATES = st.dictionaries(
    st.text(max_size=3), st.recursive(LEAVES, containers, max_leaves=12), max_size=4
)


def has_collision(state):
    try:
        flatten_state_dict(state)
    except ValueError:
        return True
    return False


@settings(max_examples=300)
@given(STATES)
def test_a_state_is_flattened_as_by_torch_and_comes_back_as_it_was(state):
    if has_collision(state):
        with pytest.raises(KeyCollisionError):
            Flat(state)
        return
    flat = Flat(state)
    values, paths = flatten_state_dict(state)
    assert (list(flat.values), flat.paths) == (list(values), paths)
    assert all(flat.values[name] is value for name, value in values.items())
    assert shown(through_the_store(state)) == shown(state)


def test_a_key_that_equals_a_plain_one_comes_back_as_that():
    numpy = pytest.importorskip("numpy")

    class Step(enum.IntEnum):
        WARM = 7

    class Name(str):
        __slots__ = ()

    state = {"a": {Step.WARM: 1, numpy.int64(3): 2, numpy.float64(0.5): 3, Name("n"): 4}}
    assert through_the_store(state) == {"a": {7: 1, 3: 2, 0.5: 3, "n": 4}} == state


@pytest.mark.parametrize(
    "key", [(1, 2), frozenset(), torch.float32, float("nan"), 1.5j, b"x", object]
)
def test_a_key_that_cannot_be_restored_is_told_once_by_its_name(key, caplog):
    state = {"told": {str(id(key)): {key: TENSOR}}}
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        structure = Flat(state, URI).structure()
        Flat(state, URI).structure()
    assert not structure
    (message,) = caplog.messages
    assert URI in message
    assert f"{key!r}" in message
    assert f"['told']['{id(key)}']" in message
    assert "without a state dict" in message


@pytest.mark.parametrize(
    "state",
    [
        {1: 1, "1": 2},
        {"a": {1: {"x": 1}, "1": {"y": 2}}},
        {"a": {1: {}, "1": 2}},
        {"a": [{None: {}, "None": {}}]},
        {"a": {b"x": 1, "b'x'": 2}},
        {"a": {"1": {}, 1: TENSOR}},
    ],
)
def test_keys_of_one_dict_that_read_alike_are_refused(state):
    with pytest.raises(KeyCollisionError, match="same name") as caught:
        Flat(state, URI).structure()
    assert isinstance(caught.value, ValueError)
    assert caught.value.uri == URI


@pytest.mark.parametrize(
    ("of_ranks", "whole"),
    [
        ([{"a": {0: {}, 1: 1}}, {"a": {2: {}}, "b": {}}], {"a": {0: {}, 1: 1, 2: {}}, "b": {}}),
        ([{"a": {}, "b": {}}, {"a": 1, "b": {"c": 2}}], {"a": 1, "b": {"c": 2}}),
    ],
)
def test_what_several_ranks_have_is_all_there(of_ranks, whole):
    """Also what is empty on one of them only."""
    merged = Structure.merged([Flat(state).structure() for state in of_ranks], URI)
    assert merged.nested(*flatten_state_dict(whole), URI) == whole


def test_ranks_that_contradict_each_other_are_told(caplog):
    parts = [Structure(keys={("a", "1"): 1}), Structure(keys={("a", "1"): 2})]
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        merged = Structure.merged(parts, URI)
    assert "['a']" in caplog.text
    assert merged.keys == parts[0].keys


# what is believed

GOOD = {"keys": [[["a", "1"], 1]], "empty": [["b"]]}


KEYS_THAT_ARE_NONE = [1, [["a"]], ["a", []], [[-1], []], [[True], []], [[1.0], []], [[], 1]]
KEYS_THAT_ARE_NONE += [[["a"] * 1001, []], [["a", "1"], {}], [["a", "1"], ["float", "1.5"]]]


@pytest.mark.parametrize(
    "document",
    [
        *([], "x", {}, {"keys": []}, {**GOOD, "more": 1}, {**GOOD, "empty": 7}),
        *({**GOOD, "keys": [key]} for key in KEYS_THAT_ARE_NONE),
        *({**GOOD, "empty": [path]} for path in ([], [-1], [True], 0)),
    ],
    ids=str,
)
def test_what_is_no_structure_is_refused(document):
    deep = {**GOOD, "empty": [["b"] * 1000]}  # torch flattens some 490 levels
    assert Structure.from_json(deep) == Structure({("a", "1"): 1}, (("b",) * 1000,))
    with pytest.raises((ValueError, TypeError)):  # the commit object tells it as damage
        Structure.from_json(document)


@pytest.mark.parametrize(
    ("paths", "structure"),
    [
        ({"a": ("a",), "b": ("a", "b")}, Structure()),
        ({"b": ("a",), "a": ("a", "b")}, Structure()),
        ({"a": ("a",), "b": ("a",)}, Structure()),
        ({"a": ("x", 0), "b": ("x", "y")}, Structure()),
        ({"a": (0,), "b": (1,)}, Structure()),
        ({"a": (), "b": ("b",)}, Structure()),
        ({"a": ("x", -1), "b": ("b",)}, Structure()),
        ({"a": ("x", 10**12), "b": ("b",)}, Structure()),
        ({"a": ("x", 10**6), "b": ("y", 10**6)}, Structure()),
        ({"a": ("x",) * 2000, "b": ("b",)}, Structure()),
        ({"a": "a", "b": ("b",)}, Structure()),
        ({"a": 7, "b": ("b",)}, Structure()),
        ([("a",), ("b",)], Structure()),
        ({"a": ("x", "1"), "b": ("x", "2")}, Structure({("x", "1"): 3, ("x", "2"): 3})),
        ({"a": ("x", "1"), "b": ("b",)}, Structure(empty=(("x", 10**12),))),
        ({"a": ("a",), "b": ("b",)}, Structure(empty=(("x", 10**12),))),
    ],
)
def test_paths_that_make_no_sense_are_told_as_damage(paths, structure):
    with pytest.raises(CheckpointCorruptError) as caught:
        structure.nested({"a": 1, "b": 2}, paths, URI)
    assert caught.value.uri == URI


def test_deep_paths_take_memory_in_proportion_to_their_length():
    paths = {str(number): (str(number), *("x",) * 600) for number in range(50)}
    tracemalloc.start()
    try:
        Structure(empty=(("e",),)).nested(dict.fromkeys(paths, 1), paths, URI)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
