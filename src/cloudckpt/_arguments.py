"""Raises TypeErrors for unknown keyword arguments, with a suggestion of what was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

__all__ = ["refuse_unknown", "suggesting"]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

# arguments of torch's and other writers, and their equivalents in cloudckpt
_ELSEWHERE = {
    "thread_count": "write config=Config(connections=…)",
    "per_thread_copy_ahead": "write config=Config(memory_budget=…)",
    "single_file_per_rank": "leave it out, each rank writes one or two objects",
    "sync_files": "leave it out, files are always synchronised",
}


def refuse_unknown(function: str, known: Collection[str], given: Collection[str]) -> None:
    """Raises TypeError for the first of `given` that is not in `known`, with a suggestion."""
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else _ELSEWHERE.get(name, "")
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}"
            + (f": {advice}" if advice else "")
        )


def suggesting(function: _Callable) -> _Callable:
    """Decorates a function to suggest names in its TypeErrors for unknown keyword arguments."""
    known = list(inspect.signature(function).parameters)
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(name, known, kwargs)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
