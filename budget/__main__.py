"""Says which room has more lines of code than ``lines.txt`` allows: ``python budget``.

A room is a folder in ``src/cloudckpt``; ``modules`` are the single modules there, ``src`` and
``tests`` all that is in them. Comments, docstrings and empty lines do not count.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def lines_of_code(source: str) -> int:
    """How many lines hold more than comments and docstrings, those of attributes included."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in filter(_is_text, ast.walk(ast.parse(source))):
        code.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(code)


def measured() -> Counter[str]:
    """The lines of code of each room."""
    lines: Counter[str] = Counter()
    package = ROOT / "src" / "cloudckpt"
    for path in package.rglob("*.py"):
        number = lines_of_code(path.read_text())
        folders = path.relative_to(package).parts[:-1]
        lines[folders[0] if folders else "modules"] += number
        lines["src"] += number
    lines["tests"] = sum(lines_of_code(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    return lines


def main() -> int:
    """Prints a row for each room; 1 if any has too many lines."""
    rows = (line.split() for line in (ROOT / "budget" / "lines.txt").read_text().splitlines())
    allowed = {room: int(number) for room, number in rows}
    lines = measured()
    for room in sorted(allowed.keys() | lines.keys()):
        word = "too many" if lines[room] > allowed.get(room, 0) else ""
        print(f"{room:14}{lines[room]:7} of {allowed.get(room, 0):6} {word}".rstrip())
    return int(any(lines[room] > allowed.get(room, 0) for room in lines))


if __name__ == "__main__":
    sys.exit(main())
