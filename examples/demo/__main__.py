"""A small GPT is trained, killed in the middle of a save, and resumed on more and fewer ranks.

``make demo`` runs it; it needs no account and no network unless ``--uri`` names a bucket.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

import cloudckpt
from children import ChildError
from run import run


def main() -> None:
    """Runs the demo; ends the process with 1 if a check did not hold."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--uri", help="a bucket or folder, e.g. s3://bucket/path, not an embedded S3 server"
    )
    parser.add_argument("--steps", type=int, default=48, help="steps to train, 6 or more")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints at --uri")
    given = parser.parse_args()
    if given.keep and given.uri is None:
        parser.error("--keep needs --uri: the embedded server keeps nothing")
    if given.steps < 6:
        parser.error("--steps must be 6 or more")
    try:
        passed = run(given.uri, steps=given.steps, keep=given.keep, console=Console())
    except (ChildError, cloudckpt.errors.CloudCheckpointError) as error:
        sys.exit(f"the demo failed: {error}")
    if not passed:
        sys.exit("the demo failed: a check marked with ✗ above did not hold")


if __name__ == "__main__":
    main()
