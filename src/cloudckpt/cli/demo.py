"""The command that shows what cloudckpt does."""

# no `from __future__ import annotations`: typer reads the annotations of functions

from importlib.util import find_spec
from typing import Annotated, Optional

import typer
from rich.console import Console

from cloudckpt.cli.app import FAILED, app, fail
from cloudckpt.errors import MissingDependencyError


@app.command()
def demo(
    uri: Annotated[
        Optional[str],  # noqa: UP045 - see above
        typer.Option(
            help="Use this bucket or folder, e.g. s3://bucket/path, not an embedded S3 server."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=6, help="Steps to train.")] = 48,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the checkpoints at --uri.")] = False,
) -> None:
    """Train a small GPT, kill it in the middle of a save, and resume on more and fewer ranks.

    Needs no account and no network unless --uri is given.
    """
    if keep and uri is None:
        raise typer.BadParameter("--keep needs --uri: the embedded server keeps nothing")
    own_server = ("moto", "flask", "boto3") if uri is None else ()
    _require("demo", "numpy", *own_server)

    from cloudckpt.demo.children import ChildError
    from cloudckpt.demo.run import run

    try:
        passed = run(uri, steps=steps, keep=keep, console=Console())
    except ChildError as error:
        fail(f"the demo failed: {error}", FAILED)
    if not passed:
        fail("the demo failed: a check marked with ✗ above did not hold", FAILED)


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
