"""Runs a function in fresh processes: one per measurement, or one per rank."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lifeline import exit_with_parent
from benchmarks.places import child_environment

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "BENCH_SOURCE"
"""The environment variable that says which source tree the children import, if not this one."""

DEFAULT_TIMEOUT = 240.0
"""Seconds a child may take before it is killed and counts as failed."""

_POLL = 0.02
_LOG_TAIL = 2000


class ChildFailedError(RuntimeError):
    """A child raised, was killed or took too long; the text says which, with its last words."""


def in_child(
    function: Callable[..., Any],
    port: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    bundle: str | None = None,
    **arguments: Any,
) -> Any:
    """Calls ``function(port, **arguments)`` in a fresh process and returns what it returned.

    Args:
        function: A module-level function; arguments and result must be JSON values.
        port: The benchmark server's port, for the child's environment and the function.
        timeout: Seconds before the child is killed.
        bundle: The authority of the server's certificate, if it speaks TLS.
        **arguments: Passed on.

    Raises:
        ChildFailedError: If the child fails in any way.
    """
    return in_ranks(function, port, 1, timeout=timeout, bundle=bundle, **arguments)[0]


def in_ranks(
    function: Callable[..., Any],
    port: int,
    world_size: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    bundle: str | None = None,
    **arguments: Any,
) -> list[Any]:
    """Like `in_child` in `world_size` processes at once, as the ranks of a job.

    Each finds ``RANK`` and ``WORLD_SIZE`` in its environment, and in ``BENCH_RENDEZVOUS`` a path
    that they all share.

    Returns:
        The results by rank.
    """
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        base = Path(folder)
        job = {
            "module": function.__module__,
            "function": function.__qualname__,
            "arguments": {"port": port, **arguments},
        }
        (base / "job.json").write_text(json.dumps(job))
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(_started(base, rank, world_size, port, bundle))
                for rank in range(world_size)
            ]
            _await_all(processes, base, time.monotonic() + timeout)
        return [
            json.loads((base / f"result-{rank}.json").read_text()) for rank in range(world_size)
        ]


@contextlib.contextmanager
def _started(
    base: Path, rank: int, world_size: int, port: int, bundle: str | None
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **child_environment(port, bundle),
        "PYTHONPATH": os.pathsep.join(
            [os.environ.get(SOURCE, str(ROOT / "src")), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "BENCH_RENDEZVOUS": str(base / "rendezvous"),
        "OMP_NUM_THREADS": "1",
    }
    with (base / f"log-{rank}.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.children", str(base), str(rank)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            # The whole group: a child may have started processes of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _await_all(processes: list[subprocess.Popen[bytes]], base: Path, deadline: float) -> None:
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            code = process.poll()
            if code is None:
                continue
            del waiting[rank]
            if code != 0 or not (base / f"result-{rank}.json").exists():
                raise ChildFailedError(f"exit {code}: {_last_words(base, rank)}")
        if waiting and time.monotonic() > deadline:
            rank = min(waiting)
            raise ChildFailedError(f"took too long: {_last_words(base, rank)}")
        time.sleep(_POLL)


def _last_words(base: Path, rank: int) -> str:
    text = (base / f"log-{rank}.txt").read_text(errors="replace").strip()
    return text[-_LOG_TAIL:]


def main() -> None:
    """The child's side: runs the job in the folder given on the command line."""
    base, rank = Path(sys.argv[1]), sys.argv[2]
    exit_with_parent()
    try:
        job = json.loads((base / "job.json").read_text())
        function = getattr(importlib.import_module(job["module"]), job["function"])
        result = function(**job["arguments"])
        (base / f"result-{rank}.json").write_text(json.dumps(result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Native runtimes of some clients hang in their own shutdown; the result is already safe.
    os._exit(0)


if __name__ == "__main__":
    main()
