"""Values beyond those that torch allows: they come back as they were, and nothing else gets in."""

import argparse
import collections
import dataclasses
import datetime
import fractions
import io
import os
import pathlib
import pickle
import resource
import sys
import threading
import zipfile

import pytest
import torch

from cloudckpt.checkpoint.values import check_trusted, load_item, load_plain
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UntrustedPickleError

numpy = pytest.importorskip("numpy")

URI = "s3://bucket/run"


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def containing(data):
    """A file of ``torch.save`` with this ``data.pkl``."""
    source, target = zipfile.ZipFile(io.BytesIO(saved(0))), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            archive.writestr(name, data if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


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
            check_trusted(saved(value), "item", URI)


UTC = datetime.timezone.utc
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
    io.BytesIO(b"abc"),
    io.BytesIO(),
    b"",
    b"abc",
    frozenset({1, "a"}),
    frozenset(),
]


def _id(value: object) -> str:
    """Its text, or its class if another process would write the text differently."""
    varies = isinstance(value, frozenset) or " at 0x" in repr(value)
    return type(value).__name__ if varies else repr(value)


@pytest.mark.parametrize("value", VALUES, ids=_id)
def test_values_of_the_standard_library_come_back(value):
    assert_same(loaded(saved(value)), value)
    item = load_item(saved({"x": [value]}), "item", URI, map_location=None)
    assert_same(item, {"x": [value]})


def test_a_position_in_bytes_comes_back():
    value = io.BytesIO(b"abc")
    value.seek(2)
    assert_same(loaded(saved(value)), value)


def test_values_come_back_from_everywhere_in_others():
    array, kind = numpy.arange(3), numpy.dtype("f4")
    value = {
        "twice": [array, array],
        "tuple": (1, (array, [array])),
        "key": ({kind: array, pathlib.PurePath("a"): 1},),
        "set": {numpy.int64(3), pathlib.PurePath("a")},
        "ordered": collections.OrderedDict(a=array),
        "class": [numpy.ndarray],
        "tensor": torch.arange(3),
    }
    found = loaded(saved(value))
    assert_same(found, value)
    assert found["twice"][0] is found["twice"][1]


def test_what_holds_itself_comes_back():
    value = [numpy.arange(2)]
    value.append(value)
    found = loaded(saved(value))
    assert found[1] is found
    assert_same(found[0], value[0])


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_all_versions_of_python_come_back(module):
    data = containing(b"\x80\x02c" + module.encode() + b"\nPosixPath\nX\x01\x00\x00\x00a\x85R.")
    assert load_item(data, "item", URI, map_location=None) == pathlib.PosixPath("a")


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_of_all_versions_of_numpy_come_back(module):
    here = type(numpy.arange(3).__reduce__()[0]).__module__  # only to be sure that there is one
    assert here
    data = saved(numpy.arange(3))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read("archive/data.pkl")
    for name in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        pickled = pickled.replace(b"c" + name + b"\n", b"c" + module.encode() + b"\n")
    assert_same(loaded(containing(pickled)), numpy.arange(3))


def test_the_lists_of_torch_are_as_they_were():
    before = torch.serialization.get_safe_globals()
    loaded(saved(numpy.arange(3)))
    assert torch.serialization.get_safe_globals() == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(saved(numpy.arange(3))), weights_only=True)


