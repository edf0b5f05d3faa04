"""Trains on 2 ranks, kills one amid a save, goes on with 4, kills all, finishes with 1.

``make demo`` runs it on an S3 server of its own; ``make demo URI=s3://bucket/path`` elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudckpt
from cloudckpt.stores.registry import open_store

SAVES = 6  # checkpoints of the whole run; the third is cut in its middle and written again
SAME_LOSS = 1e-3  # of a batch, summed by other numbers of ranks in another order
SAME_CURVE = 5e-2  # of steps that two numbers of ranks train from the same checkpoint


TORCHRUN = f"""{sys.executable} -m torch.distributed.run --nproc-per-node=%d --local-addr=127.0.0.1
    --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 {Path(__file__).with_name("train.py")}"""


class Phase:
    """One start of the training by torchrun, which has ended."""

    def __init__(self, ranks: int, *arguments: str) -> None:
        print(f"\n{ranks} rank(s) train", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            events, words = Path(folder, "events"), Path(folder, "stderr")
            surroundings = {"DEMO_EVENTS": str(events), "CUDA_VISIBLE_DEVICES": ""}
            events.touch()
            with words.open("wb") as stderr:
                command = [*(TORCHRUN % ranks).split(), *filter(None, arguments)]
                code = subprocess.run(command, stderr=stderr, env=os.environ | surroundings)
            self.ranks, self.words = ranks, words.read_text(errors="replace")
            self.events = [json.loads(line) for line in events.read_text().splitlines()]
        self.losses: dict[int, float] = {e["step"]: e["loss"] for e in self.named("stepped")}
        if not self.losses or (code.returncode and not arguments[-1]):
            sys.exit(f"torchrun ended with {code.returncode}\n{self.words[-8192:]}")

    def named(self, name: str) -> list[dict[str, Any]]:
        """What ranks told by this name."""
        return [event for event in self.events if event["event"] == name]


class Demo:
    """The story, and what was checked of it."""

    def __init__(self, run: str, steps: int) -> None:
        self.run, self.steps, self.every = run, steps, steps // SAVES
        self.all_hold = True

    def check(self, claim: str, holds: object, evidence: object) -> None:
        """Prints a claim, whether it holds, and what says so."""
        self.all_hold = self.all_hold and bool(holds)
        print(f"{'✓' if holds else '✗'} {claim}\n    {evidence}", flush=True)

    def train(self, ranks: int, killed: str = "") -> Phase:
        """Trains from the newest checkpoint on, until all ranks have ended."""
        return Phase(ranks, self.run, f"--steps={self.steps}", f"--save-every={self.every}", killed)

    def tell(self) -> None:
        """Runs the three phases."""
        torn, staged = 3 * self.every, 5 * self.every
        place = f"{self.run}/step-{torn}"
        first = self.train(2, f"--tear-at={torn}")
        cut, noticed = first.named("torn"), first.named("failed")
        self.check(
            f"rank 1 was killed in the middle of the save of step {torn}",
            cut and cut[0]["holds"],
            f"{cut[0]['nbytes'] / 1e6:.0f} MB were there, and unfinished uploads" if cut else "",
        )
        codes = dict(re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", first.words))
        self.check("the rank died by SIGKILL", codes.get("1") == "-9", f"exit codes {codes}")
        self.check(
            "the other rank noticed and ended",
            [one["rank"] for one in noticed] == [0],
            noticed[0]["error"].rpartition("] ")[2].partition(". ")[0] if noticed else "",
        )
        try:
            cloudckpt.inspect(place)
            is_missing = False
        except cloudckpt.errors.CheckpointNotFoundError:
            is_missing = True
        left = cloudckpt.runs.find_leftovers(place, older_than=0)
        self.check(
            "the torn save is no checkpoint: to look into it is a CheckpointNotFoundError",
            is_missing,
            f"left of it: {len(left.objects)} objects, {len(left.uploads)} unfinished uploads",
        )
        newest = cloudckpt.latest(self.run)
        self.check(
            "the newest checkpoint is the last one that was committed",
            newest == str(cloudckpt.uri.CheckpointURI.parse(f"{self.run}/step-{2 * self.every}")),
            newest,
        )
        second = self.train(4, f"--die-after={staged}")
        self.check_resumed(second)
        both = first.losses.keys() & second.losses.keys()
        apart = max((abs(first.losses[n] - second.losses[n]) for n in both), default=float("inf"))
        self.check(
            "steps that were lost are learned again the same way",
            apart <= SAME_CURVE,
            f"{len(both)} steps, losses differ by at most {apart:.1e}",
        )
        third = self.train(1)
        restored = self.check_resumed(third)
        self.check(
            "all ranks were killed while a staged step was sent, and it is not lost",
            len(second.named("staged")) == 4 and restored == staged,
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

    def check_resumed(self, phase: Phase) -> int:
        """Compares the loss on the same text before the save and after the load."""
        nothing = {"step": 0, "recorded": 0.0, "again": float("inf")}
        now = (phase.named("resumed") or [nothing])[0]
        self.check(
            f"resumed on {phase.ranks} rank(s), the loss is what it was when it was saved",
            abs(now["again"] - now["recorded"]) <= SAME_LOSS,
            f"step {now['step']}: {now['recorded']:.6f}, now {now['again']:.6f}",
        )
        return int(now["step"])


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
            _delete_rest(cloudckpt.uri.CheckpointURI.parse(run))


def _delete_rest(place: cloudckpt.uri.CheckpointURI) -> None:
    """What names the job that has claimed the run; cloudckpt itself never deletes that."""
    if place.scheme == "file":
        shutil.rmtree(place.prefix)
    else:
        store = open_store(place, cloudckpt.Config())
        for info in store.list(place.key("")):
            store.delete(info.key)


def main() -> None:
    """Ends the process with 1 if a check did not hold."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uri", help="a bucket or folder, e.g. s3://bucket/path")
    parser.add_argument("--steps", type=int, default=48, help="a multiple of 6")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints at --uri")
    given = parser.parse_args()
    if given.steps < SAVES or given.steps % SAVES:
        parser.error(f"--steps: give a multiple of {SAVES}")
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
