"""Trains on 2 ranks, kills one amid a save, goes on with 4, kills all, finishes with 1.

``make demo`` runs it on an S3 server of its own; ``make demo URI=s3://bucket/path`` elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import cloudckpt
from cloudckpt.stores.registry import open_store

TRAIN = Path(__file__).with_name("train.py")
SAVES = 6  # checkpoints of the whole run; the third is cut in its middle and written again
SILENCE = 120.0  # seconds without a word from any rank that are taken for a hang
SAME_LOSS = 1e-3  # of a batch, summed by other numbers of ranks in another order
SAME_CURVE = 5e-2  # of steps that two numbers of ranks train from the same checkpoint


@dataclass
class Phase:
    """One start of the training.

    Attributes:
        codes: How the ranks ended; negative numbers are signals.
        losses: The loss of each step.
        resumed: What it began with, if not from scratch.
        errors: What ranks said when they failed.
    """

    codes: list[int] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    resumed: dict[str, Any] | None = None
    errors: dict[int, str] = field(default_factory=dict)


class Demo:
    """The story, and what was checked of it."""

    def __init__(self, run: str, steps: int) -> None:
        self.run, self.steps, self.every = run, steps, steps // SAVES
        self.all_hold = True

    def check(self, claim: str, holds: bool, evidence: object) -> None:
        """Prints a claim, whether it holds, and what says so."""
        self.all_hold = self.all_hold and holds
        print(f"\r{'✓' if holds else '✗'} {claim}\n    {evidence}", flush=True)

    def tell(self) -> None:
        """Runs the three phases."""
        torn, staged = 3 * self.every, 5 * self.every
        first = self.train(2, stall_at=torn)
        self.check("the rank died by SIGKILL", first.codes[1] == -9, f"exit codes {first.codes}")
        noticed = first.errors.get(0, "it ended without an error")
        brief = noticed.rpartition("] ")[2].partition(". ")[0]  # without a line of gloo's source
        self.check("the other rank noticed and ended", 0 in first.errors, brief)
        self.check(
            "the torn save is no checkpoint: to look into it is a CheckpointNotFoundError",
            _is_not_found(self.place(torn)),
            "left of it: "
            + _described(cloudckpt.runs.find_leftovers(self.place(torn), older_than=0)),
        )
        newest = cloudckpt.latest(self.run)
        self.check(
            "the newest checkpoint is the last one that was committed",
            newest == str(cloudckpt.uri.CheckpointURI.parse(self.place(2 * self.every))),
            newest,
        )
        second = self.train(4, kill_all_after=staged)
        self.check_resumed(second)
        both = first.losses.keys() & second.losses.keys()
        apart = max((abs(first.losses[n] - second.losses[n]) for n in both), default=float("inf"))
        self.check(
            "steps that were lost are learned again the same way",
            apart <= SAME_CURVE,
            f"{len(both)} steps, losses differ by at most {apart:.1e}",
        )
        third = self.train(1)
        self.check_resumed(third)
        restored = third.resumed and third.resumed["step"]
        self.check(
            "all ranks were killed right after a step was staged, and it is not lost",
            restored == staged,
            f"step {staged} was staged, step {restored} was restored",
        )
        begin, end = first.losses[1], third.losses[self.steps]
        self.check("the model has learned", end < begin, f"loss {begin:.2f} → {end:.2f}")
        found = [one.step for one in cloudckpt.list_checkpoints(self.run) if one.is_committed]
        self.check(
            "every checkpoint is committed, the torn one too, now that it was saved again",
            found == [n * self.every for n in range(1, SAVES + 1)],
            f"steps {', '.join(map(str, found))}",
        )

    def check_resumed(self, phase: Phase) -> None:
        """Compares the loss on the same text before the save and after the load."""
        now = phase.resumed or {"step": None, "recorded": 0.0, "again": float("inf")}
        self.check(
            f"resumed on {len(phase.codes)} rank(s), the loss is what it was when it was saved",
            abs(now["again"] - now["recorded"]) <= SAME_LOSS,
            f"step {now['step']}: {now['recorded']:.6f}, now {now['again']:.6f}",
        )

    def train(
        self, ranks: int, *, stall_at: int | None = None, kill_all_after: int | None = None
    ) -> Phase:
        """Trains from the newest checkpoint on; if ranks are to be killed, until all have ended."""
        print(f"\n{ranks} rank(s) train", flush=True)
        phase, staged = Phase(), set[int]()
        arguments = [self.run, f"--steps={self.steps}", f"--save-every={self.every}"]
        if stall_at is not None:
            arguments.append(f"--stall-at={stall_at}")
        with contextlib.closing(Ranks(ranks, arguments)) as job:
            for event in job.events():
                step, rank = event["step"], event["rank"]
                if event["event"] == "stepped" and rank == 0:
                    phase.losses[step] = event["loss"]
                    if sys.stdout.isatty():
                        print(f"\rstep {step}, loss {event['loss']:.3f}  ", end="", flush=True)
                elif event["event"] == "resumed":
                    phase.resumed = event
                elif event["event"] == "failed":
                    phase.errors[rank] = event["error"]
                elif event["event"] == "staged" and step == stall_at and rank == 1:
                    self.kill_in_the_middle(job.processes[1], step)
                elif event["event"] == "staged" and step == kill_all_after:
                    staged.add(rank)
                    if len(staged) == ranks:
                        for process in job.processes:
                            process.kill()
            phase.codes = [process.wait(30) for process in job.processes]
            if any(phase.codes) and stall_at is None and kill_all_after is None:
                sys.exit(f"ranks failed: {phase.codes}\n{job.last_words()}")
        if not phase.losses:
            sys.exit(f"no step was trained\n{job.last_words()}")
        return phase

    def kill_in_the_middle(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Kills a rank when the data of one are there and those of the other on their way."""
        place, deadline = self.place(step), time.monotonic() + 30
        while True:
            left = cloudckpt.runs.find_leftovers(place, older_than=0)
            is_torn = left.nbytes >= 1 << 20 and bool(left.uploads) and _is_not_found(place)
            if is_torn or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        process.kill()
        claim = f"rank 1 was killed in the middle of the save of step {step}"
        self.check(claim, is_torn, _described(left))

    def place(self, step: int) -> str:
        """The URI of a step."""
        return f"{self.run}/step-{step}"


