"""Emulators of object stores as child processes on free ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_port", "moto_server", "wait_until_answering"]

DUMMY_AWS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",  # an emulator's: it accepts anything
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""Credentials and region for an emulator."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_until_answering(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until an HTTP server answers anything at all.

    Raises:
        RuntimeError: If its process ends, or the time does.
    """
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server for {url} ended with code {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=1).close()  # noqa: S310 - http on loopback
            return
        except urllib.error.HTTPError:
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer from {url} within {seconds} s") from exc
        time.sleep(0.05)


@contextlib.contextmanager
def moto_server(log: Path | None = None) -> Iterator[str]:
    """Runs moto's S3 server; yields its URL. Needs ``pip install 'moto[s3,server]'``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, **DUMMY_AWS}
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(log or os.devnull, "wb"))
        process = subprocess.Popen(  # noqa: S603 - a fixed command
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            wait_until_answering(url, process, 60)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
