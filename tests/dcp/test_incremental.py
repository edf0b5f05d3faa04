"""What has not changed since an earlier checkpoint of the run is not sent again."""

import dataclasses
import os
import re
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt import CloudStorageWriter
from cloudckpt.checkpoint.base import VALUE, Base, digest_of_bytes, type_prefix
from cloudckpt.checkpoint.objects import is_keep_name
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checksum import CRC64NVME
from cloudckpt.dcp.saving import Contents
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    ConfigError,
    TensorChangedError,
)
from cloudckpt.runs.copying import detach
from cloudckpt.stores.local import LocalStore

from .places import Place
from .values import assert_same, blank_like

FROZEN = 300_000  # elements


def state_at(step: int) -> dict[str, Any]:
    """Much that never changes, little that does, and all kinds of values."""
    made = torch.Generator().manual_seed(0)
    return {
        "frozen": torch.randn(FROZEN, generator=made),
        "turned": torch.randn(400, 300, generator=made).t(),
        "zeros": {"a": torch.zeros(5000), "b": torch.zeros(5000), "empty": torch.empty(0)},
        "small": [torch.randn(7, generator=made) for _ in range(5)],
        "names": ["x"] * 30_000,
        "trained": torch.full((20_000,), float(step)),
        "step": step,
    }


def check(place: Place, step: int) -> None:
    """Whether a step of the run is whole, to the last bit."""
    found = blank_like(state_at(-1))
    place.at(f"step-{step}").load(found)
    assert_same(found, state_at(step))


def saved(place: Place, step: int, **options: Any) -> int:
    """Saves a step of a run; returns the bytes that were sent."""
    config = place.having(incremental=True).config
    writer = CloudStorageWriter(place.at(f"step-{step}").uri, config=config, **options)
    cloudckpt.save(state_at(step), storage_writer=writer)
    assert writer.transferred is not None
    return writer.transferred.nbytes


def marks(place: Place) -> list[str]:
    return [name for name in place.names() if is_keep_name(name.rpartition("/")[2])]


def test_only_what_has_changed_is_sent_and_every_step_is_whole(place) -> None:
    first = saved(place, 1)
    assert all(saved(place, step) < first / 10 for step in (2, 3))
    for step in (1, 2, 3):
        check(place, step)
        assert cloudckpt.verify(place.at(f"step-{step}").uri, config=place.config).has_checksums


def test_what_is_detached_stands_alone(local) -> None:
    for step in (1, 2):
        saved(local, step)
    assert detach(local.at("step-2").uri, config=local.config).checkpoints == 1
    assert not cloudckpt.inspect(local.at("step-2").uri, config=local.config).shared
    assert not marks(local)
    cloudckpt.delete(local.at("step-1").uri, config=local.config)
    assert not local.at("step-1").names()
    check(local, 2)
    assert detach(local.at("step-2").uri, config=local.config).checkpoints == 0
    reader = local.at("step-2").reader()
    reader.read_metadata()
    assert len(local.at("step-2").data()) == len({one.name for one in reader.commit.objects})


def _lose(place: Place) -> None:
    for name in place.data():
        os.unlink(f"{place.path}/{name}")


def test_a_base_that_has_lost_an_object_is_named_and_everything_is_sent(local, caplog) -> None:
    for step in (1, 2):
        first = saved(local, step)
    _lose(local.at("step-1"))
    assert saved(local, 3) > 4 * FROZEN > 10 * first
    assert re.search(r"step-2 can't be the base .*step-1/__0_\S* does not exist", caplog.text)
    check(local, 3)
    assert saved(local, 4) < 10 * first
    check(local, 4)


def test_an_object_of_the_base_that_is_lost_meanwhile_is_named(local) -> None:
    class Losing(CommitHook):
        def before_commit(self, uri: str, metadata: Metadata) -> None:
            _lose(local.at("step-1"))

    first = saved(local, 1)
    with pytest.raises(CheckpointCorruptError, match=r"step-1/__0_\d"):
        saved(local, 2, commit_hook=Losing())
    assert not local.at("step-2").names()
    assert saved(local, 3) == first
    check(local, 3)


@pytest.mark.parametrize("between", [(), (2,)], ids=["itself", "one behind it"])
def test_a_step_that_is_saved_again_names_only_what_is_elsewhere(local, between) -> None:
    """It would break when its folder is renamed, if it named that."""
    first = saved(local, 1)
    for step in (*between, 1):
        assert saved(local, step) < first / 10
    assert not cloudckpt.inspect(local.at("step-1").uri, config=local.config).shared
    assert not [name for name in marks(local.at("step-1")) if not between]
    check(local, 1)
    for step in between:
        check(local, step)


def test_a_base_elsewhere_is_refused(local, tmp_path) -> None:
    saved(local, 1)
    for base in (str(tmp_path / "step-1"), local.at("step-1/inner").uri):
        with pytest.raises(ConfigError, match="not in the same folder"):
            saved(local, 2, base=base)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("gone", "no such file"),
        ("damaged", "checksum"),
        ("without digests", "not saved with"),
        ("of torch", "not saved with"),
        ("of another cloud", "crc64nvme.*crc32c"),
        ("not of UTF-8", "names in UTF-8"),
    ],
)
def test_without_a_base_that_can_be_used_all_is_sent(local, what, why, monkeypatch, caplog) -> None:
    place = local
    config = place.config
    base = place.at("step-1")
    if what == "without digests":
        cloudckpt.save(state_at(1), checkpoint_id=place.at("step-1").uri, config=config)
    elif what == "of torch":
        dcp.save(state_at(1), checkpoint_id=place.at("step-1").path, no_dist=True)
    elif what == "damaged":
        saved(place, 1)
        with open(f"{place.at('step-1').path}/.metadata", "r+b") as file:
            file.seek(-100, 2)
            file.write(b"damaged!")
    elif what == "of another cloud":  # as a copy from there has them
        there = dataclasses.replace(LocalStore.capabilities, checksum=CRC64NVME)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "capabilities", there)
            saved(place, 1)
    elif what == "not of UTF-8":
        saved(place, 1)
        base = place.at(os.fsdecode(b"caf\xe9-1"))
        shutil.move(place.at("step-1").path, base.path)
    caplog.clear()
    sent = saved(place, 2, base=base.uri)
    assert re.search(f"can't be the base .*{why}", caplog.text)
    assert sent > 4 * FROZEN
    check(place, 2)
    assert not marks(place)
    assert saved(place, 3) < sent / 10  # it has digests itself


