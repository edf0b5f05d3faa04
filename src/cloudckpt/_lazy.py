"""Imports names of a package on first use, as importing them at once would import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from cloudckpt.fork import late_imports

__all__ = ["imported_later"]


def imported_later(
    package: str, names: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that imports names on first use.

    ``__dir__`` lists the package's ``__all__`` and `modules` only.

    Args:
        package: The package's name.
        names: Maps a module in the package to its names, which are separated by spaces.
        modules: Submodules that are attributes of the package even before they are imported.
    """
    homes = {name: module for module, those in names.items() for name in those.split()}
    known = frozenset(modules)
    content = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in homes and name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with late_imports:
            if name in known:
                return import_module(f"{package}.{name}")  # it is an attribute from now on
            found = getattr(import_module(f"{package}.{homes[name]}"), name)
        return content.setdefault(name, found)

    return get, lambda: sorted({*content["__all__"], *known})
