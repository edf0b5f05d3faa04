"""The typer app, its exit codes, and the output of error messages."""

import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from cloudckpt._version import __version__
from cloudckpt.cli.output import safe
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    InvalidURIError,
)

FAILED, WRONG, NOTHING_THERE, DAMAGED = 1, 2, 3, 4
"""Exit codes; typer also uses ``WRONG``, for wrong arguments, and 130 for Ctrl-C."""

app = typer.Typer(
    name="cloudckpt",
    help="List, inspect, verify, compare, copy and delete checkpoints in stores and folders. "
    "Options that are not given are read from environment variables (CLOUDCKPT_*). Exit codes: 0 "
    "success, 1 failure, 2 invalid arguments or options, 3 no checkpoint, 4 a damaged checkpoint, "
    "130 Ctrl-C; diff uses those of diff(1).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which joins the lines of a paragraph
)


def main() -> None:
    """Runs the command line, and ends the process with an exit code."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # by torch without numpy
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-: output to it is discarded
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for names that it can't encode
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except CloudCheckpointError as error:
        fail(error, code_of(error))
    except BrokenPipeError:  # the reader of the pipe has ended, as head does: no message
        sys.stdout = sys.stderr
        sys.exit(FAILED)
    except OSError as error:
        sys.stdout = sys.stderr  # so that the rest of the output is not written at exit
        fail(f"the operating system reported an error: {error}", FAILED)


def fail(error: object, code: int) -> NoReturn:
    """Prints an error to stderr, and ends the process with an exit code."""
    say(error)
    sys.exit(code)


def say(error: object) -> None:
    """Prints an error or a warning to stderr."""
    print(f"cloudckpt: {safe(str(error))}", file=sys.stderr, flush=True)


def code_of(error: CloudCheckpointError) -> int:
    """Returns the exit code for an error."""
    codes = {
        CheckpointCorruptError: DAMAGED,
        CheckpointNotFoundError: NOTHING_THERE,
        ConfigError: WRONG,
        InvalidURIError: WRONG,
    }
    return next((code for cls, code in codes.items() if isinstance(error, cls)), FAILED)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cloudckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass
