"""DCP checkpoints and files of torch.save become each other, at any location."""

import io
import os
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils as stock

import cloudckpt
from cloudckpt import errors, format_utils
from cloudckpt.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_dcp,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from cloudckpt.torch_files.torch_file import load_torch_file
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI
from dcp.layouts import LAYOUTS, check_local_parts, full_state, spread
from dcp.places import Place
from dcp.values import assert_same, blank_like, numbered

MIB = 1024 * 1024


def nested_state():
    base = numbered(600)
    return {
        "model": OrderedDict(
            weight=numbered(70, 50),
            bias=numbered(7, dtype=torch.bfloat16),
            empty=torch.empty(0, 3),
            scalar=torch.tensor(2.5, dtype=torch.float64),
            transposed=numbered(30, 20).t(),
            view=base[100:200],
            strided=base[::7],
        ),
        "optimizer": {
            "state": {"0": {"step": torch.tensor(5.0), "momentum": numbered(70, 50, first=3)}},
            "groups": [{"lr": 0.1, "betas": [0.9, 0.95]}],
        },
        "step": 7,
        "name": "run",
        "nothing": None,
    }


def bytes_of_file(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def put(place: Place, name: str, data: bytes | None) -> str:
    """Lays a file there without cloudckpt, unless there is no data; returns its location."""
    if data is None:
        pass
    elif place.uri.startswith("s3://"):
        bucket, prefix = place._key()
        place.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)
    else:
        os.makedirs(place.path, exist_ok=True)
        with open(os.path.join(place.path, name), "wb") as file:
            file.write(data)
    return f"{place.uri}/{name}"


