"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping

__all__ = ["Child", "ChildError", "end_with_parent"]

_GRACE = 10.0  # seconds for a killed process to be gone


class ChildError(RuntimeError):
    """A child process failed or hangs; the message has the last lines of its standard error."""


def end_with_parent() -> None:
    """Ends this process as soon as its parent has gone, whatever became of that.

    The parent holds the other end of standard input and writes nothing: end of file says that it
    has gone, even if it was killed.
    """

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin: its lock would stand in the way of a normal exit
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Child:
    """A module of this package, run as a process.

    It must call :func:`end_with_parent`. It stands in a session of its own, so that Ctrl-C reaches
    the driver alone, which then ends its children in order.

    Args:
        module: The module to run.
        arguments: Its command line.
        environment: Its environment.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - a module of this package
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._complaints: deque[str] = deque(maxlen=30)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None  # a pipe
        self._complaints.extend(self._process.stderr)

    def lines(self) -> Iterator[str]:
        """What it prints, line by line, until it ends."""
        assert self._process.stdout is not None  # a pipe
        yield from self._process.stdout

    def kill(self) -> None:
        """Sends SIGKILL; does nothing if it has ended."""
        self._process.kill()

    def wait(self, seconds: float) -> int:
        """Its exit code, negative if a signal has ended it.

        Raises:
            subprocess.TimeoutExpired: If it still runs after so long.
        """
        return self._process.wait(seconds)

    def complaints(self) -> str:
        """The last lines of its standard error."""
        self._listener.join(1.0)
        return "".join(self._complaints)

    def end(self) -> None:
        """Makes sure that it has ended, by force, and gives its pipes back."""
        self._process.kill()
        self._process.wait(_GRACE)
        self._listener.join(_GRACE)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
