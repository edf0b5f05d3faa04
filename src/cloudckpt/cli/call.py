"""Adds commands to the app, with the options that all commands share, and prints their results.

A command is a function: its first parameter is a :class:`Call`, its other positional parameters are
the arguments of the command, its keyword-only parameters the options, and its docstring is their
help text.
"""

# no `from __future__ import annotations`: typer reads the annotations of functions

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from cloudckpt.cli.app import FAILED, app
from cloudckpt.cli.output import print_json, print_table
from cloudckpt.config import AzureOptions, Config, GCSOptions, S3Options, config_or_default

RUNS, CHECKPOINTS, PLACES = "Runs", "Checkpoints", "Places"
"""The headings under which the help lists the commands."""

_OTHER_NAMES = {
    "as_json": ["--json"],
    "metric": ["--metric", "--best-metric"],
    "mode": ["--mode", "--best-mode"],
    "quiet": ["--quiet", "-q"],
    "recursive": ["--recursive", "-r"],
    "verbose": ["--verbose", "-v"],
    "yes": ["--yes", "-y"],
}
_CLOUDS = {"s3": "s3", "gs": "gcs"} | dict.fromkeys(["az", "abfs", "abfss", "https"], "azure")
_OPTIONS = {"s3": S3Options, "gcs": GCSOptions, "azure": AzureOptions}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def seconds(duration: str) -> float:
    """Converts ``90s``, ``15min``, ``2h`` or ``1d`` to seconds; only 0 needs no unit.

    Raises:
        typer.BadParameter: If ``duration`` is not such a text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d)|0", duration.strip())
    if match is None:
        raise typer.BadParameter(
            f"{duration!r} is not a duration: write a number with its unit, such as 90s, 2h or 1d"
        )
    return float(match[1] or 0) * _UNITS[match[2] or "s"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The shared options of one call of a command.

    Attributes:
        config: The options given on the command line; None if there are none, so that all are read
            from the environment.
        as_json: Whether the result is printed as JSON.
        quiet: Whether only requested results and errors are printed.
        dry_run: Whether nothing is changed.
        yes: Whether deletions need no confirmation.
    """

    config: Config | None
    as_json: bool
    quiet: bool
    dry_run: bool
    yes: bool

    @property
    def shows_progress(self) -> bool:
        """Whether progress is shown: not with ``--quiet`` or ``--json``."""
        return not (self.quiet or self.as_json)

    @property
    def is_interactive(self) -> bool:
        """Whether more than the result is printed: on a terminal, without --quiet or --json."""
        return sys.stdout.isatty() and self.shows_progress

    def having(self, overwrite: bool | None) -> Config:
        """Returns the options, with ``overwrite`` as given unless it is None."""
        config = config_or_default(self.config)
        return config if overwrite is None else replace(config, overwrite=overwrite)

    def show(
        self,
        rows: Sequence[Mapping[str, object]],
        document: object = None,
        styles: Mapping[str, str] | None = None,
    ) -> None:
        """Prints a table; with ``--json``, prints ``document``, or the rows if it is None.

        ``styles`` are those of :func:`~cloudckpt.cli.output.print_table`.
        """
        if self.as_json:
            print_json(rows if document is None else document)
        else:
            print_table(rows, styles)

    def done(self, rows: Sequence[Mapping[str, object]], document: Mapping[str, object]) -> None:
        """Prints what a command has done, or in a dry run would do.

        With ``--quiet`` it is printed only in a dry run, or as JSON.
        """
        if self.as_json or self.dry_run or not self.quiet:
            self.show(rows, {"dry_run": self.dry_run, **document})

    def confirm(self, question: str) -> None:
        """Asks the user a question on the terminal, unless ``--yes`` was given.

        Raises:
            typer.BadParameter: If stdin is not a terminal, and ``--yes`` was not given.
            typer.Exit: If the answer is no.
        """
        if not self.yes and not sys.stdin.isatty():
            raise typer.BadParameter(
                "confirm the deletion with --yes: there is no terminal to ask on"
            )
        if not self.yes and not typer.confirm(question):
            raise typer.Exit(FAILED)


