"""The bytes around a tensor are those of ``torch.save``, without its bytes having been touched."""

import io
import math
import re
import resource
import struct
import threading
import warnings
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checkpoint.envelope import envelope, unwarned
from cloudckpt.checkpoint.shard import check_supported
from cloudckpt.errors import UnsupportedTensorError
from support.pickles import saved

GIB = 1 << 30


def torch_saves(dtype):
    """False for the integers of 1 to 7 bits, which only tensor subclasses use."""
    try:
        saved(torch.empty(1, dtype=dtype))
    except KeyError:
        return False
    return True


ALL_DTYPES = sorted(
    {found for found in map(torch.__dict__.get, dir(torch)) if isinstance(found, torch.dtype)},
    key=str,
)
QUANTIZED = [dtype for dtype in ALL_DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in QUANTIZED and torch_saves(dtype)]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (4, 0, 3), (1, 1, 1, 1), (2, 3, 4, 5), (300, 100)]


def tensor_of(dtype, shape):
    """A contiguous tensor of any dtype, with bytes that are valid in it."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64) % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def wrapped(tensor):
    around = envelope(tensor.dtype, tuple(tensor.shape))
    return around.head + raw_bytes(tensor) + around.tail


def records(data):
    """``{name beneath the root: (header offset, crc, bytes)}``, in the order of the archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {}
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            # read() would check the CRC32, which is not there
            start = info.header_offset
            *_, name_length, extra_length = struct.unpack_from("<4s5H3I2H", data, start)
            begin = start + 30 + name_length + extra_length
            found[name] = (start, info.CRC, data[begin : begin + info.file_size])
        return found


def bits(tensor):
    """Something to compare tensors of any dtype by, not-a-number included."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), raw_bytes(tensor)


def test_all_dtypes_are_tested():
    assert len(QUANTIZED) == 5
    assert {torch.bool, torch.bfloat16, torch.complex32, torch.float8_e4m3fn} <= set(DTYPES)
    others = set(ALL_DTYPES) - set(DTYPES) - set(QUANTIZED)
    assert all(re.fullmatch(r"torch\.u?int[1-7]", str(dtype)) for dtype in others)


@pytest.mark.parametrize(
    "dtype", sorted(set(ALL_DTYPES) - set(DTYPES) - set(QUANTIZED), key=str), ids=str
)
def test_a_dtype_that_torch_does_not_save_is_refused(dtype):
    with pytest.raises(UnsupportedTensorError):
        check_supported(torch.empty(3, dtype=dtype), "weight")


def assert_written_as_by_torch(tensor):
    """But for the serialization id, a hash of the other records that nothing reads."""
    data = wrapped(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert bits(loaded) == bits(tensor)
    assert not loaded.requires_grad
    ours, torchs = records(data), records(saved(tensor))
    torchs.pop(".data/serialization_id")
    assert list(ours) == list(torchs)
    for name, (start, _, content) in ours.items():
        assert content == torchs[name][2]
        # torch writes no descriptor behind an empty record; readers accept both
        assert start == torchs[name][0] or not tensor.numel()
    assert len(envelope(tensor.dtype, tuple(tensor.shape)).head) % 64 == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_what_torch_writes_and_loads(dtype, shape):
    assert_written_as_by_torch(tensor_of(dtype, shape))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 70_000) | st.integers(0, 3), max_size=6).filter(
        lambda shape: math.prod(max(size, 1) for size in shape) <= 1 << 18
    ),
)
def test_any_shape_is_written_as_torch_writes_it(dtype, shape):
    assert_written_as_by_torch(tensor_of(dtype, shape))


@pytest.mark.parametrize("shape", [(10**6, 10**6), (123_456,) * 3], ids=str)
def test_the_raw_data_of_large_tensors_begin_at_a_multiple_of_64(shape):
    assert len(envelope(torch.complex128, shape).head) % 64 == 0


def test_a_zip_reader_finds_fault_with_the_raw_data_alone_which_has_no_crc32():
    data = wrapped(tensor_of(torch.float32, (300, 100)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/byteorder") == b"little"


def test_the_filters_of_warnings_stay_as_they_are_whatever_threads_do():
    """The one thread ends while the other is still inside, unless that one has to wait."""
    second_came, first_left, before = threading.Event(), threading.Event(), list(warnings.filters)

    def enter():
        with unwarned():
            second_came.set()
            assert first_left.wait(60)

    second = threading.Thread(target=enter)
    with unwarned():
        second.start()
        assert not second_came.wait(0.2)
    first_left.set()
    second.join(60)
    assert warnings.filters == before


# more than 4 GiB

LARGE = [
    (torch.uint8, (4 * GIB - 2,)),  # the largest of 32 bits
    (torch.uint8, (4 * GIB - 1,)),  # the number that stands for "see the 64 bits"
    (torch.uint8, (4 * GIB,)),
    (torch.float32, (5, GIB // 4)),
    (torch.complex128, (GIB // 16, 5)),
]


@pytest.mark.parametrize(("dtype", "shape"), LARGE, ids=str)
def test_an_object_of_more_than_4_gib_is_mapped_by_torch_and_listed_by_a_zip_reader(
    tmp_path, dtype, shape
):
    """Its raw data are a hole, but for its ends."""
    around, path = envelope(dtype, shape), tmp_path / "large.pt"
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    with open(path, "wb") as file:
        file.write(around.head + b"\1" * dtype.itemsize)
        file.seek(len(around.head) + nbytes - dtype.itemsize)
        file.write(b"\2" * dtype.itemsize + around.tail)
    if path.stat().st_blocks * 512 > 64 * 1024 * 1024:
        pytest.skip("this file system has no holes")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
    ends = torch.stack([loaded.reshape(-1)[0], loaded.reshape(-1)[-1]]).view(torch.uint8)
    assert ends.tolist() == [1] * dtype.itemsize + [2] * dtype.itemsize
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024  # KiB
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        wide = {info.filename for info in archive.infolist() if info.extra.startswith(b"\1\0")}
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/byteorder") == b"little"
    assert sizes["archive/data/0"] == nbytes
    assert ("archive/data/0" in wide) == (nbytes >= 0xFFFFFFFF)  # the numbers of 64 bits
    assert "archive/version" in wide or nbytes < 0xFFFFFFFF - 1000  # it stands behind them
