"""The ranks of one phase: started, listened to, killed, reaped."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import torch.distributed as dist

from cloudckpt.demo.children import Child, ChildError
from cloudckpt.demo.events import Event, Failed, decode
from cloudckpt.demo.job import Job

__all__ = ["Ranks"]

_SILENCE = 120.0  # seconds without a word from any rank that are taken for a hang
_LAST_WORDS = 30.0  # seconds for the others to notice that one rank is gone
_LOOPBACK = "127.0.0.1"


class Ranks:
    """Processes that train together, as ``torchrun`` would start them.

    Use it in a ``with`` statement; none of the processes outlives that.

    Args:
        job: What they are to do.
        count: How many.
    """

    def __init__(self, job: Job, count: int) -> None:
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._patience = _SILENCE
        self._children: list[Child] = []
        # they meet here: a store of ours needs no port that might be taken, and outlives rank 0
        self._meeting = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, 0, is_master=True, wait_for_workers=False
        )
        try:
            for rank in range(count):
                self._children.append(self._start(rank, count, job))
        except BaseException:
            self._end()
            raise

    def _start(self, rank: int, count: int, job: Job) -> Child:
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
        child = Child("cloudckpt.demo.train", job.to_json(), environment=environment)
        threading.Thread(target=self._listen, args=(rank, child), daemon=True).start()
        return child

    def _listen(self, rank: int, child: Child) -> None:
        for line in child.lines():
            self._lines.put((rank, line))
        self._lines.put((rank, None))

    def events(self) -> Iterator[tuple[int, Event]]:
        """What the ranks tell, with the rank that does, until all of them have ended.

        Raises:
            ChildError: If they fall silent, or do not end soon after one of them has failed.
        """
        running = set(range(len(self._children)))
        while running:
            try:
                rank, line = self._lines.get(timeout=self._patience)
            except queue.Empty:
                ended = {
                    rank: child.wait(_LAST_WORDS)
                    for rank, child in enumerate(self._children)
                    if rank not in running
                }
                others = f"; exit codes of the others: {ended}" if ended else ""
                raise ChildError(
                    f"rank(s) {sorted(running)} said nothing for {self._patience:.0f} s{others}"
                    f"{self._complaints(set(range(len(self._children))))}"
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
        self._children[rank].kill()

    def exit_codes(self) -> list[int]:
        """How the ranks have ended: negative numbers are signals.

        Raises:
            ChildError: If one has not ended.
        """
        try:
            return [child.wait(_LAST_WORDS) for child in self._children]
        except subprocess.TimeoutExpired as exc:
            raise ChildError("a rank has closed its output, but does not end") from exc

    def require_success(self) -> None:
        """Checks that no rank has failed.

        Raises:
            ChildError: If one has; the message has its last words.
        """
        failed = {rank for rank, code in enumerate(self.exit_codes()) if code != 0}
        if failed:
            raise ChildError(f"rank(s) {sorted(failed)} failed{self._complaints(failed)}")

    def _complaints(self, ranks: set[int]) -> str:
        for rank in ranks:
            self._children[rank].kill()
        texts = [(rank, self._children[rank].complaints()) for rank in sorted(ranks)]
        return "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in texts if text)

    def _end(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
