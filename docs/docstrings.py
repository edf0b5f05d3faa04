"""Lets docstrings, which are written for `help()`, be read as Markdown by the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")


class Plain(griffe.Extension):
    """Cross-references become code, and `::` before an example a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = text.replace("  # doctest: +SKIP", "")
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
