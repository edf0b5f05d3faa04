"""Children forked from a process that has torch and cloudckpt imported already.

Importing torch costs a process three seconds and some hundred MiB, a fork milliseconds and what
it writes to. The process that is forked is started with the first child, one for each process that
runs tests; it has a single thread, so that its children are sound.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")
"""Makes such children. They have the environment of the time when the first was made."""

context.set_forkserver_preload(
    [
        "boto3",
        "cloudckpt.aio",
        "cloudckpt.checkpointer",
        "cloudckpt.files",
        "cloudckpt.integrations.install",
        "cloudckpt.runs.comparing",
        "cloudckpt.runs.copying",
        "cloudckpt.runs.manager",
        "cloudckpt.runs.sweeping",
        "cloudckpt.runs.verifying",
        "cloudckpt.stores.azure.store",
        "cloudckpt.stores.gcs.store",
        "cloudckpt.stores.s3.store",
        "hypothesis",
        "opentelemetry.trace",
        "pytest",
        "torch._dynamo",  # which the first DTensor imports
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ]
)


class Child:
    """A process that carries out one job."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self.pid: int = process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> tuple[int, Any]:
        """Its exit code, negative if a signal ended it, and what the job returned.

        The result is None if the job raised, whose traceback is printed, or was ended by a signal.
        """
        try:
            trace, result = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            trace, result = "", None
        self._process.join()
        print(trace, end="")
        return self._process.exitcode, result


@contextmanager
def child(job: Callable[..., Any], *, patience: float = 150.0, **arguments: Any) -> Iterator[Child]:
    """Runs ``job(**arguments)`` in a child, which may be killed, stopped and interrupted.

    The child has the environment of this process. SIGALRM ends it after ``patience`` seconds, and
    the end of the block kills it; where its threads stood at that signal is printed.
    """
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", prefix="child-") as stacks:
        surroundings = (dict(os.environ), patience, stacks.name)
        process = context.Process(target=_carry_out, args=(theirs, surroundings, job, arguments))
        process.start()
        theirs.close()
        try:
            yield Child(process, ours)
        finally:
            process.kill()
            process.join()
            ours.close()
            print(stacks.read(), end="")


def together(job: Callable[..., Any], each: Iterable[dict[str, Any]]) -> list[tuple[int, Any]]:
    """How children end that run a job side by side, each with arguments of its own."""
    with ExitStack() as running:
        started = [running.enter_context(child(job, **arguments)) for arguments in each]
        return [one.wait() for one in started]


def _carry_out(
    pipe: Connection,
    surroundings: tuple[Mapping[str, str], float, str],
    job: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    environment, patience, stacks = surroundings
    faulthandler.register(signal.SIGALRM, open(stacks, "w"), chain=True)  # noqa: SIM115
    signal.setitimer(signal.ITIMER_REAL, patience)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps(("", job(**arguments))))
    except BaseException:  # noqa: BLE001 - told by the exit code
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        os._exit(1)
    os._exit(0)  # a group whose other rank was killed can't be destroyed in an orderly way