class Ranks:
    """Processes that train together, as ``torchrun`` would start them, but left alone by it."""

    def __init__(self, count: int, arguments: list[str]) -> None:
        # they meet here: a store of ours needs no port that might be taken, and outlives rank 0
        self._meeting = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._told, end = os.pipe()  # a line is short enough to be written at once
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the others
        environment = os.environ | {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(TRAIN), *arguments, "--with-parent"],
                stdin=subprocess.PIPE,
                stdout=end,
                stderr=self._errors,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # Ctrl-C is for this process, which then ends them
            )
            for rank in range(count)
        ]
        os.close(end)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the ranks tell, until all of them have ended."""
        rest = b""
        while True:
            if not select.select([self._told], [], [], SILENCE)[0]:
                sys.exit(f"no rank has said anything for {SILENCE:.0f} s\n{self.last_words()}")
            data = os.read(self._told, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines if line.startswith(b"{"))

    def last_words(self) -> str:
        """The end of what the ranks wrote to standard error."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 8192))
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """Ends all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate(timeout=30)
        os.close(self._told)
        self._errors.close()


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A run in an empty bucket, on an S3 server in this process that all ranks are led to."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    for name in [name for name in os.environ if name.startswith(("AWS_", "CLOUDCKPT_"))]:
        del os.environ[name]  # no request may go to an account of the user's
    os.environ.update(
        AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{server.get_host_and_port()[1]}",
        AWS_ACCESS_KEY_ID="demo",
        AWS_SECRET_ACCESS_KEY="demo",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        NO_PROXY="127.0.0.1",
        no_proxy="127.0.0.1",
    )
    try:
        boto3.client("s3").create_bucket(Bucket="demo")
        yield "s3://demo/run"
    finally:
        server.stop()


@contextlib.contextmanager
def bucket_of_user(uri: str, keep: bool) -> Iterator[str]:
    """A run beneath a URI or folder of the user's; nothing of it is left there in the end."""
    run = f"{uri.rstrip('/')}/cloudckpt-demo-{uuid.uuid4().hex[:8]}"
    cloudckpt.latest(run)  # tells now whether bucket and credentials are any good
    try:
        yield run
    finally:
        cloudckpt.sweep(run, older_than=0)
        if keep:
            print(f"the checkpoints are kept at {run}")
        else:
            for step in cloudckpt.list_checkpoints(run):
                cloudckpt.delete(step.uri)
            _delete_rest(run)


def _delete_rest(run: str) -> None:
    """What names the job that has claimed the run; cloudckpt itself never deletes that."""
    place = cloudckpt.uri.CheckpointURI.parse(run)
    if place.scheme == "file":
        shutil.rmtree(place.prefix)
    else:
        store = open_store(place, cloudckpt.Config())
        for info in store.list(place.key("")):
            store.delete(info.key)


def _is_not_found(checkpoint: str) -> bool:
    try:
        cloudckpt.inspect(checkpoint)
    except cloudckpt.errors.CheckpointNotFoundError:
        return True
    return False


def _described(left: cloudckpt.runs.Leftovers) -> str:
    size = f"{left.nbytes / 1e6:.0f} MB"
    return f"{len(left.objects)} objects of {size}, {len(left.uploads)} unfinished uploads"


def main() -> None:
    """Ends the process with 1 if a check did not hold."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uri", help="a bucket or folder, e.g. s3://bucket/path")
    parser.add_argument("--steps", type=int, default=48, help="a multiple of 6")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints at --uri")
    given = parser.parse_args()
    if given.steps < SAVES or given.steps % SAVES:
        parser.error(f"--steps: give a multiple of {SAVES}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        with bucket_of_user(given.uri, given.keep) if given.uri else own_server() as run:
            print(f"checkpoints go to {run}")
            demo = Demo(run, given.steps)
            demo.tell()
    except cloudckpt.errors.CloudCheckpointError as error:
        sys.exit(f"the demo failed: {error}")
    if not demo.all_hold:
        sys.exit("the demo failed: a check marked with ✗ above did not hold")


if __name__ == "__main__":
    main()
