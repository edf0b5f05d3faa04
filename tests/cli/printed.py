"""What a command has printed."""

from __future__ import annotations


def rows(capsys) -> list[list[str]]:
    """The lines on stdout, as lists of their fields."""
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]
