"""The functions, classes and methods of modules: to see that something leaves them as they are."""

import sys
import types
from typing import Any

_KINDS = (types.FunctionType, type, classmethod, staticmethod, property)


def identities(*packages: str) -> dict[tuple[str, str], Any]:
    """What the imported modules of these packages define, and their classes, by owner and name."""
    owners: dict[str, Any] = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and isinstance(module, types.ModuleType)
    }
    for name, module in list(owners.items()):
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:
                owners[f"{name}.{value.__qualname__}"] = value
    return {
        (name, attribute): value
        for name, owner in owners.items()
        for attribute, value in list(vars(owner).items())
        if issubclass(type(value), _KINDS)
    }
