"""Names of a package that are imported on first use, since importing them imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from cloudckpt.fork import late_imports

__all__ = ["imported_later"]


def imported_later(
    package: str, names: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package, which lists public names only.

    Args:
        package: Its name.
        names: For each module, its names, separated by spaces.
        modules: The modules that are attributes of the package before anything has imported them.
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
