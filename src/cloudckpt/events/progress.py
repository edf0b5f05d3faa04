"""A progress bar for interactive use."""

from __future__ import annotations

import contextlib
import sys
import threading
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
        from rich.markup import escape
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskID,
            TransferSpeedColumn,
        )
    except ImportError as exc:
        raise MissingDependencyError(
            "a progress bar needs rich; install it with: pip install rich", cause=exc
        ) from exc
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[tuple[str, int], TaskID] = {}
        lock = threading.Lock()  # progress comes from all threads that move bytes

        def listen(event: Event) -> None:
            if event.phase not in ("progress", "upload", "load"):
                return
            name = f"{escape(event.uri)} rank {event.rank}"
            key, has_ended = (event.uri, event.rank), event.phase != "progress"
            with lock:
                if key not in tasks:
                    tasks[key] = progress.add_task(name, total=None)
                task = tasks.pop(key) if has_ended else tasks[key]
            if event.failed:
                progress.update(task, description=f"{name} FAILED", completed=event.bytes)
            else:
                total = event.total or (event.bytes if has_ended else None)
                progress.update(task, completed=event.bytes, total=total)
            if has_ended:
                progress.stop_task(task)

        unsubscribe = subscribe(listen)
        try:
            yield
        finally:
            unsubscribe()
