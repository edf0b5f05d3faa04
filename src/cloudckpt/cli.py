"""The command ``cloudckpt``.

Its packages are optional, like all that a training job does not need.
"""

# no `from __future__ import annotations`: typer reads the annotations of functions in functions

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from cloudckpt import CloudCheckpointError, MissingDependencyError, __version__

if TYPE_CHECKING:
    import typer

__all__ = ["main"]


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    try:
        _require("demo", "typer", "rich")
        _app()()
    except CloudCheckpointError as error:
        sys.exit(f"cloudckpt: {error}")


def _app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        name="cloudckpt",
        help="Save and load PyTorch distributed checkpoints straight to and from object stores.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"cloudckpt {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version."
            ),
        ] = False,
    ) -> None:
        pass

    @app.command()
    def demo(
        uri: Annotated[
            str | None,
            typer.Option(
                help="Use this bucket, e.g. s3://bucket/path, instead of an embedded S3 server."
            ),
        ] = None,
        steps: Annotated[int, typer.Option(min=6, help="Steps to train.")] = 48,
        keep: Annotated[
            bool, typer.Option("--keep", help="Leave the checkpoints in the bucket of --uri.")
        ] = False,
    ) -> None:
        """Train a small GPT, kill it in the middle of a save, and resume on more and fewer ranks.

        Needs no account and no network unless --uri is given.
        """
        if keep and uri is None:
            raise typer.BadParameter("--keep needs --uri: the embedded server keeps nothing")
        _require("demo", "rich", "moto", "flask", "boto3", "numpy")
        raise typer.Exit(_demo(uri, steps, keep))

    return app


def _demo(uri: str | None, steps: int, keep: bool) -> int:
    from rich.console import Console

    from cloudckpt.demo.children import ChildError
    from cloudckpt.demo.run import run

    console = Console()
    try:
        passed = run(uri, steps=steps, keep=keep, console=console)
    except ChildError as error:
        sys.exit(f"cloudckpt: the demo failed: {error}")
    if not passed:
        sys.exit("cloudckpt: the demo failed: a check marked with ✗ above did not hold")
    return 0


def _require(extra: str, *packages: str) -> None:
    """Checks that the packages of an extra are installed.

    Raises:
        MissingDependencyError: If one is not.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}; "
            f"install it with: pip install 'cloudckpt[{extra}]'"
        )