def test_other_threads_see_nothing_of_it():
    """torch's own lists are of the whole process."""
    data, wrong = saved(numpy.arange(3)), []

    def load():
        for _ in range(100):
            try:
                torch.load(io.BytesIO(data), weights_only=True)
                wrong.append("allowed")
            except pickle.UnpicklingError:
                pass

    def ours():
        for _ in range(100):
            try:
                assert_same(loaded(data), numpy.arange(3))
            except Exception as exc:  # noqa: BLE001 - a thread would lose it
                wrong.append(exc)

    threads = [threading.Thread(target=target) for target in (load, ours, ours)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


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
    data = saved([numpy.arange(3), value])
    with pytest.raises(pickle.UnpicklingError, match=type(value).__name__):
        loaded(data)
    with torch.serialization.safe_globals([type(value)]):
        array, found = loaded(data)
    assert_same(array, numpy.arange(3))
    assert found == value


def test_numpy_allowed_by_the_user_goes_its_own_way():
    titled = numpy.zeros(2, {"names": ["a"], "formats": ["i4"], "titles": ["A"]})
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        loaded(saved(titled))
    reconstruct = titled.__reduce__()[0]
    allowed = [reconstruct, numpy.ndarray, numpy.dtype, type(titled.dtype), type(numpy.dtype("i4"))]
    with torch.serialization.safe_globals(allowed):
        assert loaded(saved(titled)).dtype == titled.dtype


def test_tensors_of_a_device_that_is_not_here_are_no_damage(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        data = saved((torch.ones(2),))
    if torch.cuda.is_available():
        pytest.skip("the device is here")
    with pytest.raises(CheckpointError, match="device") as caught:
        load_item(data, "item", URI, map_location=None)
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert torch.equal(load_item(data, "item", URI, map_location="cpu")[0], torch.ones(2))


# ---- what does not get in


class Call:
    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self):
        return self.call


RECONSTRUCT = numpy.arange(1).__reduce__()[0]
SCALAR = numpy.float64(1).__reduce__()[0]
GOOD = (numpy.ndarray, (0,), b"b")
F8 = numpy.dtype("f8")


def array_state(*, version=1, shape=(1,), dtype=F8, fortran=False, content=b"12345678"):
    return version, shape, dtype, fortran, content


def dtype_state(*, order="<", sub=None, names=None, fields=None, size=-1, align=-1, flags=0):
    return 3, order, sub, names, fields, size, align, flags


def dtype(code, state=None, *more):
    return Call(numpy.dtype, code, False, True, state=None if state is None else (*state, *more))


HUGE = {
    "a call of the class": Call(numpy.ndarray, (1 << 40,)),
    "a call with objects": Call(numpy.ndarray, (1 << 31,), numpy.dtype("O")),
    "a shape without bytes": Call(RECONSTRUCT, *GOOD, state=array_state(shape=(1 << 40,))),
    "a shape of objects": Call(
        RECONSTRUCT, *GOOD, state=array_state(shape=(1 << 31,), dtype=numpy.dtype("O"), content=[])
    ),
    "an array to begin with": Call(RECONSTRUCT, numpy.ndarray, (1 << 40,), b"b"),
    "a wide item": dtype("V999999999999"),
    "an inner array": dtype("V8", dtype_state(order="|", sub=(F8, (1 << 40,)), size=8, align=1)),
    "bytes": Call(bytes, 1 << 40),
    "a scalar": Call(SCALAR, numpy.dtype("S1"), b"x" * 9),
}
STRANGE = {
    "another class of arrays": Call(RECONSTRUCT, numpy.matrix, (0,), b"b"),
    "another class": Call(RECONSTRUCT, dict, (0,), b"b"),
    "another type to begin with": Call(RECONSTRUCT, numpy.ndarray, (0,), b"O"),
    "a negative size": Call(RECONSTRUCT, *GOOD, state=array_state(shape=(-1, -1))),
    "a size that is none": Call(RECONSTRUCT, *GOOD, state=array_state(shape=("1",))),
    "a shape that is none": Call(RECONSTRUCT, *GOOD, state=array_state(shape=1)),
    "too few bytes": Call(RECONSTRUCT, *GOOD, state=array_state(content=b"1234567")),
    "too many bytes": Call(RECONSTRUCT, *GOOD, state=array_state(content=b"123456789")),
    "text for bytes": Call(RECONSTRUCT, *GOOD, state=array_state(content="12345678")),
    "a list for bytes": Call(RECONSTRUCT, *GOOD, state=array_state(content=[1.0])),
    "bytes for objects": Call(
        RECONSTRUCT, *GOOD, state=array_state(dtype=numpy.dtype("O"), content=b"12345678")
    ),
    "a dtype that is none": Call(RECONSTRUCT, *GOOD, state=array_state(dtype="f8")),
    "a short state": Call(RECONSTRUCT, *GOOD, state=(1,)),
    "a state that is none": Call(RECONSTRUCT, *GOOD, state={"a": 1}),
    "another version": Call(RECONSTRUCT, *GOOD, state=array_state(version=7)),
    "a dtype by another name": dtype("float64"),
    "a dtype with commas": dtype("i4,O"),
    "a dtype of a dict": dtype({"names": ["a"], "formats": ["O"]}),
    "a dtype of a class": dtype(object),
    "other flags": dtype("f8", dtype_state(flags=63)),
    "objects without flags": dtype("O8", dtype_state(order="|", flags=0)),
    "another size": dtype("S8", dtype_state(order="|", size=800, align=1)),
    "another size of a structure": dtype(
        "V8", dtype_state(order="|", names=("a",), fields={"a": (F8, 0)}, size=800, align=1)
    ),
    "a field outside": dtype(
        "V8", dtype_state(order="|", names=("a",), fields={"a": (F8, 800)}, size=8, align=1)
    ),
    "a field before": dtype(
        "V8", dtype_state(order="|", names=("a",), fields={"a": (F8, -8)}, size=8, align=1)
    ),
    "a field of objects": dtype(
        "V8",
        dtype_state(
            order="|", names=("a",), fields={"a": (numpy.dtype("O"), 0)}, size=8, align=1, flags=63
        ),
    ),
    "fields of a number": dtype("f8", dtype_state(names=("a",), fields={"a": (F8, 0)})),
    "an inner array of a number": dtype("f8", dtype_state(sub=(F8, (1,)))),
    "an alignment": dtype("S8", dtype_state(order="|", size=8, align=3)),
    "an order": dtype("f8", dtype_state(order="x")),
    "a unit": dtype("M8", (4, "<", None, None, None, -1, -1, 0), ({}, (b"x", 1, 1, 1))),
    "a divided unit": dtype("M8", (4, "<", None, None, None, -1, -1, 0), ({}, (b"s", 1, 0, 1))),
    "no unit": dtype("M8", dtype_state()),
    "an object as a scalar": Call(SCALAR, numpy.dtype("O"), [1]),
    "a scalar without bytes": Call(SCALAR, F8),
    "a scalar of a list": Call(SCALAR, F8, [1] * 8),
    "a set of a dict": Call(frozenset, {"a": 1}, 2),
    "a path of no texts": Call(pathlib.PurePosixPath, 1),
    "a time of a list": Call(datetime.datetime, [2024]),
    "another callable of numpy": Call(numpy.fromfile, "/etc/passwd", "u1"),
    "another callable of a path": Call(pathlib.Path.home),
    "another callable of a time": Call(datetime.datetime.now),
    "a path with a state": Call(pathlib.PurePosixPath, "a", state=(None, {"_str": "b"})),
    "a time with a state": Call(datetime.date, b"\x07\xe8\x02\x1d", state={"a": 1}),
}


@pytest.mark.parametrize("what", [*HUGE, *STRANGE])
def test_what_no_such_value_is_pickled_as_is_refused(what):
    data = saved([{**HUGE, **STRANGE}[what]])
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)) as caught:
        check_trusted(data, "item", URI)
    assert caught.value.item == "item"


