"""Values beyond those that torch allows: they come back as they were, and nothing else gets in."""

import argparse
import collections
import copyreg
import dataclasses
import datetime
import fractions
import io
import pathlib
import pickle
import resource
import sys
import warnings

import numpy
import pytest
import torch

from cloudckpt.checkpoint.values import load_item, load_plain, load_tensor
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UntrustedPickleError
from support.pickles import Call, containing, data_pkl, saved

URI = "s3://bucket/run"
REFUSED = (UntrustedPickleError, CheckpointCorruptError)


def loaded(data):
    return load_plain(io.BytesIO(data))


def assert_same(found, expected):
    """Equal and of the same types, also within arrays."""
    assert type(found) is type(expected)
    if isinstance(expected, numpy.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.flags.f_contiguous == expected.flags.f_contiguous
        assert found.flags.writeable
        assert_same(found.tolist(), expected.tolist())
    elif isinstance(expected, io.BytesIO):
        assert (found.getvalue(), found.tell()) == (expected.getvalue(), expected.tell())
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found), list(expected))
        assert_same(list(found.values()), list(expected.values()))
    else:
        assert found == expected or (found != found and expected != expected)  # NaT


CODES = ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
CODES += ["longdouble", "clongdouble", "S5", "U5", "V5"]
CODES += ["M8[ns]", "M8[25s]", "M8[D]", "m8[us]", "m8", "M8"]
STRUCTURES = [
    [("name", "U3"), ("value", ">f8")],
    [("inner", [("a", "i4"), ("b", "M8[s]")]), ("many", "f4", (2, 3))],
    {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [3, 8], "itemsize": 32},
    numpy.dtype([("a", "i1"), ("b", "f8")], align=True),
]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("code", CODES)
def test_arrays_and_scalars_of_all_types_come_back(code, order):
    kind = numpy.dtype(code).newbyteorder(order)
    for shape in [(), (3,), (2, 3), (0, 2)]:
        array = numpy.arange(6).astype("u1").astype("S5" if code == "V5" else "i8")
        array = array[: int(numpy.prod(shape))].astype(kind).reshape(shape)
        assert_same(loaded(saved(array)), array)
        assert_same(loaded(saved([numpy.asfortranarray(array)])), [numpy.asfortranarray(array)])
        if array.size:
            assert_same(loaded(saved(array.flat[0])), array.flat[0])
    assert_same(loaded(saved({"dtype": kind})), {"dtype": kind})


