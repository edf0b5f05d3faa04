"""The entry point of the command ``cloudckpt``, and of ``python -m cloudckpt``."""

import sys


def main() -> None:
    """Runs the command line; if packages of its extra are missing, says how to install them."""
    try:
        from cloudckpt.cli import main as run
    except KeyboardInterrupt:  # the import takes a moment
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.exit(
            f"cloudckpt: the command line needs {error.name}; "
            "install it with: pip install 'cloudckpt[cli]'"
        )
    run()


if __name__ == "__main__":
    main()