@pytest.mark.parametrize("what", HUGE)
def test_a_few_bytes_do_not_become_a_lot_of_memory(what):
    data = saved([HUGE[what]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)):
        check_trusted(data, "item", URI)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize(
    "name", ["array", "dtype", ".array", ".dtype", "", ".", "numpy.array", "numpy.Array"]
)
def test_no_name_leads_to_what_stands_for_arrays(name):
    module, _, last = name.rpartition(".")
    data = containing(f"\x80\x02c{module}\n{last}\n.".encode("latin1"))
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)):
        check_trusted(data, "item", URI)


def test_code_beside_an_array_does_not_run(tmp_path):
    marker = tmp_path / "ran"
    value = [numpy.arange(3), Call(os.system, f"touch '{marker}'"), pathlib.PurePath("a")]
    with pytest.raises(UntrustedPickleError, match="system"):
        check_trusted(saved(value), "item", URI)
    assert not marker.exists()


def test_code_in_an_array_of_objects_does_not_run(tmp_path):
    marker = tmp_path / "ran"
    array = numpy.empty(1, object)
    array[0] = Call(os.system, f"touch '{marker}'")
    with pytest.raises(UntrustedPickleError):
        check_trusted(saved(array), "item", URI)
    assert not marker.exists()


class OfTheScript:
    """A class of the script that trains."""


def test_a_class_of_the_script_is_the_same_in_its_saving_process(monkeypatch):
    """There, Python calls the script ``__mp_main__``."""
    monkeypatch.setattr(OfTheScript, "__module__", "__mp_main__")
    monkeypatch.setattr(sys.modules["__mp_main__"], "OfTheScript", OfTheScript, raising=False)
    data = saved({"kept": OfTheScript()})
    monkeypatch.setattr(OfTheScript, "__module__", "__main__")
    with pytest.raises(UntrustedPickleError, match=r"__main__\.OfTheScript") as caught:
        load_item(data, "item", URI, map_location="cpu")
    assert "__mp_main__" not in str(caught.value)
    with torch.serialization.safe_globals([OfTheScript]):
        loaded = load_item(data, "item", URI, map_location="cpu")
    assert type(loaded["kept"]) is OfTheScript


@pytest.mark.parametrize(
    "value",
    [fractions.Fraction(1, 2), argparse.Namespace(a=1), range(3)],
    ids=_id,
)
def test_other_values_are_refused_by_name(value):
    with pytest.raises(UntrustedPickleError, match=r"is not allowed") as caught:
        check_trusted(saved([value]), "item", URI)
    assert type(value).__name__ in str(caught.value)