def plain(value):
    """The state with lists instead of tuples and without order, as DCP gives it back."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in sorted(value.items())}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


# ---- from DCP


def test_a_checkpoint_becomes_a_file_that_torch_loads(place):
    state = nested_state()
    cloudckpt.save(state, checkpoint_id=place.at("ck").uri, config=place.config)
    sent = dcp_to_torch_save(place.at("ck").uri, place.at("model.pt").uri, config=place.config)
    data = place.read("model.pt")
    assert sent.nbytes == len(data)
    assert_same(plain(torch.load(io.BytesIO(data))), plain(state))
    assert place.unfinished() == []


def test_a_checkpoint_of_stock_torch_becomes_a_file(tmp_path, s3):
    state = nested_state()
    dcp.save(state, checkpoint_id=tmp_path / "ck")
    dcp_to_torch_save(tmp_path / "ck", s3.at("model.pt").uri, config=s3.config)
    assert_same(plain(torch.load(io.BytesIO(s3.read("model.pt")))), plain(state))


def test_a_file_is_not_replaced_against_the_users_will(place):
    careful = place.having(overwrite=False)
    cloudckpt.save({"t": numbered(5)}, checkpoint_id=place.at("ck").uri, config=careful.config)
    put(place, "model.pt", b"old")
    with pytest.raises(errors.CheckpointExistsError, match="overwrite is off"):
        dcp_to_torch_save(place.at("ck").uri, place.at("model.pt").uri, config=careful.config)
    assert place.read("model.pt") == b"old"
    dcp_to_torch_save(place.at("ck").uri, place.at("new.pt").uri, config=careful.config)


@pytest.mark.parametrize(
    ("convert", "source", "target", "words"),
    [
        (dcp_to_torch_save, "ck", "ck", "both"),
        (torch_save_to_dcp, "ck", "ck", "both"),
        (dcp_to_torch_save, "ck", "s3://bucket", "does not name a file"),
        (dcp_to_torch_save, "ck", "ftp://host/model.pt", "unknown scheme"),
        (torch_save_to_dcp, 3, "ck", "string or a path"),
        (dcp_to_torch_save, "ck", "model.safetensors", "has the suffix of another format"),
        (dcp_to_torch_save, "ck", "MODEL.GGUF", "has the suffix of another format"),
        (dcp_to_torch_save, "ck", "a.h5", "has the suffix of another format"),
    ],
)
def test_a_wrong_location_is_told_and_nothing_is_written(local, convert, source, target, words):
    def place(name):
        return name if name == 3 or "://" in name else local.at(name).uri

    cloudckpt.save({"t": numbered(5)}, checkpoint_id=local.at("ck").uri, config=local.config)
    before = local.names()
    with pytest.raises(errors.InvalidURIError, match=words):
        convert(place(source), place(target), config=local.config)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"\.metadata"):
        dcp_to_torch_save(local.at("nowhere").uri, local.at("m.pt").uri, config=local.config)
    assert local.names() == before


# ---- to DCP


def test_a_file_becomes_a_checkpoint(place):
    state = nested_state()
    put(place, "model.pt", bytes_of_file(state))
    torch_save_to_dcp(place.at("model.pt").uri, place.at("ck").uri, config=place.config)
    loaded = blank_like(state)
    cloudckpt.load(loaded, checkpoint_id=place.at("ck").uri, config=place.config)
    assert_same(plain(loaded), plain(state))


class Custom:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


def test_a_pickle_that_is_trusted_is_loaded(local):
    put(local, "model.pt", bytes_of_file({"t": numbered(5), "x": Custom(3)}))
    source, ck = local.at("model.pt").uri, local.at("ck").uri
    with pytest.raises(errors.UntrustedPickleError, match="trust_pickle=True"):
        torch_save_to_dcp(source, ck, config=local.config)
    torch_save_to_dcp(source, ck, config=local.config, trust_pickle=True)
    with pytest.raises(errors.UntrustedPickleError):
        dcp_to_torch_save(ck, local.at("b.pt").uri, config=local.config)
    dcp_to_torch_save(ck, local.at("b.pt").uri, config=local.config, trust_pickle=True)
    loaded = torch.load(io.BytesIO(local.read("b.pt")), weights_only=False)
    assert loaded["x"] == Custom(3)


_GOOD = bytes_of_file({"t": numbered(300)})
BROKEN = {
    "empty": (b"", errors.CheckpointCorruptError, "not written by torch.save"),
    "text": (b"hello" * 100, errors.CheckpointCorruptError, "not written by torch.save"),
    "truncated": (_GOOD[:-30], errors.CheckpointCorruptError, "truncated"),
    "a few bytes": (_GOOD[:7], errors.CheckpointCorruptError, "truncated"),
    "missing": (None, errors.CheckpointNotFoundError, "no file here"),
    "no dict": (bytes_of_file(numbered(3)), errors.CheckpointError, "of class Tensor"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_state_is_named(kind, place):
    data, error, words = BROKEN[kind]
    put(place, "model.pt", data)
    with pytest.raises(error, match=words) as caught:
        torch_save_to_dcp(place.at("model.pt").uri, place.at("ck").uri, config=place.config)
    assert caught.value.uri == place.at("model.pt").uri
    assert [name for name in place.names() if name.startswith("ck/")] == []


# ---- reading files


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_are_read_as_torch_reads_them(is_zip, local):
    state = nested_state() | {"sparse": torch.eye(5).to_sparse()}
    data = bytes_of_file(state, _use_new_zipfile_serialization=is_zip)
    put(local, "model.pt", data)
    uri = CheckpointURI.parse(local.at("model.pt").uri)
    ours, theirs = load_torch_file(uri, local.config, TransferStats()), torch.load(io.BytesIO(data))
    assert torch.equal(ours.pop("sparse").to_dense(), theirs.pop("sparse").to_dense())
    assert_same(ours, theirs)


# ---- resharding by broadcast


PLAIN = {"step": 11, "note": {"a": [1, 2]}}


def _reshard(uri, config, names, door, planner) -> None:
    for name in names:
        layout = LAYOUTS[name]
        state = spread(full_state(), layout, blank=True)
        values = {"step": 0, "note": {"a": [0, 0]}} if planner is DynamicMetaLoadPlanner else {}
        state |= values
        reader = BroadcastingTorchSaveReader(uri, config=config)
        load = cloudckpt.load if door == "cloudckpt" else dcp.load
        load(state, storage_reader=reader, planner=planner(flatten_state_dict=True))
        assert {key: state.pop(key) for key in values} == (PLAIN if values else {})
        check_local_parts(state, layout)


@pytest.mark.parametrize(
    ("door", "where", "planner"),
    [("cloudckpt", "s3", DynamicMetaLoadPlanner), ("torch", "local", stock.DynamicMetaLoadPlanner)],
)
def test_a_file_loads_into_shards(door, where, planner, places, ranks):
    place = places(where)
    put(place, "model.pt", bytes_of_file(full_state() | PLAIN))
    names = ["2 rows", "2 columns"]
    ranks(2, _reshard, place.at("model.pt").uri, place.config, names, door, planner)


def _freed() -> torch.Tensor:
    tensor = torch.zeros(4, 5)
    tensor.untyped_storage().resize_(0)
    return tensor


MISFITS = {
    "another shape": (lambda: {"t": torch.zeros(3, 5)}, errors.ShapeMismatchError),
    "a missing key": (lambda: {"u": torch.zeros(4, 5)}, errors.MissingKeyError),
    "a tensor for a value": (lambda: {"v": torch.zeros(1)}, errors.UnsupportedTensorError),
    "freed": (lambda: {"t": _freed()}, errors.UnsupportedTensorError),
    "int": (lambda: {"t": torch.zeros(4, 5, dtype=torch.int64)}, errors.UnsupportedTensorError),
    "expanded": (lambda: {"t": torch.zeros(1, 5).expand(4, 5)}, errors.UnsupportedTensorError),
    "sparse": (lambda: {"t": torch.zeros(4, 5).to_sparse()}, errors.UnsupportedTensorError),
}


def _into(place: Place, kind: str = "") -> None:
    """Loads into a state that does not fit on the second rank."""
    is_misfit = dist.get_rank() == 1 and kind
    state = MISFITS[kind][0]() if is_misfit else {"t": torch.zeros(4, 5)}
    reader = BroadcastingTorchSaveReader(place.uri, 1, config=place.config)
    cloudckpt.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner())


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_on_one_rank_is_told_on_every_rank(kind, local, ranks):
    put(local, "model.pt", bytes_of_file({"t": numbered(4, 5), "v": 3}))
    raised = ranks.errors(2, _into, local.at("model.pt"), kind)
    assert [type(error) for error in raised] == [MISFITS[kind][1]] * 2
    assert all(local.uri in str(error) for error in raised)
    assert {error.item for error in raised} == {*MISFITS[kind][0]()}


@pytest.mark.parametrize("kind", ["truncated", "text", "missing"])
def test_an_unreadable_file_is_told_on_every_rank(kind, local, ranks):
    put(local, "model.pt", BROKEN[kind][0])
    raised = ranks.errors(2, _into, local.at("model.pt"))
    assert [type(one) for one in raised] == [BROKEN[kind][1]] * 2


def test_one_process_can_load_without_a_group(local):
    put(local, "model.pt", bytes_of_file(nested_state()))
    state = blank_like(nested_state())
    reader = BroadcastingTorchSaveReader(config=local.config)
    cloudckpt.load(
        state,
        checkpoint_id=local.at("model.pt").uri,
        storage_reader=reader,
        planner=DynamicMetaLoadPlanner(),
    )
    assert_same(plain(state), plain(nested_state()))


def test_a_value_that_holds_tensors_is_not_loaded_as_one(local):
    put(local, "model.pt", bytes_of_file({"a": (numbered(5),)}))
    reader = BroadcastingTorchSaveReader(local.at("model.pt").uri, config=local.config)
    state = {"a": (torch.zeros(5),)}
    with pytest.raises(errors.UnsupportedTensorError) as caught:
        cloudckpt.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    assert caught.value.item == "a"


# ---- a checkpoint anew


def test_the_notes_of_a_new_checkpoint_are_of_the_save_that_its_state_is_of(tmp_path, monkeypatch):
    def save(step: int) -> None:
        notes = cloudckpt.checkpoint.notes.Notes(step=step)
        writer = cloudckpt.CloudStorageWriter(tmp_path / "old", notes=notes)
        cloudckpt.save({"step": step}, storage_writer=writer)

    loaded = format_utils._content_of

    def replaced_meanwhile(reader):
        content = loaded(reader)
        if content["step"] == 1:
            save(2)
        return content

    save(1)
    monkeypatch.setattr(format_utils, "_content_of", replaced_meanwhile)
    dcp_to_dcp(tmp_path / "old", tmp_path / "new")
    state = {"step": 0}
    cloudckpt.load(state, checkpoint_id=tmp_path / "new")
    assert state["step"] == cloudckpt.inspect(tmp_path / "new").notes.step