def command(
    panel: str, name: str | None = None, *, writes: bool = False, asks: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds a command to the app.

    The function gets a :class:`Call` and the command's own arguments and options.

    Args:
        panel: The panel of the help in which the command is listed.
        name: The name of the command; None for that of the function.
        writes: Whether the command has ``--dry-run``.
        asks: Whether the command has ``--yes``.
    """
    left_out = {name for name, has in (("dry_run", writes), ("yes", asks)) if not has}

    def add(function: Callable[..., None]) -> Callable[..., None]:
        own = _parameters(function, "Options")
        shared = [
            param for param in _parameters(_call, "Common options") if param.name not in left_out
        ]

        @functools.wraps(function)
        def run(**options: Any) -> None:
            given = {param.name: options[param.name] for param in own}
            with _call(given, **{param.name: options[param.name] for param in shared}) as call:
                function(call, **given)

        run.__doc__ = _described(function)[0]
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {param.name: param.annotation for param in (*own, *shared)}
        app.command(name, rich_help_panel=panel)(run)
        return function

    return add


def _parameters(function: Callable[..., Any], panel: str) -> list[inspect.Parameter]:
    """Returns the parameters of a function without the first, annotated for typer."""
    annotated, help = [], _described(function)[1]
    for param in list(inspect.signature(function).parameters.values())[1:]:
        text, dashed = help.get(param.name, ""), f"--{param.name.replace('_', '-')}"
        if param.kind is not param.KEYWORD_ONLY:
            option = typer.Argument(help=text)
        elif param.annotation == bool | None:
            option = typer.Option(f"{dashed}/{dashed.replace('--', '--no-', 1)}", help=text)
        else:
            names = _OTHER_NAMES.get(param.name, [dashed])
            option = typer.Option(*names, help=text, rich_help_panel=panel)
        annotation = Annotated[param.annotation, option]  # type: ignore[name-defined]  # made of values
        annotated.append(param.replace(annotation=annotation, kind=param.KEYWORD_ONLY))
    return annotated


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the first part of a function's docstring, and the texts of its parameters by name."""
    text, _, parameters = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    parameter_texts = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", parameters, re.MULTILINE)
    return text, {name: " ".join(meaning.split()) for name, meaning in parameter_texts}


@contextmanager
def _call(
    given: Mapping[str, Any],
    *,
    dry_run: bool = False,
    yes: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    concurrency: int | None = None,
    endpoint_url: str | None = None,
    profile: str | None = None,
    region: str | None = None,
) -> Iterator[Call]:
    """Makes the :class:`Call` of a command from the options that all commands share.

    The texts about these parameters are the help of the options.

    Args:
        given: The options of the command itself, among them its locations.
        dry_run: Print what would be done, and change nothing.
        yes: Do not ask for confirmation.
        as_json: Print the result as JSON.
        quiet: Print only requested results and errors: no progress, no confirmation.
        verbose: Log each step to stderr.
        concurrency: Maximum number of concurrent transfers and requests. [default: as
            CLOUDCKPT_CONNECTIONS says, else chosen by the measured speed]
        endpoint_url: URL of the store's endpoint, e.g. https://minio:9000.
        profile: Profile in the AWS configuration files (S3 only).
        region: Region of the bucket, e.g. eu-west-1 (S3 only).
    """
    options = _of_store(given, endpoint_url=endpoint_url, profile=profile, region=region)
    if concurrency is not None:
        options["connections"] = concurrency
    config = Config(**options) if options else None
    logger, handler = logging.getLogger("cloudckpt"), logging.StreamHandler()
    level = logger.level
    if verbose:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield Call(config=config, as_json=as_json, quiet=quiet, dry_run=dry_run, yes=yes)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _of_store(given: Mapping[str, Any], **wanted: str | None) -> dict[str, Any]:
    """Returns the given store options as arguments of `Config`, for the cloud of the locations.

    The result is empty if no option was given.

    Raises:
        typer.BadParameter: If options were given, and the clouds of the locations do not include
            exactly one that has all of these options.
    """
    texts = [text for arg in given.values() for text in (arg if isinstance(arg, list) else [arg])]
    schemes = [text.partition("://")[0].lower() for text in texts if isinstance(text, str)]
    clouds = {_CLOUDS[scheme] for scheme in schemes if scheme in _CLOUDS}
    options = {name: value for name, value in wanted.items() if value is not None}
    if not options:
        return {}
    fitting = [cloud for cloud in clouds if all(hasattr(_OPTIONS[cloud], name) for name in options)]
    if len(fitting) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        why = "several clouds; set CLOUDCKPT_* instead" if fitting else "no cloud with all of them"
        raise typer.BadParameter(f"leave out {names}: the locations are in {why}")
    return {fitting[0]: _OPTIONS[fitting[0]](**options)}
