"""What an item without an index says of its tensor is read, and believed only if it can be true."""

import io
import pickle
import uuid
import warnings
import zipfile

import pytest
import torch

from cloudckpt import Config
from cloudckpt.checkpoint.archives import (
    StoredTensor,
    TensorDescription,
    describe_tensor,
    locate,
)
from cloudckpt.checksum import CRC32C
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.stats import TransferStats
from support.memory_store import MemoryStore
from support.pickles import Call, data_pkl, saved

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.int64, torch.uint8, torch.bool, torch.uint16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def description(value, **options):
    return describe_tensor(data_pkl(saved(value, **options)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_tensor_is_described(dtype, protocol):
    for shape in [(), (5,), (3, 4), (0, 4)]:
        tensor = torch.zeros(shape, dtype=dtype)
        found = description(tensor, pickle_protocol=protocol)
        assert found == TensorDescription(dtype, "0", 0, shape, tensor.stride())
        assert found.is_row_major


@pytest.mark.parametrize(
    ("tensor", "row_major"),
    [
        (torch.randn(10, 4)[3:], True),
        (torch.randn(10, 4)[3], True),
        (torch.randn(10, 4)[:, 1:], False),
        (torch.randn(10)[5:6].expand(1), True),
        (torch.randn(10, 4).t(), False),
        (torch.randn(4).expand(3, 4), False),
        (torch.randn(10, 4)[:, 1:2], False),
        (torch.randn(10, 1)[3:].view(7, 1), True),
        (torch.randn(10, 1, 4).transpose(0, 1), True),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
    ],
)
def test_views_are_described_as_they_are(tensor, row_major):
    found = description(tensor)
    assert (found.shape, found.stride) == (tuple(tensor.shape), tensor.stride())
    assert found.storage_offset == tensor.storage_offset()
    assert found.is_row_major == row_major


class OfTheUser:
    """No tensor."""


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


@pytest.mark.parametrize("data", [b"", b"\x80", b"text", pickle.dumps(7), pickle.dumps(None)])
def test_what_is_no_description_is_none(data):
    assert describe_tensor(data) is None


# ---- tensors that torch would not make


class Storage:
    """Of ten floats."""


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", 10) if type(value) is Storage else None


def described_as(shape, stride, offset=0):
    buffer = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Pickler(buffer, 2).dump(Call(rebuild, Storage(), offset, shape, stride, False, {}))
    return buffer.getvalue()


def located(shape, stride):
    """What is found of ten elements in a file that says that they have this shape."""
    file, store = io.BytesIO(), MemoryStore(uuid.uuid4().hex)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", described_as(shape, stride))
        archive.writestr("archive/data/0", bytes(40))
    data = file.getvalue()
    store.put("item", [memoryview(data)], checksum=CRC32C.of(data))
    wanted = StoredBytes("item", 0, len(data), None, None, "weight")
    return locate(store, [wanted], Config(), TransferStats())[wanted], data.index(bytes(40))


def test_the_elements_are_found():
    assert describe_tensor(described_as((2, 5), (5, 1))).shape == (2, 5)
    found, start = located((2, 5), (5, 1))
    elements = StoredBytes("item", start, 40, None, None, "weight")
    assert found == StoredTensor(elements, torch.float32, (2, 5))


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((2, 5), (5,), 0),
        ((2, 5), (5, 1, 1), 0),
        ((2, 5), ("5", "1"), 0),
        (("2", "5"), (5, 1), 0),
        ((2, -5), (5, 1), 0),
        ((2, 5), (5, 1), -10),
        ((2, 5), (5, 1), "0"),
    ],
)
def test_a_description_that_makes_no_sense_is_none(shape, stride, offset):
    assert describe_tensor(described_as(shape, stride, offset)) is None


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((11,), (1,)), ((1 << 70,), (1,)), ((1 << 70, 0), (1, 1)), ((1 << 62, 4), (4, 1))],
    ids=["too many", "no number of torch", "no number of torch, but empty", "0 in 64 bits"],
)
def test_a_shape_that_can_not_be_is_left_to_torch(shape, stride):
    assert located(shape, stride)[0] is None
