"""The comparison of one cloud or of all, as a table that people read."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from . import azure, gcs, s3
from .accepted import BY_CLOUD, EVERYWHERE
from .differences import Accepted, Comparison, Difference, compared, named
from .recorder import recording

__all__ = ["CLOUDS", "compare", "report", "versions"]

CLOUDS = tuple(BY_CLOUD)
_CLIENTS = {
    "s3": ("boto3", "botocore"),
    "gcs": ("google-cloud-storage", "google-auth"),
    "azure": ("azure-storage-blob", "azure-identity"),
}


def compare(cloud: str) -> Comparison:
    """Sends all operations of a cloud, by both clients, and judges what differs."""
    with tempfile.TemporaryDirectory() as folder, recording(Path(folder)) as recorder:
        module = {"s3": s3, "gcs": gcs, "azure": azure}[cloud]
        recorder.answering = module.answer
        return compared(recorder, module.operations(Path(folder)), table(cloud))


def table(cloud: str) -> list[Accepted]:
    """What is accepted of a cloud."""
    return [*EVERYWHERE, *BY_CLOUD[cloud]]


def versions(cloud: str) -> str:
    """The clients that are compared, with their versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _CLIENTS[cloud])


def report(cloud: str, comparison: Comparison) -> Iterator[str]:
    """The lines of what came of it."""
    count = len(comparison.operations)
    yield f"{cloud}: {versions(cloud)}; {count} operations by both clients"
    found: dict[int, list[Difference]] = defaultdict(list)
    for difference, row in comparison.accepted:
        found[row].append(difference)
    for row, differences in sorted(found.items()):
        for field in dict.fromkeys(difference.field for difference in differences):
            those = [difference for difference in differences if difference.field == field]
            yield f"  {those[0]}"
            yield f"    in {named(those)}"
        yield f"    because: {table(cloud)[row].reason}"
    yield from (f"  !! {problem}" for problem in comparison.problems())
