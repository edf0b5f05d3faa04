import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cloudckpt
import cloudckpt.hf

INDEX = "model.safetensors.index.json"


def _model(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )


def _downloaded(uri: str, folder: Path) -> list[str]:
    """The names of the files, as a client that knows nothing of cloudckpt copies them."""
    import boto3

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    for entry in found:
        client.download_file(bucket, entry["Key"], str(folder / Path(entry["Key"]).name))
    return sorted(Path(entry["Key"]).name for entry in found)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("way", ["save", "export"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "40kB"])
def test_transformers_loads_what_was_saved(
    run: str, tmp_path: Path, max_shard_size: str, way: str, tied: bool
) -> None:
    model = _model(tied=tied)
    uri = f"{run}/model"
    if way == "save":
        cloudckpt.hf.save(model.state_dict(), uri, max_shard_size=max_shard_size)
    else:
        cloudckpt.save({"model": model.state_dict(), "step": 3}, checkpoint_id=f"{run}/checkpoint")
        cloudckpt.hf.export_checkpoint(
            f"{run}/checkpoint",
            uri,
            max_shard_size=max_shard_size,
            key_mapping=lambda name: name.removeprefix("model.") if "." in name else None,
        )
    names = _downloaded(uri, tmp_path)
    assert (INDEX in names) == (max_shard_size == "40kB")
    model.config.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_files_are_what_vllm_expects(run: str, tmp_path: Path) -> None:
    """It takes all files that end so, less those that an index does not name."""
    state = _model().state_dict()
    cloudckpt.hf.save(state, run, max_shard_size="40kB", dtype=torch.bfloat16)
    _downloaded(run, tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == set(weight_map.values())
    found = {}
    for file in sorted(files):
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                assert weight_map[name] == file
                assert name not in found
                found[name] = opened.get_tensor(name)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], one.to(torch.bfloat16)) for name, one in state.items())