UTC = datetime.timezone.utc
ARRAY, KIND = numpy.arange(3), numpy.dtype("f4")
READ = io.BytesIO(b"abc")
READ.seek(2)
VALUES = [
    pathlib.Path("/a/b"),
    pathlib.Path(),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("c:/x/y"),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999999),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "X")),
    datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=UTC),
    datetime.date(1, 1, 1),
    datetime.time(1, 2, 3, 4),
    datetime.time(1, tzinfo=UTC),
    datetime.timedelta(-3, 4, 5),
    UTC,
    *(READ, io.BytesIO(b"abc"), io.BytesIO(), b"", b"abc"),
    *(frozenset({1, "a"}), frozenset()),
    {"tuple": (1, (ARRAY, [ARRAY])), "tensor": torch.arange(3)},
    {"key": ({KIND: ARRAY, pathlib.PurePath("a"): 1},), "class": [numpy.ndarray]},
    collections.OrderedDict(a=ARRAY, b={numpy.int64(3), pathlib.PurePath("a")}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_of_the_standard_library_come_back(value):
    before = torch.serialization.get_safe_globals()
    assert_same(loaded(saved(value)), value)
    assert torch.serialization.get_safe_globals() == before
    item = load_item(saved({"x": [value]}), "item", URI, map_location=None)
    assert_same(item, {"x": [value]})


def test_what_is_shared_or_holds_itself_comes_back_so():
    value = [ARRAY, ARRAY]
    value.append(value)
    found = loaded(saved(value))
    assert found[2] is found
    assert found[0] is found[1]
    assert_same(found[0], ARRAY)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_all_versions_of_python_come_back(module):
    data = containing(b"\x80\x02c" + module.encode() + b"\nPosixPath\nX\x01\x00\x00\x00a\x85R.")
    assert load_item(data, "item", URI, map_location=None) == pathlib.PosixPath("a")


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_of_all_versions_of_numpy_come_back(module):
    pickled = data_pkl(saved(ARRAY))
    for name in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        pickled = pickled.replace(b"c" + name + b"\n", b"c" + module + b"\n")
    assert_same(loaded(containing(pickled)), ARRAY)


@dataclasses.dataclass(slots=True)
class Slots:
    a: int


class Dict(dict):
    """A dict with attributes, as of many configurations."""


class List(list):
    pass


USERS = [argparse.Namespace(a=1), Slots(1), Dict(a=1), List([1])]


@pytest.mark.parametrize("value", USERS, ids=lambda value: type(value).__name__)
def test_what_the_user_allows_is_allowed_beside_it(value):
    data = saved([ARRAY, value])
    with pytest.raises(UntrustedPickleError, match=type(value).__name__):
        load_item(data, "item", URI)
    with torch.serialization.safe_globals([type(value)]):
        array, found = loaded(data)
    assert_same(array, ARRAY)
    assert found == value


def test_numpy_allowed_by_the_user_goes_its_own_way():
    titled = numpy.zeros(2, {"names": ["a"], "formats": ["i4"], "titles": ["A"]})
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        loaded(saved(titled))
    reconstruct = titled.__reduce__()[0]
    allowed = [reconstruct, numpy.ndarray, numpy.dtype, type(titled.dtype), type(numpy.dtype("i4"))]
    with torch.serialization.safe_globals(allowed):
        assert loaded(saved(titled)).dtype == titled.dtype


class OfTheScript:
    """A class of the script that trains."""


def test_a_class_of_the_script_is_the_same_in_its_saving_process(monkeypatch):
    """There, Python calls the script ``__mp_main__``."""
    monkeypatch.setattr(OfTheScript, "__module__", "__mp_main__")
    monkeypatch.setattr(sys.modules["__mp_main__"], "OfTheScript", OfTheScript, raising=False)
    data = saved({"kept": OfTheScript()})
    monkeypatch.setattr(OfTheScript, "__module__", "__main__")
    with pytest.raises(UntrustedPickleError, match=r"__main__\.OfTheScript") as caught:
        load_item(data, "item", URI)
    assert "__mp_main__" not in str(caught.value)
    with torch.serialization.safe_globals([OfTheScript]):
        loaded = load_item(data, "item", URI)
    assert type(loaded["kept"]) is OfTheScript


def test_tensors_of_a_device_that_is_not_here_are_no_damage(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        data = saved((torch.ones(2),))
    if torch.cuda.is_available():
        pytest.skip("the device is here")
    with pytest.raises(CheckpointError, match="device") as caught:
        load_item(data, "item", URI, map_location=None)
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert torch.equal(load_item(data, "item", URI)[0], torch.ones(2))


@pytest.mark.parametrize("usual", [True, False])
def test_items_are_read_whatever_is_said_of_files_and_warnings(monkeypatch, usual):
    load, tensor = torch.load, torch.randn(3, 4).t()

    def warn(*arguments, **options):
        warnings.warn("torch does this otherwise soon", FutureWarning, stacklevel=2)
        return load(*arguments, **options)

    if not usual:
        monkeypatch.setattr(torch, "load", warn)
    with torch.utils.serialization.config.patch("load.mmap", True), warnings.catch_warnings():
        warnings.simplefilter("error")
        load_item(saved({"step": 1}), "item", URI)
        assert torch.equal(load_tensor(saved(tensor), "w", URI, trust=False), tensor)
        with pytest.raises(REFUSED):
            load_item(b"damaged", "item", URI)


@pytest.mark.parametrize(
    ("value", "trust"),
    [(7, False), ({"w": torch.ones(3)}, False), (fractions.Fraction(1, 2), True)],
)
def test_what_is_no_tensor_is_refused(value, trust):
    with pytest.raises(CheckpointCorruptError, match="describes it as a tensor") as caught:
        load_tensor(saved(value), "w", URI, trust=trust)
    assert (caught.value.item, caught.value.uri) == ("w", URI)


@pytest.mark.parametrize("data", [pickle.dumps(7), b"", b"PK\3\4", b"text", saved(7)[:-30]])
def test_what_is_no_item_is_refused(data):
    with pytest.raises(REFUSED):
        load_item(data, "item", URI)


# ---- what does not get in


@pytest.mark.parametrize(
    "array",
    [
        *(numpy.zeros(3, code) for code in STRUCTURES),
        numpy.zeros(2, numpy.dtype(">f8", metadata={"unit": "m"})),
        numpy.array([["a", 1], [None, (2,)]], dtype=object),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_structures_and_objects_need_trust(array):
    for value in (array, [array.dtype]):
        with pytest.raises(UntrustedPickleError):
            load_item(saved(value), "item", URI)


@pytest.mark.parametrize("value", [fractions.Fraction(1, 2), range(3)])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(UntrustedPickleError, match=rf"{type(value).__name__}.*is not allowed"):
        load_item(saved([value]), "item", URI)


RECONSTRUCT, SCALAR = (value.__reduce__()[0] for value in (ARRAY, numpy.float64(1)))
STRANGE = {
    "a call of the class": Call(numpy.ndarray, (1 << 40,)),
    "a call with objects": Call(numpy.ndarray, (1 << 31,), numpy.dtype("O")),
    "a wide item": Call(numpy.dtype, "V999999999999", False, True),
    "bytes": Call(bytes, 1 << 40),
    "another class of arrays": Call(RECONSTRUCT, numpy.matrix, (0,), b"b"),
    "a dtype with commas": Call(numpy.dtype, "i4,O", False, True),
    "an object as a scalar": Call(SCALAR, numpy.dtype("O"), [1]),
    "another callable of numpy": Call(numpy.fromfile, "/etc/passwd", "u1"),
    "another callable of a path": Call(pathlib.Path.home),
    "another callable of a time": Call(datetime.datetime.now),
}
ODD = [None, -1, 63, 800, 1 << 40, "O", "x", "|", b"", b"12345678" * 9, (1 << 40,), ("a",)]
ODD += [[1.0], {"a": 1}, object, numpy.dtype("O"), (numpy.dtype("f8"), (1 << 40,))]
ODD += [{"a": (numpy.dtype("O"), 0)}]
HONEST = {
    "an array": numpy.arange(6.0).reshape(2, 3),
    "a dtype": numpy.dtype(">f8"),
    "a dtype of bytes": numpy.dtype("S8"),
    "a dtype of times": numpy.dtype("M8[25s]"),
    "a scalar": numpy.float64(1),
    "a path": pathlib.PurePosixPath("a"),
    "a time": datetime.datetime(2024, 2, 29),
    "a day": datetime.date(2024, 2, 29),
    "a set": frozenset({1}),
    "a buffer": io.BytesIO(b"abc"),
}


def with_one_odd(thing):
    """All tuples that differ from a tuple in one element, however deep it is."""
    for at, part in enumerate(thing):
        others = [*ODD, *(with_one_odd(part) if type(part) is tuple else ())]
        yield from ((*thing[:at], other, *thing[at + 1 :]) for other in others)


def reduced(value):
    """How a value is pickled: what is called, with what, and the state of the result."""
    function, arguments, state, *_ = (*value.__reduce_ex__(2), None)
    if function is copyreg.__newobj__:
        function, *arguments = arguments
    return function, tuple(arguments), state


def assert_refused_or_plain(call):
    """It is refused, or a value that itself comes back, and takes no more memory than it has."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = load_item(saved([call]), "item", URI)
    except REFUSED:
        pass
    else:
        assert_same(loaded(saved(found)), found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize("name", STRANGE)
def test_what_no_such_value_is_pickled_as_is_refused(name):
    assert_refused_or_plain(STRANGE[name])
    with pytest.raises(REFUSED):
        load_item(saved([STRANGE[name]]), "item", URI)


@pytest.mark.parametrize("name", HONEST)
def test_what_is_pickled_otherwise_than_a_value_is_refused_or_another_one(name):
    function, arguments, state = reduced(HONEST[name])
    for other in with_one_odd(arguments):
        assert_refused_or_plain(Call(function, *other, state=state))
    states = with_one_odd(state) if type(state) is tuple else ()
    for other in (*states, *ODD):
        assert_refused_or_plain(Call(function, *arguments, state=other))
