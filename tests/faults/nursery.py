"""A process with everything imported and a single thread, so that children cost a fork.

Children are killed, interrupted and stopped; the process that runs the tests stays out of that.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_ANSWER = 200.0  # seconds, more than a child lives


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
    """The parent of the children, seen from the tests; threads may share it.

    A question that fails, or is broken off by a test's time limit, ends the process and its
    children: its answer would be taken for that to the next question. The next child has a new one.
    """

    _module = "faults.nursery"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def ask(self, question: dict[str, Any], seconds: float = _ANSWER) -> dict[str, Any]:
        """The answer to one question."""
        with self._lock:
            try:
                process = self._process = self._process or self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                if not wait([process.stdout], seconds):
                    raise TimeoutError(f"no answer to {question} within {seconds} s")
                return json.loads(process.stdout.readline())
            except BaseException:
                self._kill()
                raise

    @contextmanager
    def child(self, job: str, *, patience: float = 150.0, **arguments: Any) -> Iterator[Child]:
        """Runs a function of ``faults.jobs``; kills the child at the end, or after ``patience``."""
        reply = self.ask({"start": job, "patience": patience, "arguments": arguments})
        child, parent = Child(self, reply["pid"]), self._process
        try:
            yield child
        finally:
            if parent is self._process:
                self.ask({"end": child.pid})

    def _start(self) -> "subprocess.Popen[str]":
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "PYTHONWARNINGS": "ignore",
            },
            text=True,
            start_new_session=True,
        )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with process:  # closes the pipes and waits
                pass


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
