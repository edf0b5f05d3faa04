"""What an item without an index says of itself is believed only if it can be true."""

import io
import pickle
import uuid
import zipfile

import pytest
import torch

from cloudckpt import Config
from cloudckpt.checkpoint.archives import StoredTensor, locate
from cloudckpt.checksum import CRC32C
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.stats import TransferStats
from support.memory_store import MemoryStore


class Storage:
    def __init__(self, elements):
        self.persistent_id = ("storage", torch.FloatStorage, "0", "cpu", elements)


class Rebuilt:
    def __init__(self, *arguments):
        self._arguments = arguments

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self._arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return getattr(value, "persistent_id", None) if isinstance(value, Storage) else None


def item(shape, stride):
    """Ten elements as torch stores them, in a file that says they have this shape."""
    description, file = io.BytesIO(), io.BytesIO()
    Pickler(description, 2).dump(Rebuilt(Storage(10), 0, shape, stride, False, {}))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", description.getvalue())
        archive.writestr("archive/data/0", bytes(40))
    return file.getvalue()


def found(data):
    store = MemoryStore(uuid.uuid4().hex)
    store.put("item", [memoryview(data)], checksum=CRC32C.of(data))
    wanted = StoredBytes("item", 0, len(data), None, None, "weight")
    return locate(store, [wanted], Config(), TransferStats())[wanted]


def test_the_elements_are_found():
    data = item((2, 5), (5, 1))
    elements = StoredBytes("item", data.index(bytes(40)), 40, None, None, "weight")
    assert found(data) == StoredTensor(elements, torch.float32, (2, 5))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((11,), (1,)), ((1 << 70,), (1,)), ((1 << 70, 0), (1, 1)), ((1 << 62, 4), (4, 1))],
    ids=["too many", "no number of torch", "no number of torch, but empty", "0 in 64 bits"],
)
def test_a_shape_that_can_not_be_is_left_to_torch(shape, stride):
    assert found(item(shape, stride)) is None
