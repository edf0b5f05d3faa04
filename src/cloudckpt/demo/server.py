"""An S3 server in a child process, for a demo that needs neither an account nor a network."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from cloudckpt.demo.children import Child, ChildError, end_with_parent
from cloudckpt.uri import CheckpointURI

__all__ = ["embedded_bucket"]

_BUCKET = "cloudckpt-demo"
_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def embedded_bucket() -> Iterator[CheckpointURI]:
    """Runs a server with an empty bucket and points this process and its children to it.

    The environment is as before in the end. The checkpoints live in the server's memory and its
    unnamed temporary files; they are gone when it is.

    Raises:
        ChildError: If the server does not start.
    """
    child = Child("cloudckpt.demo.server", environment=os.environ)
    try:
        port = next(iter(child.lines()), "").strip()
        if not port.isdecimal():
            raise ChildError(f"the S3 server did not start:\n{child.complaints()}")
        with _environment_for(f"http://{_LOOPBACK}:{port}"):
            import boto3

            boto3.client("s3").create_bucket(Bucket=_BUCKET)
            yield CheckpointURI.parse(f"s3://{_BUCKET}/run")
    finally:
        child.end()


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
        AWS_SECRET_ACCESS_KEY="demo",  # noqa: S106 - the server takes anything
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


def main() -> None:
    """Serves until the parent is gone; prints the port."""
    end_with_parent()
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=_LOOPBACK, port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
