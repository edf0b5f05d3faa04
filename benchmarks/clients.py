"""What a team would write by itself: clients that put and get parts of tensors in threads."""

from __future__ import annotations

import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from benchmarks.places import REGION, Place
from benchmarks.reference import Part, parts


class PartsInThreads(ABC):
    """Each 16 MiB of a tensor is an object; a thread for each connection, nothing is committed."""

    def __init__(self, place: Place) -> None:
        self._connections = place.connections if isinstance(place.connections, int) else 64

    def save(self, state_dict: Mapping[str, torch.Tensor], name: str) -> None:
        """Puts each part from the tensor's memory."""
        self._each(state_dict, lambda part: self._put(f"{name}/{part.number}", part.view))

    def load(self, state_dict: Mapping[str, torch.Tensor], name: str) -> None:
        """Gets each part into the tensor's memory."""
        self._each(state_dict, lambda part: self._get(f"{name}/{part.number}", part.view))

    def _each(self, tensors: Mapping[str, torch.Tensor], action: Callable[[Part], None]) -> None:
        with ThreadPoolExecutor(self._connections) as pool:
            list(pool.map(action, parts(tensors)))

    @abstractmethod
    def _put(self, key: str, data: memoryview) -> None: ...

    @abstractmethod
    def _get(self, key: str, target: memoryview) -> None: ...


class Boto3InThreads(PartsInThreads):
    """boto3's `put_object` and `get_object`, with the checksums that it sends and compares."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        config = importlib.import_module("botocore.config").Config(
            s3={"addressing_style": "path"}, max_pool_connections=self._connections
        )
        boto3 = importlib.import_module("boto3")
        self._client = boto3.client("s3", endpoint_url=place.endpoint, config=config)
        self._bucket = place.bucket

    def _put(self, key: str, data: memoryview) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=io.BytesIO(data))

    def _get(self, key: str, target: memoryview) -> None:
        body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
        at = 0
        for chunk in body.iter_chunks(1024 * 1024):
            target[at : at + len(chunk)] = chunk
            at += len(chunk)


class Obstore(PartsInThreads):
    """obstore, a client in Rust; it sends no checksum of its own here, and compares none."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._obstore = importlib.import_module("obstore")
        store = importlib.import_module("obstore.store").S3Store
        self._store = store(
            place.bucket,
            endpoint=place.endpoint,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(minutes=2)},
        )

    def _put(self, key: str, data: memoryview) -> None:
        self._obstore.put(self._store, key, data, use_multipart=False)

    def _get(self, key: str, target: memoryview) -> None:
        target[:] = memoryview(self._obstore.get(self._store, key).bytes())
