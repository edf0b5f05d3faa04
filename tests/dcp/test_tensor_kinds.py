"""Every kind of value that torch's own checkpoints can hold comes back bit by bit."""

import functools
import io
import re
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.masked import masked_tensor

import cloudckpt
from cloudckpt.errors import KeyCollisionError, ShapeMismatchError, UnsupportedTensorError

from .children import in_a_child
from .layouts import LAYOUTS, spread
from .values import assert_same, numbered


def _is_copied(dtype: torch.dtype) -> bool:
    """Whether this torch has more of it than its name: torch 2.9 can't copy a float4."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True


_NO_NUMBERS = re.compile(r"torch\.(q|bits|u?int[1-7]$)")  # quantized, or refused by name
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not _NO_NUMBERS.match(str(dtype))
    },
    key=str,
)
DTYPES = [dtype for dtype in DTYPES if _is_copied(dtype)]


def _patterned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern that a byte can have, as elements of ``dtype``."""
    if dtype == torch.bool:
        return numbered(*shape, dtype=torch.int64) % 3 == 0
    width = dtype.itemsize
    raw = (numbered(*shape[:-1], shape[-1] * width, dtype=torch.int64) * 7 % 256).to(torch.uint8)
    return raw.view(dtype)


def _round_trip(state: dict, place, room: dict) -> dict:
    place.save(state)
    place.load(room)
    return room


def _blank_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Room for it; not by ``full_like``, which not every dtype has."""
    raw = torch.full((*tensor.shape, tensor.itemsize), 1, dtype=torch.uint8)
    return raw.view(tensor.dtype).reshape(tensor.shape)


def _stock_load(state: dict, place) -> dict:
    dcp.load(state, storage_reader=FileSystemReader(place.path))
    return state


def test_every_bit_of_a_tensor_of_any_dtype_survives(local):
    state = {str(dtype): _patterned(dtype, 9, 12) for dtype in DTYPES}
    state |= {f"{dtype} transposed": _patterned(dtype, 9, 12).t() for dtype in DTYPES}
    ours, torchs = ({name: _blank_bits(v) for name, v in state.items()} for _ in range(2))
    assert_same(_round_trip(state, local, ours), state)
    assert_same(_stock_load(torchs, local), state)


_BASE = numbered(6, 8)
_COMPLEX = torch.complex(numbered(4, 3), numbered(4, 3, first=100))
VIEWS = {
    "no dimension": torch.tensor(5.5),
    "no element": torch.empty(0, 7),
    "transposed": _BASE.t(),
    "every second column": _BASE[:, 1::2],
    "middle columns": _BASE[:, 2:5],
    "expanded": numbered(1, 8).expand(6, 8),
    "overlapping windows": numbered(12).unfold(0, 4, 2),
    "permuted": numbered(2, 3, 4, 5).permute(3, 1, 0, 2),
    "size-one strides": torch.empty_strided((1, 8), (999, 1)).copy_(numbered(1, 8)),
    "conjugate, transposed": _COMPLEX.conj().t(),
    "imaginary part of a conjugate": _COMPLEX.conj().imag,
    "negative view": torch._neg_view(numbered(4, 4, first=1)),
    "not a leaf": numbered(3, 4).requires_grad_() * 2,
    "bytes off alignment": numbered(100, dtype=torch.uint8)[3:97],
}


_SHARING = ["expanded", "overlapping windows"]


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in _SHARING])
def test_a_tensor_is_loaded_into_a_view_and_nothing_beside_it_changes(name, local):
    shape, dtype = VIEWS[name].shape, VIEWS[name].dtype
    values = numbered(*shape).to(dtype)
    memory = torch.full((VIEWS[name].untyped_storage().nbytes() // dtype.itemsize,), 113).to(dtype)
    target = memory.as_strided(shape, VIEWS[name].stride(), VIEWS[name].storage_offset())
    expected = memory.clone()
    expected.as_strided(shape, target.stride(), target.storage_offset()).copy_(values)
    _round_trip({"v": values}, local, {"v": target})
    assert_same(memory, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_target_of_another_dtype_gets_converted_values(dtype, transposed, local):
    values = numbered(12, 20)
    target = (
        torch.zeros(20, 12, dtype=dtype).t() if transposed else torch.zeros(12, 20, dtype=dtype)
    )
    loaded = _round_trip({"v": values}, local, {"v": target})
    assert_same(loaded["v"], values.to(dtype))


# ---- subclasses


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def test_a_subclass_with_memory_of_its_own_is_stored_as_a_plain_tensor(local):
    saved = {"v": numbered(4, 5).as_subclass(Named)}
    loaded = _round_trip(saved, local, {"v": torch.zeros(4, 5).as_subclass(Named)})
    assert isinstance(loaded["v"], Named)
    assert_same(loaded["v"].as_subclass(torch.Tensor), numbered(4, 5))
    assert_same(_stock_load({"v": torch.zeros(4, 5)}, local)["v"], numbered(4, 5))


_first, _count = st.integers(0, 3), st.integers(1, 4)
_cuts = st.lists(st.tuples(_first, _count, _first, _count, st.integers(0, 1)), max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_cuts, st.sampled_from([1, 9000]), st.booleans())
def test_views_of_one_memory_take_equal_values_and_refuse_others(local, cuts, width, changes):
    """Fetched at once, the bytes of one would be taken for damage of the other."""

    def views(room: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = [room[a : a + b, c : c + d].transpose(0, turned) for a, b, c, d, turned in cuts]
        return {"0": room[:2], **{str(number): part for number, part in enumerate(parts, 1)}}

    saved = {name: view.clone() for name, view in views(torch.rand(4, 4, width)).items()}
    first, *others = views(numbered(4, 4, width)).values()
    if changes:
        saved["0"][0, 0, 0] = -1
    (place := local.at(uuid.uuid4().hex)).save(saved)
    state = views(torch.zeros(4, 4, width))
    if changes and any((other == first[0, 0, 0]).any() for other in others):
        with pytest.raises(KeyCollisionError):
            place.load(state)
    else:
        place.load(state)
        assert all(torch.equal(state[name], saved[name]) for name in state)


# ---- what is no tensor


class OneStream(DefaultSavePlanner):
    """Writes all its values into one stream, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = io.BytesIO()

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item).getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write(data)
        return self._stream


