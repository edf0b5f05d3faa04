"""A progress bar for interactive use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from cloudckpt.errors import MissingDependencyError
from cloudckpt.events.event import Event, subscribe

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar() -> Iterator[None]:
    """Shows the bytes of saves and loads in a ``with`` block; nothing if there is no terminal.

    Raises:
        MissingDependencyError: If rich is not installed.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
    except ImportError as exc:
        raise MissingDependencyError(
            "a progress bar needs rich; install it with: pip install rich", cause=exc
        ) from exc
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[tuple[str, int], int] = {}

        def listen(event: Event) -> None:
            if event.phase not in ("progress", "upload", "load"):
                return
            key = (event.uri, event.rank)
            if key not in tasks:
                tasks[key] = progress.add_task(f"{event.uri} rank {event.rank}", total=None)
            total = event.total or (event.bytes if event.phase != "progress" else None)
            progress.update(tasks[key], completed=event.bytes, total=total)  # type: ignore[arg-type]
            if event.phase != "progress":
                progress.stop_task(tasks.pop(key))  # type: ignore[arg-type]

        unsubscribe = subscribe(listen)
        try:
            yield
        finally:
            unsubscribe()
