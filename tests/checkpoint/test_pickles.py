"""Pickles in items: what may be loaded, and what they say of a tensor."""

import collections
import io
import os
import pickle
import warnings
import zipfile

import pytest
import torch

from cloudckpt.checkpoint.archives import TensorDescription, describe_tensor
from cloudckpt.checkpoint.values import check_trusted, load_tensor
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError

URI = "s3://bucket/run"


def saved(value, **options):
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, buffer, **options)
    return buffer.getvalue()


def description(value, **options):
    """What is said of a value by the ``data.pkl`` that torch saves."""
    with zipfile.ZipFile(io.BytesIO(saved(value, **options))) as archive:
        return describe_tensor(archive.read("archive/data.pkl"))


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def marker(tmp_path):
    """A file that is there once hostile code has run."""
    return str(tmp_path / "it-ran")


def hostile(marker):
    return Call(os.system, f"touch '{marker}'")


# what may be loaded


@pytest.mark.parametrize("nested", [False, True])
def test_hostile_items_are_refused_and_do_not_run(marker, nested):
    value = {"a": [hostile(marker)]} if nested else hostile(marker)
    with pytest.raises(UntrustedPickleError) as caught:
        check_trusted(saved(value), "optimizer.state", URI)
    assert caught.value.item == "optimizer.state"
    assert caught.value.uri == URI
    assert "trust_pickle=True" in str(caught.value)
    assert not os.path.exists(marker)


def test_the_hostile_item_would_run(marker):
    torch.load(io.BytesIO(saved(hostile(marker))), weights_only=False)
    assert os.path.exists(marker)


def test_hostile_items_of_old_versions_of_torch_do_not_run(marker):
    """Before zip archives, an item was a few pickles in a row."""
    data = saved(hostile(marker), _use_new_zipfile_serialization=False)
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)):
        check_trusted(data, "item", URI)
    assert not os.path.exists(marker)


@pytest.mark.parametrize("data", [pickle.dumps(7), b"", b"PK\3\4", b"text", saved(7)[:-30]])
def test_what_is_no_item_is_refused(data, marker):
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)):
        check_trusted(data, "item", URI)


def test_bare_hostile_pickles_do_not_run(marker):
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError)):
        check_trusted(pickle.dumps(hostile(marker)), "item", URI)
    assert not os.path.exists(marker)


class OfTheUser:
    def __init__(self):
        self.value = 7


def test_a_class_of_the_user_is_trusted_once_torch_allows_it():
    data = saved(OfTheUser())
    with pytest.raises(UntrustedPickleError, match="OfTheUser"):
        check_trusted(data, "item", URI)
    with torch.serialization.safe_globals([OfTheUser]):
        check_trusted(data, "item", URI)


def test_a_tensor_is_loaded():
    tensor = torch.randn(3, 4).t()
    found = load_tensor(saved(tensor), "w", URI, trust=False)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("value", [7, {"w": torch.ones(3)}, None])
def test_what_is_no_tensor_is_refused(value):
    with pytest.raises(
        CheckpointCorruptError, match="although the metadata describes it as a tensor"
    ) as caught:
        load_tensor(saved(value), "w", URI, trust=False)
    assert caught.value.item == "w"


def test_a_tensor_that_needs_hostile_code_is_refused(marker):
    data = saved([torch.randn(3), hostile(marker)])
    with pytest.raises(UntrustedPickleError):
        load_tensor(data, "w", URI, trust=False)
    assert not os.path.exists(marker)


def test_trust_loads_what_is_there(marker):
    with pytest.raises(CheckpointCorruptError):
        load_tensor(saved(hostile(marker)), "w", URI, trust=True)
    assert os.path.exists(marker)


# what is said of a tensor

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 4)], ids=str)
def test_a_plain_tensor_is_described(dtype, shape):
    found = description(torch.zeros(shape, dtype=dtype))
    assert found == TensorDescription(dtype, "0", 0, shape, torch.zeros(shape).stride())
    assert found.is_row_major


