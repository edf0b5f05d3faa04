"""Where the demo puts its checkpoints, in the user's bucket or on an S3 server of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import cloudckpt
from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.config import MIB, Config
from cloudckpt.stores.base import ObjectStore, random_suffix
from cloudckpt.transfer.deleting import delete_all
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI

__all__ = [
    "Remains",
    "bucket_of_user",
    "embedded_bucket",
    "find_remains",
    "wait_until_torn",
]

_BUCKET = "cloudckpt-demo"
_LOOPBACK = "127.0.0.1"
_POLL = 0.05  # seconds between two looks at the store


@contextlib.contextmanager
def bucket_of_user(location: str, *, keep: bool) -> Iterator[CheckpointURI]:
    """A prefix of our own beneath the user's URI or folder, which is empty again in the end.

    Args:
        location: The URI.
        keep: Whether to leave the checkpoints there; what killed ranks have left goes in any case.

    Raises:
        CloudCheckpointError: If the bucket can't be used.
    """
    uri = CheckpointURI.parse(location)
    if uri.scheme == "memory":
        raise cloudckpt.errors.InvalidURIError(
            f"{location!r} can't be seen by other processes; write s3://bucket/path, gs://, az:// "
            "or a local folder"
        )
    run = uri.join(f"cloudckpt-demo-{random_suffix()}")
    store, retrier = _opened(run)
    below = run.key("")
    cloudckpt.latest(run)  # tells now whether bucket and credentials are any good
    try:
        yield run
    finally:
        cloudckpt.sweep(run, older_than=0)
        if not keep:
            keys = [info.key for info in retrier.call(lambda: list(store.list(below)))]
            config = Config()
            threads = config.connections
            delete_all(store, keys, config.retry, threads=threads, what="objects that are")
            if run.scheme == "file":
                shutil.rmtree(run.prefix, ignore_errors=True)  # folders that are empty by now


@contextlib.contextmanager
def embedded_bucket() -> Iterator[CheckpointURI]:
    """An empty bucket on a server in this process, to which it and its children are pointed.

    The environment is as before in the end. The checkpoints live in memory and unnamed temporary
    files; they are gone when this process is.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=_LOOPBACK, port=0, verbose=False)
    server.start()
    try:
        with _environment_for(f"http://{_LOOPBACK}:{server.get_host_and_port()[1]}"):
            boto3.client("s3").create_bucket(Bucket=_BUCKET)
            yield CheckpointURI.parse(f"s3://{_BUCKET}/run")
    finally:
        server.stop()


@contextlib.contextmanager
def _environment_for(endpoint: str) -> Iterator[None]:
    """Hides the user's accounts and options, so that no request can go astray."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("AWS_", "CLOUDCKPT_")):
            del os.environ[name]
    os.environ.update(
        AWS_ENDPOINT_URL_S3=endpoint,
        AWS_ACCESS_KEY_ID="demo",
        AWS_SECRET_ACCESS_KEY="demo",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
        NO_PROXY=_LOOPBACK,
        no_proxy=_LOOPBACK,
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Remains:
    """What the store holds of a save.

    Attributes:
        objects: Complete objects, the commit excepted.
        bytes: Their size.
        uploads: Multipart uploads that were begun and not finished.
        committed: Whether there is a ``.metadata``: the checkpoint exists.
    """

    objects: int
    bytes: int
    uploads: int
    committed: bool

    def __str__(self) -> str:
        commit = "a .metadata" if self.committed else "no .metadata"
        return (
            f"{self.objects} data object(s) of {self.bytes / 1e6:.0f} MB, "
            f"{self.uploads} unfinished upload(s), {commit}"
        )


def find_remains(checkpoint: CheckpointURI) -> Remains:
    """Looks at the store."""
    store, retrier = _opened(checkpoint)
    below = checkpoint.key("")
    found = retrier.call(lambda: list(store.list(below)))
    uploads = retrier.call(lambda: list(store.list_uploads(below)))
    data = [info for info in found if info.key != checkpoint.key(METADATA)]
    size = sum(info.size for info in data)
    return Remains(len(data), size, len(uploads), committed=len(data) < len(found))


def wait_until_torn(checkpoint: CheckpointURI, seconds: float) -> Remains:
    """Looks until the data of one rank is there while that of another is on its way.

    Returns:
        The last look, even if the save never was in its middle.
    """
    deadline = time.monotonic() + seconds
    while True:
        remains = find_remains(checkpoint)
        is_torn = remains.bytes >= MIB and remains.uploads > 0 and not remains.committed
        if is_torn or time.monotonic() > deadline:
            return remains
        time.sleep(_POLL)


def _opened(uri: CheckpointURI) -> tuple[ObjectStore, Retrier]:
    config = Config()
    return open_store(uri, config), Retrier(config.retry)
