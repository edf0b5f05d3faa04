"""What an item without an index says of its tensor is read, and believed only if it can be true."""

import io
import pickle
import uuid
import warnings
import zipfile

import pytest
import torch

from cloudckpt import Config
from cloudckpt.checkpoint.archives import StoredTensor, locate
from cloudckpt.checksum import CRC32C
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.stats import TransferStats
from support.memory_store import MemoryStore
from support.pickles import Call, containing, saved

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.int64, torch.uint8, torch.bool, torch.uint16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def located(file):
    """The tensor in a file of ``torch.save``, and its bytes; None if only torch can read it."""
    store = MemoryStore(uuid.uuid4().hex)
    store.put("item", [memoryview(file)], checksum=CRC32C.of(file))
    whole = StoredBytes("item", 0, len(file), None, None, "weight")
    found = locate(store, [whole], Config(), TransferStats())[whole]
    if found is None:
        return None
    start, nbytes = found.elements.offset, found.elements.nbytes
    assert found == StoredTensor(
        StoredBytes("item", start, nbytes, None, None, "weight"), found.dtype, found.shape
    )
    return found.dtype, found.shape, file[start : start + nbytes]


def content(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_tensor_is_located(dtype, protocol):
    for shape in [(), (5,), (3, 4), (0, 4)]:
        tensor = torch.randint(0, 2, shape).to(dtype)
        found = located(saved(tensor, pickle_protocol=protocol))
        assert found == (dtype, shape, content(tensor))


ROWS = [torch.randn(10, 4)[3:], torch.randn(10, 4)[3], torch.randn(10)[5:6].expand(1)]
ROWS += [torch.randn(10, 1)[3:].view(7, 1), torch.randn(10, 1, 4).transpose(0, 1)]
ROWS += [torch.nn.Parameter(torch.randn(6, 2))[2:], torch.nn.Parameter(torch.randn(2, 3))]


@pytest.mark.parametrize("tensor", ROWS, ids=lambda tensor: str(tuple(tensor.shape)))
def test_rows_of_a_larger_tensor_are_located(tensor):
    assert located(saved(tensor)) == (torch.float32, tuple(tensor.shape), content(tensor))


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
        lambda: torch.randn(10, 4)[:, 1:],
        lambda: torch.randn(10, 4).t(),
        lambda: torch.randn(4).expand(3, 4),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        OfTheUser,
    ],
)
def test_what_is_no_plain_row_major_tensor_is_left_to_torch(make):
    assert located(saved(make())) is None


# ---- tensors that torch would not make


class Storage:
    """Of ten floats."""


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", 10) if type(value) is Storage else None


def described_as(shape, stride, offset=0, order="little"):
    """A file whose ten elements have this shape, by its own account."""
    buffer, file = io.BytesIO(), io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Pickler(buffer, 2).dump(Call(rebuild, Storage(), offset, shape, stride, False, {}))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", order)
        archive.writestr("archive/data/0", bytes(range(40)))
    return file.getvalue()


def test_the_elements_are_those_of_the_storage():
    assert located(described_as((2, 4), (4, 1), 2)) == (torch.float32, (2, 4), bytes(range(8, 40)))


@pytest.mark.parametrize(
    "file",
    [
        *map(containing, [b"", b"\x80", b"text", pickle.dumps(7), pickle.dumps(None)]),
        described_as((2, 5), (5,)),
        described_as((2, 5), (5, 1, 1)),
        described_as((2, 5), ("5", "1")),
        described_as(("2", "5"), (5, 1)),
        described_as((2, -5), (5, 1)),
        described_as((2, 5), (5, 1), -10),
        described_as((2, 5), (5, 1), "0"),
        described_as((2, 5), (5, 1), 1),
        described_as((11,), (1,)),
        described_as((1 << 70,), (1,)),
        described_as((1 << 70, 0), (1, 1)),
        described_as((1 << 62, 4), (4, 1)),
        described_as((2, 5), (5, 1), order="big"),
    ],
    ids=range(18),
)
def test_a_description_that_can_not_be_true_is_left_to_torch(file):
    assert located(file) is None
