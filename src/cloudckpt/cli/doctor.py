"""The command ``doctor``, which checks all that saving and loading need."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
import logging
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloudckpt.cli.app import FAILED
from cloudckpt.cli.call import PLACES, Call, command, seconds
from cloudckpt.cli.output import print_json, safe

if TYPE_CHECKING:
    from cloudckpt.doctor import Finding

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}
_MIB = 1024 * 1024


@command(PLACES)
def doctor(
    call: Call, location: str, *, read_only: bool = False, size: int = 16, patience: str = "60s"
) -> None:
    """Check all that saving and loading need: credentials, connection, permissions, speed.

    The objects that it writes are named .cloudckpt-doctor.* and deleted again. Credentials are not
    shown. The exit code is 1 if a check fails.

    Args:
        call: The options that all commands share.
        location: The location to check, e.g. s3://bucket/run.
        read_only: Write nothing: check only what loading needs.
        size: MiB to upload and download to measure the speed, at most 1024.
        patience: Time after which a check fails, e.g. 60s.
    """
    from cloudckpt.doctor import examine

    def tell(finding: "Finding") -> None:
        if not (call.as_json or (call.quiet and finding.outcome == "ok")):
            _print(finding)

    logger = logging.getLogger("cloudckpt")
    level = logger.level
    if level == logging.NOTSET:  # otherwise --verbose has set it
        logger.setLevel(logging.ERROR)  # warnings about retries are not shown among the findings
    try:
        findings = examine(
            location,
            config=call.config,
            size=size * _MIB,
            read_only=read_only,
            patience=seconds(patience),
            tell=tell,
        )
    finally:
        logger.setLevel(level)
    works = all(finding.outcome != "failed" for finding in findings)
    if call.as_json:
        print_json({"works": works, "findings": [*map(dataclasses.asdict, findings)]})
    if not works:
        raise typer.Exit(FAILED)


def _print(finding: "Finding") -> None:
    """Prints the result of a check: a paragraph on a terminal, elsewhere tab-separated fields."""
    if not sys.stdout.isatty():
        fields = (finding.outcome, finding.check, finding.found, finding.advice)
        print("\t".join(map(safe, fields)), flush=True)
        return
    sign, style = _SIGNS.get(finding.outcome, ("-", "dim"))
    text = Text(safe(finding.found))
    if finding.advice:
        text.append(f"\n→ {safe(finding.advice)}", style="bold" if style != "green" else "dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=11)
    table.add_column(overflow="fold")
    table.add_row(Text(sign, style=style), Text(finding.check, style=style), text)
    Console().print(table)
