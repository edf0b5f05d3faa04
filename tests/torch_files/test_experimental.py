"""torch's experimental checkpointers save to and load from URIs, one object a rank."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointError,
    KeyCollisionError,
    ShapeMismatchError,
)
from cloudckpt.stores.registry import open_store
from cloudckpt.torch_files import object_file
from cloudckpt.uri import CheckpointURI
from dcp.places import Place
from dcp.values import assert_same, blank_like, numbered
from support.faulty_store import FaultyStore

try:
    from torch.distributed.checkpoint._experimental import (
        AsyncCheckpointer,
        CheckpointReader,
        CheckpointStagerConfig,
        CheckpointWriter,
        CheckpointWriterConfig,
        DefaultStager,
        RankInfo,
        SyncCheckpointer,
        WriterHook,
    )
    from torch.distributed.checkpoint._experimental.barriers import Barrier, DistBarrier
    from torch.distributed.checkpoint._experimental.builder import default_subprocess_init_fn
    from torch.distributed.checkpoint._experimental.checkpoint_process import (
        CheckpointProcess,
        CheckpointProcessConfig,
    )

    from cloudckpt.experimental import CloudCheckpointReader, CloudCheckpointWriter
except ImportError as exc:
    pytest.skip(
        f"this torch has no torch.distributed.checkpoint._experimental: {exc}",
        allow_module_level=True,
    )

MIB = 1024 * 1024
_PATIENCE = 150.0
_RANK = RankInfo(global_rank=0, global_world_size=1)


def state():
    return {
        "model": {"weight": numbered(50, 70), "bias": numbered(7, dtype=torch.bfloat16)},
        "groups": [{"lr": 0.1, "momentum": numbered(9)}],
        "pair": (numbered(2), 5),
        "step": 7,
    }


def writer(place: Place, **options) -> CloudCheckpointWriter:
    return CloudCheckpointWriter(rank_info=_RANK, options=place.config, **options)


def reader(place: Place, **options) -> CloudCheckpointReader:
    return CloudCheckpointReader(_RANK, options=place.config, **options)


# ---- the writer


def test_stock_reader_reads_what_we_write_and_we_what_stock_writes(local, tmp_path):
    writer(local).write(local.uri, state())
    assert_same(CheckpointReader(_RANK).read(local.path)[0], state())
    CheckpointWriter(CheckpointWriterConfig(), _RANK).write(str(tmp_path), state())
    assert_same(reader(local).read(str(tmp_path))[0], state())


class Note(WriterHook, Barrier):
    """Writes down who was called when."""

    def __init__(self, names=None, fail=None):
        self.calls, self.names, self.fail = [], names, fail

    def note(self, name):
        self.calls.append((name, self.names() if self.names else None))
        if name == self.fail:
            raise KeyError(name)

    def pre_commit(self, path, **kwargs):
        self.note(f"pre_commit {kwargs}")

    def post_commit(self, path, **kwargs):
        self.note(f"post_commit {kwargs}")

    def execute_barrier(self):
        self.note("barrier")


def test_hooks_and_barrier_are_called_in_the_order_of_torchs_writer(s3, tmp_path):
    ours, theirs = Note(s3.names), Note(lambda: os.listdir(tmp_path))
    assert writer(s3, barrier=ours, commit_hook=ours).write(s3.uri, state(), step=3) is None
    CheckpointWriter(CheckpointWriterConfig(), _RANK, theirs, theirs).write(
        str(tmp_path), state(), step=3
    )
    assert ours.calls == theirs.calls
    assert [name for name, _ in ours.calls] == [
        "pre_commit {'step': 3}", "barrier", "post_commit {'step': 3}",
    ]  # fmt: skip
    assert ours.calls[0][1] == ["checkpoint_0.pt"]


def test_a_failed_write_leaves_the_old_object_and_calls_no_hook(place, monkeypatch):
    place = place.having(memory_budget=32 * MIB, part_size=5 * MIB)
    writer(place).write(place.uri, state())
    store = FaultyStore(open_store(CheckpointURI.parse(place.uri), place.config))
    store.fail("put_part", AccessDeniedError, calls=[2])
    monkeypatch.setattr(object_file, "open_store", lambda uri, config: store)
    note = Note()
    with pytest.raises(AccessDeniedError, match="injected"):
        writer(place, barrier=note, commit_hook=note).write(place.uri, {"t": numbered(6 * MIB)})
    assert note.calls == []
    assert place.unfinished() == []
    assert_same(reader(place).read(place.uri)[0], state())


# ---- the reader


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by torch's reader
def test_a_part_is_what_torchs_reader_gives(local):
    saved = state() | {"strange.key": {"a": numbered(3)}, "none": None}
    del saved["pair"]  # which torch's reader leaves fake
    writer(local).write(local.uri, saved)
    for wanted in (
        {},
        {"model": None},
        {"groups": None, "nothing": None, "model": {"weight": None, "other": 3}},
        {"groups": [None], "strange.key": {"b": None}},
        {"groups": [{"lr": 3.0}], "step": 1, "none": None},
        {"model": {"bias": torch.zeros(7, dtype=torch.bfloat16)}},
    ):
        theirs = CheckpointReader(_RANK).read(local.path, blank_like(wanted))
        ours = reader(local).read(local.uri, blank_like(wanted))
        assert_same(list(ours), list(theirs))
    bias = torch.zeros(7, dtype=torch.bfloat16)
    loaded, _ = reader(local).read(local.uri, wanted := {"model": {"bias": bias}})
    assert loaded is wanted
    assert_same(bias, saved["model"]["bias"])


ODD = {"s": torch.eye(4).to_sparse(), "u": torch.ones(4), "v": torch.zeros(4)}
ROOM = torch.zeros(5)


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ({"model": {"weight": torch.zeros(3)}}, ShapeMismatchError, r"model\.weight"),
        ({"step": "seven"}, CheckpointError, "step is of class str"),
        ({"groups": [None, 3]}, CheckpointError, r"groups\[1\] is of class int"),
        ({"model": torch.zeros(3)}, CheckpointError, "model is of class Tensor"),
        ({"s": torch.zeros(4, 4)}, CheckpointError, "sparse"),
        ({"u": ROOM[1:], "v": ROOM[:4]}, KeyCollisionError, "u and v share memory"),
    ],
)
def test_what_does_not_fit_is_named(wanted, error, words, local):
    writer(local).write(local.uri, state() | ODD)
    with pytest.raises(error, match=words) as caught:
        reader(local).read(local.uri, wanted)
    assert caught.value.uri == local.at("checkpoint_0.pt").uri


# ---- torch's checkpointers


_ON_CPU = CheckpointStagerConfig(
    use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def test_the_async_checkpointer_works_unchanged(s3):
    process = CheckpointProcess(
        _RANK,
        CheckpointProcessConfig(subprocess_init_timeout_secs=250),
        default_subprocess_init_fn,
        (),
        CloudCheckpointWriter,
        {"options": s3.config},
    )
    checkpointer = AsyncCheckpointer(DefaultStager(_ON_CPU), process, reader(s3))
    with contextlib.closing(checkpointer):
        for step in (1, 2):
            _, written = checkpointer.save(s3.at(f"{step}").uri, state() | {"step": step})
            written.result(_PATIENCE)
        assert_same(checkpointer.load(s3.at("2").uri), state() | {"step": 2})
        assert_same(checkpointer.load(s3.at("1").uri, {"step": None}), {"step": 1})
    assert s3.names() == ["1/checkpoint_0.pt", "2/checkpoint_0.pt"]


def _each_its_own(place: Place) -> None:
    saved = {"t": numbered(5, first=dist.get_rank())}
    ours = CloudCheckpointWriter(barrier=DistBarrier(), options=place.config)
    theirs = CloudCheckpointReader(options=place.config)
    with contextlib.closing(SyncCheckpointer(ours, theirs)) as checkpointer:
        checkpointer.save(place.uri, saved)
        assert place.names() == ["checkpoint_0.pt", "checkpoint_1.pt"]
        assert_same(checkpointer.load(place.uri), saved)
        assert_same(checkpointer.load(place.uri, {"t": None}), saved)
        with pytest.raises(RuntimeError, match="missing keys"):
            checkpointer.load(place.uri, {"gone": None}, strict=True)


def test_each_rank_has_an_object_of_its_own(s3, ranks):
    ranks(2, _each_its_own, s3)
