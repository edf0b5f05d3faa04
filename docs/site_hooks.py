"""What `make docs` makes of the pages: links, the front page, and the lists of public names."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_NAMES = re.compile(r"<!-- names of ([\w.]+) -->")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    where = f"docs/{page.file.src_uri}"
    if page.file.src_uri == "index.md":
        where, markdown = "README.md", (ROOT / "README.md").read_text("utf-8")
    source = f"{config.repo_url}/blob/main/"
    return _with_names(_LINK.sub(lambda link: _leading(link, where, source, page), markdown))


def _leading(link: re.Match[str], where: str, source: str, page: Any) -> str:
    """A link within the repository, as the site has it: to a page, or to the repository."""
    before, path, after = link.groups()
    target = posixpath.normpath(posixpath.join(posixpath.dirname(where), path))
    if target.startswith("docs/"):
        here = posixpath.dirname(f"docs/{page.file.src_uri}")
        return f"{before}{posixpath.relpath(target, here)}{after}"
    return f"{before}{source}{target}{after}"


def _with_names(markdown: str) -> str:
    """Puts the documentation of each public name of a module in the place of a comment."""

    def directives(comment: re.Match[str]) -> str:
        names = [f"::: {comment[1]}.{name}" for name in public_names(comment[1])]
        return "\n\n".join(names)

    return _NAMES.sub(directives, markdown)


def public_names(module: str) -> list[str]:
    """What `__all__` of a module lists, without submodules and what it takes from other lists."""
    path = ROOT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            listed = [item for item in statement.value.elts if isinstance(item, ast.Constant)]
            names = [item.value for item in listed if not item.value.startswith("__")]
            modules = {file.stem for file in path.iterdir()} if path.is_dir() else set()
            return [name for name in names if name not in modules]
    raise ValueError(f"{module} has no __all__")
