"""Models are saved and loaded; the safetensors package itself looks at the files."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

import cloudckpt
import cloudckpt.hf
from cloudckpt import errors
from dcp.layouts import LAYOUTS, full_state, spread
from dcp.values import assert_same, numbered

safetensors_torch = pytest.importorskip("safetensors.torch")


def _files(place):
    """All tensors of a model, as the safetensors package reads them, and its files."""
    names = [name for name in place.names() if name.endswith(".safetensors")]
    tensors = {}
    for name in names:
        tensors |= safetensors_torch.load(place.read(name))
    return tensors, names


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor, name)


def test_strided_tensors_and_other_types_are_converted_on_the_way(local) -> None:
    state = {
        "columns": numbered(3000, 700).t(),
        "weights": numbered(2000, 900, dtype=torch.float64),
        "counts": numbered(5, dtype=torch.int64),
    }
    cloudckpt.hf.save(state, local.uri, dtype=torch.bfloat16, config=local.config)
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    _assert_same(_files(local)[0], expected)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    cloudckpt.hf.load(loaded, local.uri, config=local.config)
    for name, tensor in loaded.items():
        assert_same(tensor, expected[name].to(tensor.dtype), name)


def _large() -> dict[str, torch.Tensor]:
    wide = numbered(2600, 2048)  # more of a part comes from another rank than a slab holds
    return full_state() | {"embedding": numbered(3001, 1999), "wide": wide}


def _save_spread(place, layout, **options):
    state = spread(_large(), LAYOUTS[layout])
    cloudckpt.hf.save(state, place.uri, config=place.config, **options)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("local", one) for one in LAYOUTS if LAYOUTS[one].world > 1),
     ("s3", "2x2 blocks"), ("s3", "3 rows")],
)  # fmt: skip
def test_ranks_write_the_files_together(ranks, places, kind: str, layout: str) -> None:
    place = places(kind).having(part_size=5 * 1024**2)
    save = functools.partial(_save_spread, max_shard_size="25MB")
    ranks(LAYOUTS[layout].world, save, place, layout)
    tensors, names = _files(place)
    _assert_same(tensors, _large())
    assert names == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert not place.unfinished()


def test_a_store_that_wants_equal_parts_gets_them(s3) -> None:
    place = s3.having(part_size=5 * 1024**2, s3=dataclasses.replace(s3.config.s3, dialect="r2"))
    cloudckpt.hf.save(_large(), place.uri, config=place.config)
    _assert_same(_files(place)[0], _large())
    bucket, prefix = place._key()
    heads = [
        place.client().head_object(
            Bucket=bucket, Key=f"{prefix}/model.safetensors", PartNumber=number
        )
        for number in range(1, 9)
    ]
    assert [head["ContentLength"] for head in heads] == [5 * 1024**2] * 8


def _tied(rows: int) -> dict[str, torch.Tensor]:
    embedding = numbered(rows, 40)
    other = numbered(rows, 40, first=7)
    return {"embed.weight": embedding, "head.weight": embedding, "other": other}


def _save_tied(place) -> None:
    state = spread(_tied(12), LAYOUTS["2 rows"])
    state["head.weight"] = state["embed.weight"]
    cloudckpt.hf.save(state, place.uri, config=place.config)


@pytest.mark.parametrize("world", [1, 2])
def test_tied_weights_are_written_once_and_loaded_by_both_names(ranks, local, world) -> None:
    if world == 1:
        cloudckpt.hf.save(_tied(12), local.uri, config=local.config)
    else:
        ranks(world, _save_tied, local)
    expected = {name: tensor.clone() for name, tensor in _tied(12).items()}
    once = {name: expected[name] for name in ("embed.weight", "other")}
    _assert_same(_files(local)[0], once)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for head in (loaded["head.weight"], loaded["embed.weight"]):
        loaded["head.weight"] = head
        cloudckpt.hf.load(loaded, local.uri, config=local.config)
        _assert_same(loaded, expected)
    loaded["other"] = loaded["embed.weight"]
    with pytest.raises(errors.KeyCollisionError, match="other"):
        cloudckpt.hf.load(loaded, local.uri, config=local.config)


def test_tied_weights_are_loaded_by_the_package_as_its_own(local) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    cloudckpt.hf.save(model := Model().state_dict(), local.uri, config=local.config)
    fresh = Model()
    safetensors_torch.load_model(fresh, f"{local.path}/model.safetensors")
    _assert_same(fresh.state_dict(), model)
    safetensors_torch.save_model(fresh, f"{local.path}/theirs.safetensors")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    cloudckpt.hf.load(loaded, f"{local.uri}/theirs.safetensors", config=local.config)
    _assert_same(loaded, model)


def test_views_of_one_memory_with_other_shapes_are_not_tied(local) -> None:
    memory = numbered(6, 4)
    state = {"w": memory, "t": memory.t(), "half": memory[:3], "flat": memory.view(-1)}
    cloudckpt.hf.save(state, local.uri, config=local.config)
    _assert_same(_files(local)[0], {name: tensor.contiguous() for name, tensor in state.items()})


def test_names_are_mapped_and_tied_weights_may_lack(local) -> None:
    cloudckpt.hf.save({"model.a": numbered(4), "b": numbered(2)}, local.uri, config=local.config)
    state = {"a": torch.zeros(4), "tied": torch.ones(3)}
    mapping = {"model.a": "a"}.get
    with pytest.raises(errors.MissingKeyError, match="tied"):
        cloudckpt.hf.load(dict(state), local.uri, key_mapping=mapping, config=local.config)
    cloudckpt.hf.load(state, local.uri, key_mapping=mapping, strict=False, config=local.config)
    _assert_same(state, {"a": numbered(4), "tied": torch.ones(3)})


def test_torchs_load_begins_from_a_model(local) -> None:
    cloudckpt.hf.save(full_state(), local.uri, max_shard_size=1, config=local.config)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in full_state().items()}
    torch.distributed.checkpoint.load(loaded, storage_reader=local.reader())
    _assert_same(loaded, full_state())


def test_a_model_replaces_another_one_wholly(place) -> None:
    cloudckpt.hf.save(full_state(), place.uri, max_shard_size="1kB", config=place.config)
    for rows in (4, 3):
        cloudckpt.hf.save({"w": numbered(rows)}, place.uri, config=place.config)
        assert place.names() == ["model.safetensors"]
    cloudckpt.hf.save(
        {"w": numbered(3), "v": numbered(2)}, place.uri, max_shard_size=1, config=place.config
    )
    _assert_same(_files(place)[0], {"w": numbered(3), "v": numbered(2)})
    assert len(place.names()) == 3
    with pytest.raises(errors.CheckpointExistsError):
        cloudckpt.hf.save(
            {"w": numbered(4)}, place.uri, config=place.having(overwrite=False).config
        )
    _assert_same(_files(place)[0], {"w": numbered(3), "v": numbered(2)})


def test_no_model_is_not_found(place) -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        cloudckpt.hf.load({"w": torch.zeros(1)}, place.uri, config=place.config)


def _names_of_metadata(place) -> list[str]:
    writer = cloudckpt.hf.SafetensorsWriter(place.uri, config=place.config)
    return list(cloudckpt.save({"t": numbered(10)}, storage_writer=writer).state_dict_metadata)


def test_every_rank_gets_the_metadata_of_a_model(ranks, local) -> None:
    assert ranks(2, _names_of_metadata, local) == [["t"], ["t"]]


def test_a_model_is_looked_at_as_a_checkpoint_is(local) -> None:
    tensors = {"a": numbered(20, 30), "b": numbered(50, dtype=torch.bfloat16), "n": torch.tensor(7)}
    model, checkpoint = local.at("model"), local.at("checkpoint")
    cloudckpt.hf.save(tensors, model.uri, max_shard_size=2000, config=local.config)
    cloudckpt.save({**tensors, "n": torch.tensor(8)}, checkpoint_id=checkpoint.uri)
    found = cloudckpt.inspect(model.uri)
    assert not found.has_checksums
    assert {(i.name, i.shape, i.dtype, i.nbytes, i.chunks) for i in found.items} == {
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes, 1)
        for name, t in tensors.items()
    }
    verified = cloudckpt.verify(model.uri)
    assert (verified.items, verified.has_checksums) == (3, False)
    assert verified.nbytes == sum(t.nbytes for t in tensors.values())
    compared = cloudckpt.diff(model.uri, checkpoint.uri)
    assert {i.name: i.verdict for i in compared.items} == dict.fromkeys(tensors, "unknown")
    Path(model.path, "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.CheckpointCorruptError, match="model-00002"):
        cloudckpt.verify(model.uri)
