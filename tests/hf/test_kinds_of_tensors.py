"""Tensors of all kinds, as chance has them, make files that the safetensors package reads."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import cloudckpt.hf
from cloudckpt.checkpoint.objects import natural_order
from cloudckpt.errors import KeyCollisionError, UnsupportedTensorError
from dcp.values import assert_same, numbered

safetensors_torch = pytest.importorskip("safetensors.torch")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


class Draw:
    """Tensors and options, as chance has them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

    def tensor(self) -> torch.Tensor:
        dtype = self.rng.choice(DTYPES)
        edges = [0, 1, 1, 2, 3, 7, 40]
        shape = [self.rng.choice(edges) for _ in range(self.rng.choice([0, 1, 2, 2, 3, 4]))]
        flat = self.bytes(torch.Size(shape).numel() * dtype.itemsize)
        if dtype == torch.bool:
            flat &= 1
        tensor = flat.view(dtype).view(shape)
        view = self.rng.choice(["plain", "plain", "transposed", "steps", "expanded", "other"])
        if view == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, -1)
        if view == "steps" and tensor.dim():
            return tensor[..., ::2]
        if view == "expanded":
            return tensor.unsqueeze(0).expand(3, *tensor.shape)
        if view == "other" and dtype == torch.complex64:
            return self.rng.choice([tensor.conj(), tensor.imag])
        return tensor

    def name(self, number: int) -> str:
        text = self.rng.choice(["layers.{}.weight", "a/b {}", "ä\u2028\"'\\{}", "{}" + "n" * 500])
        return text.format(number)

    def state(self) -> dict[str, torch.Tensor]:
        state = {self.name(n): self.tensor() for n in range(self.rng.randint(0, 12))}
        if state and self.rng.random() < 0.5:  # tied
            state["tied"] = state[self.rng.choice([*state])]
        return state


def _read(place) -> dict[str, torch.Tensor]:
    """All tensors, by the package, with what the index says of them."""
    files = {name for name in place.names() if name.endswith(".safetensors")}
    tensors = {name: safetensors_torch.load(place.read(name)) for name in files}
    if files != {"model.safetensors"}:
        index = json.loads(place.read("model.safetensors.index.json"))
        assert set(index["weight_map"].values()) == files
        total = sum(t.nbytes for found in tensors.values() for t in found.values())
        assert index["metadata"]["total_size"] == total
        for name, file in index["weight_map"].items():
            assert name in tensors[file]
    return {name: tensor for found in tensors.values() for name, tensor in found.items()}


def _assert_same(found, expected, seed) -> None:
    assert found.keys() == expected.keys(), f"seed {seed}"
    for name, tensor in expected.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        plain = whole.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert_same(found[name], plain, f"{seed}: {name}")


def test_what_chance_draws_is_read_by_the_package_and_loaded(places) -> None:
    for seed in range(60):
        draw, place = Draw(seed), places("local")
        state = draw.state() if seed else {}
        cloudckpt.hf.save(
            state,
            place.uri,
            max_shard_size=draw.rng.choice([1, 300, 5000, "5GB"]),
            config=place.config,
        )
        _assert_same(_read(place), _written_once(state), seed)
        loaded = {n: torch.zeros_like(t, memory_format=torch.contiguous_format)
                  for n, t in state.items()}  # fmt: skip
        cloudckpt.hf.load(loaded, place.uri, config=place.config)
        _assert_same(loaded, state, seed)


def _written_once(state) -> dict[str, torch.Tensor]:
    names = sorted(state, key=natural_order)  # of the tied names the first one is in the files
    return {
        name: state[name]
        for at, name in enumerate(names)
        if not state[name].numel() or not any(state[one] is state[name] for one in names[:at])
    }


PLACEMENTS = [
    (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1)),
    (Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Replicate()),
    (Replicate(), Replicate()), (_StridedShard(0, split_factor=2), Shard(0)),
]  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _save_drawn(place, seeds) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for seed in seeds:
        here, draw = place.at(str(seed)), Draw(seed)
        state, full = {}, {}
        for number in range(draw.rng.randint(1, 8)):
            dtype = draw.rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
            shape = [draw.rng.choice([1, 2, 3, 5, 8, 33, 600]) for _ in range(2)]
            placements = draw.rng.choice(PLACEMENTS)
            if isinstance(placements[0], _StridedShard):
                shape[0] = shape[0] * 4
            whole = numbered(*shape, dtype=dtype) + seed
            full[f"{number}"] = whole
            sharded = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(sharded.full_tensor(), whole)
            state[f"{number}"] = sharded
        for rank in range(4):  # as with pipeline parallelism
            full[f"of rank {rank}"] = numbered(9 + rank, 100)
        own = f"of rank {dist.get_rank()}"
        state[own] = full[own]
        max_shard_size = draw.rng.choice([1000, 100_000, "5GB"])
        cloudckpt.hf.save(state, here.uri, max_shard_size=max_shard_size, config=here.config)
        if dist.get_rank() == 0:
            _assert_same(_read(here), full, seed)
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        cloudckpt.hf.load(blank, here.uri, config=here.config)
        for name, tensor in blank.items():
            assert_same(_local(tensor), _local(state[name]), f"{seed}: {name}")


def test_shards_as_chance_has_them_make_whole_tensors(ranks, local) -> None:
    ranks(4, _save_drawn, local.having(part_size=5 * 1024**2), range(25))


@pytest.mark.parametrize("kind", ["complex128", "dtype", "number", "meta", "freed", "sparse"])
def test_what_cannot_be_written_is_refused_by_name(local, kind: str) -> None:
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    dtype = torch.complex128 if kind == "dtype" else None
    values = {
        "dtype": lambda: numbered(3),
        "complex128": lambda: torch.zeros(2, dtype=torch.complex128),
        "number": lambda: 3,
        "meta": lambda: torch.zeros(3, device="meta"),
        "freed": lambda: freed,
        "sparse": lambda: torch.eye(3).to_sparse(),
    }
    state = {"w": numbered(3), "odd": values[kind]()}
    with pytest.raises(UnsupportedTensorError, match="dtype" if dtype else "odd"):
        cloudckpt.hf.save(state, local.uri, dtype=dtype, config=local.config)
    assert local.names() == []


def test_names_that_fall_together_are_refused(local) -> None:
    state = {"a": {"b": numbered(2)}, "a.b": numbered(3)}
    with pytest.raises(KeyCollisionError):
        cloudckpt.hf.save(state, local.uri, config=local.config)
    with pytest.raises(UnsupportedTensorError, match="__metadata__"):
        cloudckpt.hf.save({"__metadata__": numbered(2)}, local.uri, config=local.config)
    assert local.names() == []
    cloudckpt.hf.save({"a": numbered(2), "b": numbered(3)}, local.uri, config=local.config)
    with pytest.raises(KeyCollisionError):
        cloudckpt.hf.load({"c": torch.zeros(2)}, local.uri, key_mapping=lambda name: "c",
                          config=local.config)  # fmt: skip
