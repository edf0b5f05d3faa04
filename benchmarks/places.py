"""Where contenders save to: the benchmark server, or a folder in memory."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONNECTIONS = 8
REGION = "us-east-1"
Connections = int | Literal["auto"]


@dataclass(frozen=True)
class Place:
    """Where checkpoints go: a server and one of its buckets."""

    port: int
    bucket: str
    connections: Connections = CONNECTIONS
    bundle: str | None = None
    """The authority of the server's certificate, if it speaks TLS."""
    library: str | None = None
    """The reference's TLS, compiled."""

    @property
    def endpoint(self) -> str:
        """The URL that clients take as their endpoint."""
        return f"{'https' if self.bundle else 'http'}://127.0.0.1:{self.port}"

    def uri(self, name: str) -> str:
        """The URI of the checkpoint called `name`."""
        return f"s3://{self.bucket}/{name}"


def child_environment(port: int, bundle: str | None = None) -> dict[str, str]:
    """The environment of a measuring child: credentials that open nothing, and the endpoint."""
    trust = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE") if bundle else ()
    return {
        **os.environ,
        **dict.fromkeys(trust, bundle or ""),
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": f"{'https' if bundle else 'http'}://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def local_root(port: int) -> Path:
    """The folder for local checkpoints of the run whose server listens at `port`."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
    return base / f"cloudckpt-bench-{port}"


def remove_local(port: int) -> None:
    """Deletes what local contenders wrote in this run."""
    shutil.rmtree(local_root(port), ignore_errors=True)
