"""A process with everything imported and a single thread, so that children cost a fork.

Children are killed, interrupted and stopped; the process that runs the tests stays out of that.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Child:
    """A child process that carries out one job."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> tuple[int, Any]:
        """Its exit code, negative if a signal ended it, and what the job returned."""
        reply = self._nursery.ask({"wait": self.pid})
        return reply["status"], reply["result"]


class Nursery:
    """The parent of the children, seen from the tests."""

    def __enter__(self) -> "Nursery":
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "PYTHONWARNINGS": "ignore",
            },
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @contextmanager
    def child(self, job: str, *, patience: float = 60.0, **arguments: Any) -> Iterator[Child]:
        """Runs a function of ``faults.jobs``; kills the child at the end, or after ``patience``."""
        reply = self.ask({"start": job, "patience": patience, "arguments": arguments})
        child = Child(self, reply["pid"])
        try:
            yield child
        finally:
            self.ask({"end": child.pid})


def main() -> None:
    import torch

    from faults import jobs

    torch.set_num_threads(1)
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _run(jobs, question, writer)
            os.close(writer)
            pipes[pid] = reader
            reply = {"pid": pid}
        elif "wait" in question:
            pid = question["wait"]
            with os.fdopen(pipes.pop(pid), "rb") as pipe:
                result = pipe.read()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            reply = {"status": status, "result": json.loads(result or b"null")}
        else:
            pid = question["end"]
            if pid in pipes:
                os.close(pipes.pop(pid))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            reply = {}
        print(json.dumps(reply), flush=True)


def _run(jobs: Any, question: dict[str, Any], pipe: int) -> None:
    """The life of a child."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, question["patience"])  # SIGALRM ends it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        result = getattr(jobs, question["start"])(**question["arguments"])
        os.write(pipe, json.dumps(result).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
