"""Checkpoints become models, and models checkpoints."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cloudckpt
import cloudckpt.format_utils
from cloudckpt.checksum import CRC32C, Blocks
from cloudckpt.config import MIB
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    KeyCollisionError,
)
from cloudckpt.hf import export_checkpoint
from cloudckpt.hf.exporting import Range, cut
from cloudckpt.transfer.landing import StoredBytes
from dcp.layouts import LAYOUTS, full_state, spread
from dcp.values import assert_same, numbered


def _check(place, expected) -> None:
    found = {name: torch.full_like(tensor, 1) for name, tensor in expected.items()}
    cloudckpt.hf.load(found, place.uri, config=place.config)
    for name, tensor in expected.items():
        assert_same(found[name], tensor, name)


def _large() -> dict[str, torch.Tensor]:
    return {f"layer.{n}": numbered(3, MIB) + n for n in range(4)} | full_state()


def test_the_store_copies_nearly_all(s3) -> None:
    state = _large() | {"step": 3}
    cloudckpt.save(state, checkpoint_id=s3.at("checkpoint").uri, config=s3.config)
    model = s3.at("model")
    done = export_checkpoint(s3.at("checkpoint").uri, model.uri, config=model.config)
    assert done.files == ["model.safetensors"]
    assert done.left_out == ["step"]
    assert done.nbytes == len(model.read("model.safetensors"))
    assert done.moved < 7 * MIB, "only the begin, and the small tensors at the end"
    _check(model, _large())
    assert not s3.unfinished()


@pytest.mark.parametrize("options", [{"dtype": torch.float16}, {"max_shard_size": "13MB"}],
                         ids=["type", "shards"])  # fmt: skip
def test_options_are_those_of_a_save(s3, options) -> None:
    state = {name: tensor for name, tensor in _large().items() if "layer" in name}
    cloudckpt.save(state, checkpoint_id=s3.at("checkpoint").uri, config=s3.config)
    model = s3.at("model")
    done = export_checkpoint(s3.at("checkpoint").uri, model.uri, config=s3.config, **options)
    dtype = options.get("dtype", torch.float32)
    _check(model, {name: tensor.to(dtype) for name, tensor in state.items()})
    assert len(done.files) == (1 if "dtype" in options else 4)


def _save(place, layout):
    cloudckpt.save(
        spread(full_state(), LAYOUTS[layout]), checkpoint_id=place.uri, config=place.config
    )


@pytest.mark.parametrize("layout", ["3 rows", "2x2 blocks"])
def test_shards_are_put_together(ranks, places, layout: str) -> None:
    for place in (places("s3"), places("local")):
        ranks(LAYOUTS[layout].world, _save, place.at("checkpoint"), layout)
        export_checkpoint(place.at("checkpoint").uri, place.at("model").uri, config=place.config)
        _check(place.at("model"), full_state())


def test_names_are_mapped_and_left_out(local) -> None:
    state = {"model": {"a": numbered(4)}, "optim": {"a": numbered(9)}}
    cloudckpt.save(state, checkpoint_id=local.at("checkpoint").uri, config=local.config)
    export = functools.partial(
        export_checkpoint, local.at("checkpoint").uri, local.at("model").uri, config=local.config
    )
    done = export(key_mapping={"model.a": "weight"}.get)
    assert done.left_out == ["optim.a"]
    _check(local.at("model"), {"weight": numbered(4)})
    with pytest.raises(KeyCollisionError):
        export(key_mapping=lambda name: "weight")
    with pytest.raises(CheckpointNotFoundError, match="no tensor to export"):
        export(key_mapping=lambda name: None)


def test_stacked_experts_are_not_split_without_a_word(local) -> None:
    stack = {"experts.weight": numbered(8, 3, 2)}
    cloudckpt.save(stack, checkpoint_id=local.at("stack").uri, config=local.config)
    with pytest.raises(ConfigError, match="stack of experts") as caught:
        export_checkpoint(
            local.at("stack").uri,
            local.at("model").uri,
            key_mapping=lambda name: [f"experts.{n}.weight" for n in range(8)],
            config=local.config,
        )
    assert caught.value.item == "experts.weight"


@pytest.mark.parametrize("at", [0, -1], ids=["what is read", "what is copied"])
def test_damage_is_not_exported(s3, at: int) -> None:
    place = s3.at("checkpoint")
    cloudckpt.save({"w": numbered(4, MIB)}, checkpoint_id=place.uri, config=place.config)
    (name,) = place.data()
    data = bytearray(place.read(name))
    data[2 * MIB if at == 0 else 12 * MIB] ^= 1
    bucket, prefix = place._key()
    place.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=bytes(data))
    try:
        export_checkpoint(place.uri, s3.at("model").uri, config=s3.config)
    except CheckpointCorruptError:
        assert s3.at("model").names() == []
        assert not s3.unfinished()
    else:
        assert at == -1, "this server tells no checksums of what it has copied"


def _stored(number: int, nbytes: int, block: int) -> StoredBytes:
    return StoredBytes("key", 0, nbytes, Blocks(CRC32C, block, ()), None, str(number))


@given(st.integers(1, 40), st.lists(st.integers(1, 60), max_size=9), st.integers(28, 90))
def test_parts_are_large_enough_and_make_up_the_file(header, sizes, most) -> None:
    stored = [_stored(number, size, 4) for number, size in enumerate(sizes)]
    parts = list(cut(b"h" * header, stored, least=10, most=most))
    whole = [part if isinstance(part, list) else [part] for part in parts]
    first, *ranges = [one for part in whole for one in part]
    assert first == b"h" * header
    at = dict.fromkeys(map(str, range(len(sizes))), 0)
    for one in ranges:
        assert one.start == at[one.source.item]
        at[one.source.item] = one.stop
    assert [*at.values()] == sizes
    assert [one.source.item for one in ranges] == sorted(one.source.item for one in ranges)
    for part in whole[:-1]:
        assert sum(len(one) if isinstance(one, bytes) else one.nbytes for one in part) >= 10
    assert all(part.start % 4 == 0 for part in parts if isinstance(part, Range))


def test_a_model_becomes_a_checkpoint(local) -> None:
    cloudckpt.hf.save(full_state(), local.at("model").uri, config=local.config)
    cloudckpt.format_utils.dcp_to_dcp(
        local.at("model").uri, local.at("checkpoint").uri, config=local.config
    )
    loaded = {name: torch.zeros_like(tensor) for name, tensor in full_state().items()}
    cloudckpt.load(loaded, checkpoint_id=local.at("checkpoint").uri, config=local.config)
    assert local.at("checkpoint").data()
    for name, tensor in full_state().items():
        assert_same(loaded[name], tensor, name)
