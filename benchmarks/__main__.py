"""Runs the benchmarks: ``python -m benchmarks`` from the repository's root."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.children import ROOT, SOURCE


def main() -> int:
    """Runs the chosen scenarios, prints the tables, and returns 1 if cloudckpt missed a limit."""
    # The tree is what is measured, installed or not; the scenarios' imports follow this.
    sys.path.insert(0, str(ROOT / "src"))
    from benchmarks.bench import Bench
    from benchmarks.chart import draw
    from benchmarks.conditions import BUSY_LOAD, conditions, load_average
    from benchmarks.contenders import CONTENDERS
    from benchmarks.report import Report
    from benchmarks.rows import Row
    from benchmarks.scenarios import SCENARIOS
    from benchmarks.server.process import running_server

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, no verdicts")
    parser.add_argument(
        "--only", action="append", choices=list(SCENARIOS), help="a scenario; may be repeated"
    )
    default = [name for name, entry in CONTENDERS.items() if entry.by_default]
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=default,
        help=f"who takes part (default: {' '.join(default)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="of the reference and cloudckpt; peers get half (7)"
    )
    parser.add_argument(
        "--fleet",
        action="append",
        metavar="RANKSxTENSORS",
        type=_fleet,
        help="a job that fleet simulates; may be repeated (default: 512x1000 1024x1000)",
    )
    parser.add_argument("--chart", type=Path, help="a file for a picture (SVG) of https")
    arguments = parser.parse_args()
    # Both unwind as Ctrl-C does, so that the server and the children end; a shell's background
    # jobs start with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    at = conditions(arguments.contenders)
    if at.load_before >= BUSY_LOAD and not arguments.quick:
        parser.error(f"the load average is {at.load_before}: wait until nothing else is running")
    rows: list[Row] = []
    with _frozen_source(), running_server() as server:
        rounds = 1 if arguments.quick else arguments.rounds
        bench = Bench(server, arguments.contenders, arguments.quick, rounds=rounds)
        usual = [(64, 100)] if arguments.quick else [(512, 1000), (1024, 1000)]
        bench.fleets = arguments.fleet or usual
        for name in arguments.only or SCENARIOS:
            with bench.running(name):
                rows += SCENARIOS[name](bench)
    at = replace(at, load_after=load_average())
    if arguments.quick:
        # Fixed costs weigh too much at these sizes: the limits are for a full run.
        rows = [replace(row, limit=None) for row in rows]
    report = Report(at, rows, bench.failures, arguments.quick)
    print(report.markdown())
    if arguments.chart:
        draw(report, arguments.chart)
    return 0 if report.good else 1


def _fleet(text: str) -> tuple[int, int]:
    ranks, tensors = text.split("x")
    return int(ranks), int(tensors)


@contextmanager
def _frozen_source() -> Iterator[None]:
    """Lets children import a copy of the sources: edits during a run must not mix two versions."""
    with tempfile.TemporaryDirectory(prefix="bench-source-") as folder:
        shutil.copytree(
            ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
        os.environ[SOURCE] = folder
        yield


if __name__ == "__main__":
    sys.exit(main())
