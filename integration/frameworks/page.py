"""The code of docs/frameworks.md, which the jobs of these tests run: so it can't go out of date.

A job runs all Python beneath a heading as one program, in which it puts its own values in the place
of those that a reader would change::

    program = code("Fabric", {"s3://bucket/run": run, "...": "model = fabric.setup(model)"})
    exec(program, {"cloudckpt": cloudckpt, "lightning": lightning})

Each text to replace has to be there, once or more often; of two that overlap the longer one is
replaced. The heading is written out at the call:
tests/test_docs.py looks there for headings whose code no job runs.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def code(heading: str, replaced: Mapping[str, object] | None = None) -> CodeType:
    """The Python beneath a heading, up to the next one; tracebacks name the lines of the page."""
    program, replaced = _sections()[heading]["python"], replaced or {}
    for text in replaced:
        assert text in program, f"{text!r} is not in the code beneath {heading!r}"
    any_of = "|".join(map(re.escape, sorted(replaced, key=len, reverse=True))) or "$^"
    program = re.sub(any_of, lambda found: str(replaced[found[0]]), program)
    return compile(program, str(PAGE), "exec")


def command(heading: str) -> list[str]:
    """The words of the command lines beneath a heading."""
    return shlex.split(_sections()[heading]["commands"].replace("\\\n", " "))


def headings() -> list[str]:
    """Those that have Python beneath them."""
    return [heading for heading, found in _sections().items() if found["python"].strip()]


def _sections() -> dict[str, dict[str, str]]:
    """The Python beneath each heading, at the lines that it has on the page, and the commands."""
    sections = {"": {"python": "", "commands": ""}}
    heading, fence = "", None
    for number, line in enumerate(PAGE.read_text().splitlines()):
        if line.startswith("```"):
            fence = None if fence is not None else line
        elif fence is not None:
            if fence == "```python":
                program = sections[heading]["python"]
                program += "\n" * (number - program.count("\n"))
                sections[heading]["python"] = f"{program}{line}\n"
        elif line.startswith("#"):
            heading = line.lstrip("# ")
            sections[heading] = {"python": "", "commands": ""}
        elif line.startswith("    "):
            sections[heading]["commands"] += f"{line.strip()}\n"
    return sections