def test_a_planner_may_use_its_stream_again_while_the_bytes_are_sent(s3):
    state = {name: name * 3_000_000 for name in "abc"}
    s3.save(state, planner=OneStream())
    s3.load(loaded := dict.fromkeys(state, ""))
    assert loaded == state


# ---- refused

UNSUPPORTED = {
    "quantized": lambda: torch.quantize_per_tensor(numbered(3), 0.1, 0, torch.qint8),
    "sparse": lambda: numbered(3, 3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([numbered(2), numbered(3)]),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "masked": lambda: masked_tensor(numbered(2), torch.tensor([True, False])),
    "mkldnn": lambda: numbered(3).to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([numbered(2), numbered(3)], layout=torch.jagged),
    **{
        name: functools.partial(torch.empty, 16, dtype=getattr(torch, name))
        for name in ("int1", "int7", "uint1", "uint4", "bits1x8", "bits2x4", "bits8", "bits16")
    },
}


@pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*MaskedTensors.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules.*:UserWarning")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_has_no_plain_bytes_is_refused_by_name_and_nothing_stays(kind, local):
    state = {"before": numbered(10), "odd": UNSUPPORTED[kind](), "z behind": numbered(10)}
    with pytest.raises(UnsupportedTensorError) as caught:
        local.save(state)
    assert caught.value.item == "odd"
    assert local.names() == []


class Wrong(DefaultSavePlanner):
    """Returns something else than it has planned."""

    def __init__(self, instead) -> None:
        super().__init__()
        self.instead = instead

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return self.instead(found) if write_item.index.fqn == "odd" else found


@pytest.mark.parametrize(
    ("value", "instead", "error"),
    [
        (numbered(4, 6), lambda data: data[:2], ShapeMismatchError),
        (numbered(4, 6), lambda data: data.view(torch.uint8), ShapeMismatchError),
        (numbered(4, 6), lambda _: io.BytesIO(b"hello"), UnsupportedTensorError),
        (numbered(4, 6), lambda _: None, UnsupportedTensorError),
        ("text", lambda _: numbered(3), UnsupportedTensorError),
    ],
)
def test_a_planner_that_returns_other_data_than_planned_is_told_the_item(
    value, instead, error, local
):
    with pytest.raises(error) as caught:
        local.save({"before": numbered(3), "odd": value}, planner=Wrong(instead))
    assert caught.value.item == "odd"
    assert local.names() == []


def _without_memory(kind: str) -> torch.Tensor:
    if kind == "fake":
        with FakeTensorMode():
            return torch.ones(1000)
    if kind == "zero":
        return torch._efficientzerotensor((1000,))
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0 if kind == "freed" else 400)  # FSDP frees its parameters
    return tensor


def _refusal(action: str, kind: str, place) -> str:
    place.save({"t": torch.ones(1000)})
    with pytest.raises(UnsupportedTensorError) as caught:
        getattr(place, action)({"t": _without_memory(kind)})
    return caught.value.message


@pytest.mark.parametrize("kind", ["freed", "zero", "fake", "shrunk"])
@pytest.mark.parametrize("action", ["save", "load"])
def test_a_tensor_without_memory_is_refused_and_does_not_kill_the_process(kind, action, local):
    assert in_a_child("fork", _refusal, action, kind, local).startswith("t ")


def _save_rows(place) -> None:
    place.save(spread({"t": numbered(2, 3)}, LAYOUTS["2 rows"]))


@pytest.mark.parametrize("load", [cloudckpt.load, dcp.load], ids=["ours", "torch's"])
def test_a_target_with_many_elements_in_one_place_is_refused_for_shards(load, local, ranks):
    """The last of the rows would be in the place of all, and each part is a single row."""
    ranks(2, _save_rows, local)
    row = torch.zeros(1, 3)
    with pytest.raises((UnsupportedTensorError, CheckpointException)):
        load({"t": row.expand(2, 3)}, storage_reader=local.reader(), no_dist=True)
    assert not row.any()


@pytest.mark.parametrize("load", [cloudckpt.load, dcp.load], ids=["ours", "torch's"])
@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (3, 0), (1, 3)], ids=str)
def test_a_target_whose_rows_overlap_is_refused(strides, load, local):
    """Each row would be overwritten by the next one."""
    cloudckpt.save({"t": numbered(4, 3, first=1)}, checkpoint_id=local.uri)
    memory = torch.zeros(20)
    with pytest.raises((UnsupportedTensorError, CheckpointException)) as caught:
        load({"t": memory.as_strided((4, 3), strides)}, storage_reader=local.reader())
    assert load is dcp.load or caught.value.item == "t"
    assert not memory.any()