@pytest.mark.parametrize(
    ("make", "offset", "row_major"),
    [
        (lambda: torch.randn(10, 4)[3:], 12, True),
        (lambda: torch.randn(10, 4)[3], 12, True),
        (lambda: torch.randn(10, 4)[:, 1:], 1, False),
        (lambda: torch.randn(10)[5:6].expand(1), 5, True),
        (lambda: torch.randn(10, 4).t(), 0, False),
        (lambda: torch.randn(4).expand(3, 4), 0, False),
        (lambda: torch.randn(10, 4)[:, 1:2], 1, False),
        (lambda: torch.randn(10, 1)[3:].view(7, 1), 3, True),
        (lambda: torch.randn(10, 1, 4).transpose(0, 1), 0, True),
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 0, False),
    ],
)
def test_views_are_described_as_they_are(make, offset, row_major):
    tensor = make()
    found = description(tensor)
    assert (found.shape, found.stride) == (tuple(tensor.shape), tensor.stride())
    assert found.is_row_major == row_major
    assert found.storage_offset == tensor.storage_offset() == offset


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol_is_understood(protocol):
    found = description(torch.zeros(3, 4), pickle_protocol=protocol)
    assert (found.dtype, found.shape) == (torch.float32, (3, 4))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: 7,
        lambda: {"w": torch.zeros(3)},
        lambda: [torch.zeros(3)],
        lambda: torch.zeros(3, 4).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(3, device="meta"),
        OfTheUser,
    ],
)
def test_what_is_no_plain_tensor_is_not_described(make):
    assert description(make()) is None


def test_a_hostile_description_does_not_run(marker):
    assert describe_tensor(pickle.dumps(hostile(marker))) is None
    assert not os.path.exists(marker)


@pytest.mark.parametrize("data", [b"", b"\x80", b"text", pickle.dumps(7), pickle.dumps(None)])
def test_what_is_no_description_is_none(data):
    assert describe_tensor(data) is None


def described_as(shape, stride, offset=0):
    """``data.pkl`` of a tensor that torch would not make."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", 12)
            return None

    buffer = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    call = Call(rebuild, Storage(), offset, shape, stride, False, collections.OrderedDict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Pickler(buffer, 2).dump(call)
    return buffer.getvalue()


def test_the_descriptions_of_these_tests_are_right():
    found = describe_tensor(described_as((3, 4), (4, 1)))
    assert found == TensorDescription(torch.float32, "0", 0, (3, 4), (4, 1))


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((3, 4), (4,), 0),
        ((3, 4), (4, 1, 1), 0),
        ((3, 4), ("4", "1"), 0),
        (("3", "4"), (4, 1), 0),
        ((3, -4), (4, 1), 0),
        ((3, 4), (4, 1), -12),
        ((3, 4), (4, 1), "0"),
    ],
)
def test_a_description_that_makes_no_sense_is_none(shape, stride, offset):
    assert describe_tensor(described_as(shape, stride, offset)) is None


def test_a_description_can_not_allocate_memory():
    made = []

    class Noting(type(torch.FloatStorage)):
        def __call__(cls, *arguments):
            made.append(arguments)

    class Storage(torch.FloatStorage, metaclass=Noting):
        pass

    torch.CloudckptTestStorage = Storage
    try:
        describe_tensor(
            b"\x80\x02ctorch\nCloudckptTestStorage\n" + pickle.dumps((7,), 2)[2:-1] + b"R."
        )
    finally:
        del torch.CloudckptTestStorage
    assert made == []


def test_a_description_can_not_change_a_class_of_torch():
    state = pickle.dumps((None, {"cloudckpt_was_here": 1}), 2)[2:-1]
    try:
        describe_tensor(b"\x80\x02ctorch\nFloatStorage\n" + state + b"b.")
        assert not hasattr(torch.FloatStorage, "cloudckpt_was_here")
    finally:
        if hasattr(torch.FloatStorage, "cloudckpt_was_here"):
            del torch.FloatStorage.cloudckpt_was_here


def test_items_are_read_whatever_torch_is_told_about_files():
    with torch.utils.serialization.config.patch("load.mmap", True):
        check_trusted(saved({"step": 1}), "item", URI)
        load_tensor(saved(torch.ones(2)), "item", URI, trust=False)


@pytest.mark.parametrize("good", [True, False])
def test_a_warning_that_is_turned_into_an_error_is_no_damage(monkeypatch, good):
    usual = torch.load

    def warn(*arguments, **options):
        warnings.warn("torch does this otherwise soon", FutureWarning, stacklevel=2)
        return usual(*arguments, **options)

    data = saved(torch.ones(3)) if good else b"damaged"
    monkeypatch.setattr(torch, "load", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if good:
            check_trusted(data, "item", "s3://bucket/run")
            loaded = load_tensor(data, "item", "s3://bucket/run", trust=False)
            assert torch.equal(loaded, torch.ones(3))
        else:
            with pytest.raises((CheckpointCorruptError, UntrustedPickleError)):
                check_trusted(data, "item", "s3://bucket/run")
