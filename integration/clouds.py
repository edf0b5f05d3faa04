"""A cloud to test against: a server, the way there, and a look at what lies in it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import requests
from azure.storage.blob import BlobServiceClient

from cloudckpt import Config, RetryPolicy
from cloudckpt.config import MIB
from cloudckpt.uri import CheckpointURI
from gcs_front import GcsFront
from looks import AzureLook, GCSLook, Look, S3Look
from servers import REAL, chosen
from support.emulators import (
    DUMMY_AWS,
    Azurite,
    azurite_server,
    gcs_emulator,
    moto_server,
)

__all__ = ["PART_SIZE", "Cloud", "Place", "clean_environment", "in_environment", "opened"]

PART_SIZE = 5 * MIB
_RUN = f"cloudckpt-integration-{uuid.uuid4().hex[:12]}"
_MINE = {
    "s3": ("AWS_", "CLOUDCKPT_S3_"),
    "gcs": ("GOOGLE_", "STORAGE_", "CLOUDCKPT_GCS_"),
    "azure": ("AZURE_", "CLOUDCKPT_AZURE_"),
}


@dataclass(frozen=True)
class Place:
    """A location and the options that lead there; picklable.

    Attributes:
        uri: For cloudckpt.
        key: What the keys of its objects begin with, without a slash at the end.
        config: The options.
    """

    uri: str
    key: str
    config: Config

    def at(self, name: str) -> Place:
        """A place beneath this one."""
        key = f"{self.key}/{name}" if self.key else name
        return dataclasses.replace(self, uri=f"{self.uri}/{name}", key=key)

    def having(self, **options: Any) -> Place:
        """The same place, with other options."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **options))


@dataclass(frozen=True)
class Cloud:
    """What a test needs to know of a cloud.

    Attributes:
        name: ``s3``, ``gcs`` or ``azure``.
        root: The place beneath which the tests have theirs.
        environment: What a child process needs to get there with default options.
        look: The bucket without cloudckpt.
    """

    name: str
    root: Place
    environment: Mapping[str, str]
    look: Look

    def names(self, place: Place) -> list[str]:
        """The objects of a place, relative to it."""
        return [key.removeprefix(f"{place.key}/") for key in self.look.keys(f"{place.key}/")]

    def uploads(self, place: Place) -> list[str]:
        """What is being sent in parts to a place."""
        return self.look.uploads(f"{place.key}/")


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without the user's options and credentials, but for those of real buckets."""
    unwanted = tuple(
        prefix
        for cloud, prefixes in _MINE.items()
        if chosen(cloud)[0] not in REAL
        for prefix in prefixes
    )
    kept = ("CLOUDCKPT_TEST_", *(p for ps in _MINE.values() for p in ps))
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(unwanted)
        and (not name.startswith("CLOUDCKPT_") or name.startswith(kept))
    }


def in_environment(environment: Mapping[str, str], function: Any, *arguments: Any) -> Any:
    """Calls a function with some variables set."""
    with mock.patch.dict(os.environ, environment):
        return function(*arguments)


@contextlib.contextmanager
def opened(cloud: str) -> Iterator[Cloud]:
    """A cloud with its server running, the environment of this process leading there."""
    server, value = chosen(cloud)
    with contextlib.ExitStack() as stack:
        if value and server not in REAL:
            _wait_for(value)
        if server in REAL:
            uri, environment = CheckpointURI.parse(value), {}
        else:
            uri = CheckpointURI.parse(f"{_SCHEMES[cloud]}://{_RUN}")
            environment = stack.enter_context(_ENTRIES[cloud](value))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        config = Config(
            connections=4,
            part_size=PART_SIZE,
            retry=RetryPolicy(attempts=6, base=0.05, cap=2.0, deadline=60.0),
        )
        look = _look(cloud, uri)
        root = Place(str(uri), uri.prefix, config)
        if server in REAL:
            root = root.at(_RUN)  # what else is in the bucket is no concern of ours
        else:
            _create(cloud, look, uri.bucket)
        yield Cloud(cloud, root, environment, look)
        left = look.left(f"{root.key}/" if root.key else "")
        if left:
            raise AssertionError(
                f"{len(left)} objects, versions and uploads were left behind at {root.uri}: "
                f"{left[:20]}"
            )


def _wait_for(url: str) -> None:
    """Waits until a server that somebody else has just started answers anything at all."""
    deadline = time.monotonic() + 60
    while True:
        try:
            requests.get(url, timeout=5)
            return
        except requests.RequestException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}


@contextlib.contextmanager
def _s3(url: str) -> Iterator[dict[str, str]]:
    """``url`` is MinIO's, with the credentials that it has by default; else moto is started."""
    keys = {**DUMMY_AWS, "AWS_EC2_METADATA_DISABLED": "true"}
    keys |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    with contextlib.ExitStack() as stack:
        if url:
            keys |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "minioadmin")
        else:
            url = stack.enter_context(moto_server())
        yield {**keys, "AWS_ENDPOINT_URL_S3": url, "CLOUDCKPT_S3_ADDRESSING_STYLE": "path"}


@contextlib.contextmanager
def _gcs(url: str) -> Iterator[dict[str, str]]:
    """``url`` is fake-gcs-server's; else gcp-storage-emulator is started."""
    with contextlib.ExitStack() as stack:
        options = {"CLOUDCKPT_CHECKSUM": "on"}
        if not url:
            url = stack.enter_context(gcs_emulator())
            options["CLOUDCKPT_CONDITIONAL_WRITES"] = "off"  # it ignores them
        front = stack.enter_context(GcsFront(url))
        yield {**options, "STORAGE_EMULATOR_HOST": front.url}


@contextlib.contextmanager
def _azure(url: str) -> Iterator[dict[str, str]]:
    """``url`` is that of Azurite's account; else one is started."""
    with contextlib.ExitStack() as stack:
        server = Azurite(url=url) if url else stack.enter_context(azurite_server())
        yield {"AZURE_STORAGE_CONNECTION_STRING": server.connection_string}


_ENTRIES = {"s3": _s3, "gcs": _gcs, "azure": _azure}


def _look(cloud: str, uri: CheckpointURI) -> Look:
    if cloud == "s3":
        return S3Look(uri.bucket)
    if cloud == "gcs":
        return GCSLook(uri.bucket)
    return AzureLook(uri.bucket, f"https://{uri.account}" if uri.account else "")


def _create(cloud: str, look: Any, bucket: str) -> None:
    """Makes the bucket in an emulator."""
    if cloud == "s3":
        look.client.create_bucket(Bucket=bucket)
    elif cloud == "gcs":
        look.create_bucket(bucket)
    else:
        text = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        with BlobServiceClient.from_connection_string(text) as service:
            service.create_container(bucket)
