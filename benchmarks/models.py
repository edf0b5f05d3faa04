"""Models in safetensors files: ours, files that boto3 moves, and the streamer of run:ai."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

from benchmarks.ours import options
from benchmarks.places import Place, local_root

_FILE = "model.safetensors"


class OurModel:
    """`cloudckpt.hf.save` and `load`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._hf = importlib.import_module("cloudckpt.hf")
        ours = importlib.import_module("cloudckpt")
        self._config = ours.Config(connections=place.connections, **options(ours, place))

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves in one file."""
        self._hf.save(state_dict, self._place.uri(name), config=self._config)

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads into the tensors."""
        self._hf.load(state_dict, self._place.uri(name), config=self._config)


class FilesByBoto3:
    """A file of the safetensors package in memory (tmpfs), and boto3's transfer manager."""

    def __init__(self, place: Place) -> None:
        config = importlib.import_module("botocore.config").Config
        self._torch = importlib.import_module("safetensors.torch")
        self._safetensors = importlib.import_module("safetensors")
        self._client = importlib.import_module("boto3").client(
            "s3",
            endpoint_url=place.endpoint,
            config=config(s3={"addressing_style": "path"}),
        )
        self._bucket = place.bucket
        self._root = local_root(place.port) / "safetensors"

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Writes the file, and uploads it."""
        path = self._path(name)
        self._torch.save_file(state_dict, path)
        self._client.upload_file(str(path), self._bucket, f"{name}/{_FILE}")
        shutil.rmtree(path.parent)

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Downloads the file, and copies tensor after tensor out of it."""
        path = self._path(name)
        self._client.download_file(self._bucket, f"{name}/{_FILE}", str(path))
        with self._safetensors.safe_open(path, framework="pt") as file:
            for key, target in state_dict.items():
                target.copy_(file.get_tensor(key))
        shutil.rmtree(path.parent)

    def _path(self, name: str) -> Any:
        folder = self._root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / _FILE


class RunaiStreamer(FilesByBoto3):
    """runai-model-streamer, which only loads; its files are written as those of boto3 are."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._streamer = importlib.import_module("runai_model_streamer").SafetensorsStreamer

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Streams the file, and copies each tensor as it comes."""
        with self._streamer() as streamer:
            streamer.stream_files([f"s3://{self._bucket}/{name}/{_FILE}"])
            for key, tensor in streamer.get_tensors():
                state_dict[key].copy_(tensor)
