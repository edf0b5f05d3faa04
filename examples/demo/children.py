"""The ranks of a phase: started, listened to, killed, reaped."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import IO

import torch.distributed as dist

from messages import Event, Failed, Job, decode

__all__ = ["ChildError", "Ranks", "end_with_parent"]

_SILENCE = 120.0  # seconds without a word from any rank that are taken for a hang
_LAST_WORDS = 30.0  # seconds for the others to notice that one rank is gone
_GRACE = 10.0  # seconds for a killed process to be gone
_TOLD = 4096  # bytes of standard error that are shown
_LOOPBACK = "127.0.0.1"
_TRAIN = os.path.join(os.path.dirname(__file__), "train.py")


class ChildError(RuntimeError):
    """A rank failed or hangs; the message has the end of its standard error."""


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


class Ranks:
    """Processes that train together, as ``torchrun`` would start them.

    Use it in a ``with`` statement; none of the processes outlives that, nor this process. They
    stand in sessions of their own, so that Ctrl-C reaches this process alone, which then ends them.

    Args:
        job: What they are to do.
        count: How many.
    """

    def __init__(self, job: Job, count: int) -> None:
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._patience = _SILENCE
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[bytes]] = []
        self._listeners: list[threading.Thread] = []
        # they meet here: a store of ours needs no port that might be taken, and outlives rank 0
        self._meeting = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, 0, is_master=True, wait_for_workers=False
        )
        try:
            for rank in range(count):
                self._start(rank, count, job)
        except BaseException:
            self._end()
            raise

    def _start(self, rank: int, count: int, job: Job) -> None:
        environment = {
            # torch makes this folder even if nothing is compiled: let it be one that exists
            "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(self._meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the block
        self._errors.append(errors)
        process = subprocess.Popen(  # a script beside this one
            [sys.executable, _TRAIN, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        listener = threading.Thread(target=self._listen, args=(rank, process), daemon=True)
        listener.start()
        self._listeners.append(listener)

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            self._lines.put((rank, line))
        self._lines.put((rank, None))

    def events(self) -> Iterator[tuple[int, Event]]:
        """What the ranks tell, with the rank that does, until all of them have ended.

        Raises:
            ChildError: If they fall silent, or do not end soon after one of them has failed.
        """
        running = set(range(len(self._processes)))
        while running:
            try:
                rank, line = self._lines.get(timeout=self._patience)
            except queue.Empty:
                raise ChildError(
                    f"rank(s) {sorted(running)} said nothing for {self._patience:.0f} s"
                    f"{self._complaints(range(len(self._processes)))}"
                ) from None
            if line is None:
                running.discard(rank)
                self._patience = _LAST_WORDS
            elif (event := decode(line)) is not None:
                if isinstance(event, Failed):
                    self._patience = _LAST_WORDS
                yield rank, event

    def kill(self, rank: int) -> None:
        """Ends a rank by SIGKILL, as a machine that is taken away."""
        self._processes[rank].kill()

    def exit_codes(self) -> list[int]:
        """How the ranks have ended: negative numbers are signals.

        Raises:
            ChildError: If one has not ended.
        """
        try:
            return [process.wait(_LAST_WORDS) for process in self._processes]
        except subprocess.TimeoutExpired as exc:
            raise ChildError("a rank has closed its output, but does not end") from exc

    def require_success(self) -> None:
        """Checks that no rank has failed.

        Raises:
            ChildError: If one has; the message has its last words.
        """
        failed = [rank for rank, code in enumerate(self.exit_codes()) if code != 0]
        if failed:
            raise ChildError(f"rank(s) {failed} failed{self._complaints(failed)}")

    def _complaints(self, ranks: Iterable[int]) -> str:
        texts = []
        for rank in ranks:
            file = self._errors[rank]
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TOLD))
            texts.append(f"\n--- rank {rank} ---\n{file.read().decode(errors='replace')}")
        return "".join(texts)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(_GRACE)
        for listener in self._listeners:
            listener.join(_GRACE)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for file in self._errors:
            file.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
