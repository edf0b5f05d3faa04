"""Emulators of object stores as child processes on free ports."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

DUMMY_AWS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",  # an emulator's: it accepts anything
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""Credentials and region for an emulator."""

PAGE = 100
"""Objects and uploads in a page of moto's lists: pages are tested without a thousand of them."""

_AZURITE_ACCOUNT = "devstoreaccount1"
# the same in every Azurite, and published in its documentation
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

# without the package crc32c, moto takes CRC32 for it, and tells wrong checksums of copies; and its
# threads look for an object and write it later, so that of several `If-None-Match: *` two may win
_MOTO = """
import importlib.machinery, runpy, sys, threading, types
from awscrt import checksums

module = types.ModuleType("crc32c")
module.crc32c, module.__spec__ = checksums.crc32c, importlib.machinery.ModuleSpec("crc32c", None)
sys.modules["crc32c"] = module

from moto.s3.responses import S3Response

lock = threading.RLock()

def one_at_a_time(write):
    def locked(*arguments, **named):
        with lock:
            return write(*arguments, **named)
    return locked

S3Response.put_object = one_at_a_time(S3Response.put_object)
S3Response._key_response_post = one_at_a_time(S3Response._key_response_post)
runpy.run_module("moto.server", run_name="__main__")
"""

_GUARD = """
import os, subprocess, sys, threading

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

def end():
    os.read(0, 1)
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()

threading.Thread(target=end, daemon=True).start()
os._exit(server.wait() & 255)
"""
"""Runs a server for as long as somebody holds the other end of standard input open. The kernel
closes it even for a process that is killed, so that no server outlives the one that began it."""


@dataclass(frozen=True, kw_only=True)
class Azurite:
    """How to reach a running Azurite.

    Attributes:
        url: The endpoint of the account's blobs, without a slash at its end.
        account: The account's name.
        key: The account's key, in base64.
    """

    url: str
    account: str = _AZURITE_ACCOUNT
    key: str = _AZURITE_KEY

    @property
    def connection_string(self) -> str:
        """All of it, as Azure's SDKs take it."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.url};"
        )


_FIRST_PORT, _LAST_PORT = 10_000, 32_000  # the kernel gives away those above by itself
_WORKERS = 16
_turns = itertools.count(random.randrange(_LAST_PORT))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on, and that nobody else is given:
    no connection gets it from the kernel, and other workers of pytest have other ones."""
    share = (_LAST_PORT - _FIRST_PORT) // _WORKERS
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for turn in itertools.islice(_turns, share):
        port = _FIRST_PORT + worker * share + turn % share
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _wait_until_answering(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until an HTTP server answers anything at all.

    Raises:
        RuntimeError: If its process ends, or the time does.
    """
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server for {url} ended with code {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer from {url} within {seconds} s") from exc
        time.sleep(0.05)


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Runs moto's S3 server; yields its URL. Needs ``pip install 'moto[s3,server]'``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, url, {**DUMMY_AWS, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}):
        yield url


@contextlib.contextmanager
def azurite_server(executable: str | None = None) -> Iterator[Azurite]:
    """Runs Azurite's blob service in memory; yields how to reach it.

    Args:
        executable: ``azurite-blob``; by default ``CLOUDCKPT_TEST_AZURITE``, then the one that
            ``npm ci --prefix integration`` installs, then that on ``PATH``.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}"
    command = [
        executable or _find_azurite(),
        "--inMemoryPersistence",
        "--blobHost=127.0.0.1",
        f"--blobPort={port}",
        "--silent",
        "--disableTelemetry",
        "--disableProductStyleUrl",  # the account is always the first segment of the path
        "--skipApiVersionCheck",
    ]
    with _running(command, url):
        yield Azurite(url=url)


@contextlib.contextmanager
def gcs_emulator() -> Iterator[str]:
    """Runs gcp-storage-emulator in memory; yields its URL.

    Needs ``pip install gcp-storage-emulator``. It serves one request at a time and closes the
    connection behind each.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "gcp_storage_emulator"]
    command += ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--quiet"]
    with _running(command, url):
        yield url


def _find_azurite() -> str:
    given = os.environ.get("CLOUDCKPT_TEST_AZURITE")
    if given:
        return given
    clone = Path(__file__).parents[2] / "integration" / "node_modules" / ".bin" / "azurite-blob"
    found = str(clone) if clone.exists() else shutil.which("azurite-blob")
    if found is None:
        raise RuntimeError(
            "there is no azurite-blob: run `npm ci --prefix integration`, "
            "or name it in CLOUDCKPT_TEST_AZURITE"
        )
    return found


@contextlib.contextmanager
def _running(
    command: Sequence[str], url: str, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Runs a server, from its first answer to the end of the with-block or of this process."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
        start_new_session=True,  # Ctrl-C is for the one that began it
    ) as process:
        try:
            _wait_until_answering(url, process, 60)
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(15)