@pytest.mark.parametrize("step", [1, 2], ids=["over its base", "beside it"])
def test_a_save_that_fails_leaves_its_base_whole_and_no_mark(local, step, monkeypatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        assert step == 1 or len(marks(local)) == 1
        raise AccessDeniedError("not on a Friday", certain=True)

    saved(local, 1)
    before = local.names()
    monkeypatch.setattr("cloudckpt.checkpoint.commit.commit", refuse)
    with pytest.raises(AccessDeniedError):
        saved(local, step)
    assert local.names() == before
    check(local, 1)


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("own", ["step-9", "last"])
def test_only_a_step_is_taken_for_a_base(local, own, forgets, monkeypatch) -> None:
    config = local.having(incremental=True).config
    for step, name in enumerate(("step-8", "best", "zzz", own)):
        cloudckpt.save(state_at(step), checkpoint_id=local.at(name).uri, config=config)
        if forgets:  # as of another process
            monkeypatch.setattr("cloudckpt.dcp.incremental._bases", {})
    found = cloudckpt.inspect(local.at(own).uri, config=config).shared
    assert list(found) == [local.at("step-8").uri]
    cloudckpt.delete(local.at("zzz").uri, config=config)
    assert not local.at("zzz").names()  # nobody refers to it


@pytest.mark.parametrize("kind", ["plain", "strided", "small"])
def test_what_changes_after_its_digest_was_made_is_refused(local, monkeypatch, kind) -> None:
    """Its row would name bytes that another save, of what it was, would take for its own."""
    tensor = torch.zeros(500, 4 if kind == "small" else 400)
    known = Contents.known

    def change(*given):
        tensor.add_(1)
        return known(*given)

    monkeypatch.setattr(Contents, "known", change)
    state = {"w": tensor.t() if kind == "strided" else tensor}
    with pytest.raises(TensorChangedError) as caught:
        local.at("step-1").having(incremental=True).save(state)
    assert caught.value.item == "w"
    assert not local.names()


def test_values_of_equal_bytes_and_another_type_or_shape_are_others() -> None:
    kinds = [(torch.float32, (2, 3)), (torch.int32, (2, 3)), (torch.float32, (3, 2))]
    digests = {digest_of_bytes(type_prefix(*kind), bytes(24)) for kind in kinds}
    assert len(digests | {digest_of_bytes(VALUE, bytes(24))}) == 4


def test_equal_halves_of_digests_are_no_identity() -> None:
    columns = [torch.tensor(column) for column in ([0, 0], [0, 64], [10, 20], [7, 7], [1, 2])]
    base = Base(Record(attempt="a", extents=Extents(*columns)))
    assert base.find((7, 2)).offset == 64
    assert base.find((7, 3)) is None
    assert base.find((2, 7)) is None


# ---- ranks, and the background


def _sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(12 * 30_000, dtype=torch.float32).view(12, -1)
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "trained": distribute_tensor(torch.full((12, 50), float(step)), mesh, [Shard(0)]),
        "own": {str(dist.get_rank()): torch.full((30_000,), float(dist.get_rank()))},
        "step": step,
    }


def _save_on_ranks(place: Place, steps: list[int], how: str = "") -> list[int]:
    sent, config = [], place.having(incremental=True).config
    for step in steps:
        writer = CloudStorageWriter(place.at(f"step-{step}").uri, config=config)
        if not how:
            cloudckpt.save(_sharded(step), storage_writer=writer)
        else:
            kind = AsyncCheckpointerType[how]
            cloudckpt.async_save(
                _sharded(step), storage_writer=writer, async_checkpointer_type=kind
            ).result()
        sent.append(writer.transferred.nbytes)
    cloudckpt.checkpointer.close_async_savers()
    return sent


def _check_on_ranks(place: Place, steps: tuple[int, ...]) -> None:
    for step in steps:
        wanted, found = _sharded(step), blank_like(_sharded(-1))
        del found["own"], wanted["own"]
        place.at(f"step-{step}").load(found)
        assert found["step"] == step
        for name in ("rows", "trained"):
            assert_same(found[name].full_tensor(), wanted[name].full_tensor())


@pytest.mark.parametrize("how", ["THREAD", "PROCESS"])
def test_ranks_refer_each_to_what_it_has_written(local, ranks, how) -> None:
    for first, second in ranks(2, _save_on_ranks, local, [1, 2], how):
        assert second < first / 10
    ranks(2, _check_on_ranks, local, (1, 2))


def test_chunks_that_other_ranks_hold_now_are_found(local, ranks) -> None:
    """Six rows a rank, then four, then all: what is a chunk of the same rows is not sent again."""
    sent = [
        sum(step for [step] in ranks(world, _save_on_ranks, local, [number]))
        for number, world in enumerate((2, 2, 3, 3), 1)
    ]
    assert sent[1] < sent[0] / 10
    assert sent[3] < sent[2] / 10
    ranks(3, _check_on_ranks, local, (1, 2, 3, 4))
