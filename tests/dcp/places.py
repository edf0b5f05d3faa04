"""Where the tests save to, and what lies there, seen without cloudckpt."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.config

import cloudckpt
from cloudckpt import CloudStorageReader, CloudStorageWriter, Config

_UNFINISHED = ".cloudckpt-unfinished-"


@dataclass(frozen=True)
class Place:
    """A location and the options that lead there; picklable."""

    uri: str
    config: Config

    def at(self, name: str) -> Place:
        """A place beneath this one."""
        return dataclasses.replace(self, uri=f"{self.uri}/{name}")

    def having(self, **options: Any) -> Place:
        """The same place, with other options."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **options))

    def save(self, state: Any, **options: Any) -> Any:
        """Saves by `cloudckpt.save`."""
        return cloudckpt.save(state, checkpoint_id=self.uri, config=self.config, **options)

    def load(self, state: Any, **options: Any) -> Any:
        """Loads by `cloudckpt.load`."""
        return cloudckpt.load(state, checkpoint_id=self.uri, config=self.config, **options)

    def writer(self) -> CloudStorageWriter:
        return CloudStorageWriter(self.uri, config=self.config)

    def reader(self, *, trust_pickle: bool = False) -> CloudStorageReader:
        return CloudStorageReader(self.uri, config=self.config, trust_pickle=trust_pickle)

    @property
    def path(self) -> str:
        """The folder, if this is a local place."""
        assert self.uri.startswith("file://"), self.uri
        return self.uri.removeprefix("file://")

    def names(self) -> list[str]:
        """The objects beneath this place, finished or not, relative to it."""
        if self.uri.startswith("s3://"):
            bucket, prefix = self._key()
            pages = (
                self.client()
                .get_paginator("list_objects_v2")
                .paginate(Bucket=bucket, Prefix=f"{prefix}/")
            )
            found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
            return sorted(key.removeprefix(f"{prefix}/") for key in found)
        tree = [(top, names) for top, _, names in os.walk(self.path)]
        return sorted(
            os.path.relpath(os.path.join(top, name), self.path)
            for top, names in tree
            for name in names
        )

    def unfinished(self) -> list[str]:
        """Multipart uploads that are open, or temporary files."""
        if self.uri.startswith("s3://"):
            bucket, prefix = self._key()
            listed = self.client().list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")
            return sorted(entry["Key"] for entry in listed.get("Uploads", ()))
        return [name for name in self.names() if _UNFINISHED in name]

    def data(self) -> list[str]:
        """The shard objects."""
        return [name for name in self.names() if name.endswith(".distcp")]

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        if self.uri.startswith("s3://"):
            bucket, prefix = self._key()
            answer = self.client().get_object(Bucket=bucket, Key=f"{prefix}/{name}")
            return answer["Body"].read()
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()

    def copy_to(self, other: Place) -> None:
        """Copies all objects beneath this place, as other tools do."""
        for name in self.names():
            if self.uri.startswith("s3://"):
                (bucket, source), (to, target) = self._key(), other._key()
                self.client().copy_object(
                    Bucket=to,
                    Key=f"{target}/{name}",
                    CopySource={"Bucket": bucket, "Key": f"{source}/{name}"},
                )
            else:
                path = os.path.join(other.path, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                shutil.copyfile(os.path.join(self.path, name), path)

    def client(self) -> Any:
        return _client(os.getpid(), self.config.s3.endpoint_url)

    def _key(self) -> tuple[str, str]:
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        return bucket, prefix


def boto_client(endpoint: str | None) -> Any:
    """boto3 on a server, which gives up soon when that hangs."""
    config = botocore.config.Config(read_timeout=20, retries={"total_max_attempts": 2})
    return boto3.client("s3", endpoint_url=endpoint, config=config)


@functools.cache
def _client(process: int, endpoint: str | None) -> Any:
    return boto_client(endpoint)
