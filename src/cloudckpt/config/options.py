"""Declares options: a dataclass field needs only a type, a default and a description.

The name of the environment variable follows from class and field. The type annotation determines
how values are validated, and how the variable's text is parsed. The description is an argument of
:func:`option`, since Python discards a string literal after a field.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import os
import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import urlsplit

from cloudckpt._arguments import refuse_unknown
from cloudckpt.errors import ConfigError

__all__ = [
    "GIB",
    "MIB",
    "Bytes",
    "Options",
    "Pairs",
    "Switch",
    "check_endpoint",
    "documented_options",
    "option",
    "require",
    "timeout",
    "whole_number",
]

T = TypeVar("T")
Switch = Literal["auto", "on", "off"]
Pairs = tuple[tuple[str, str], ...]
Bytes = Annotated[int, "bytes"]
"""A number of bytes; its environment variable also accepts ``64MiB``."""

MIB = 1024 * 1024
GIB = 1024 * MIB

_LONGEST_WAIT = 86_400
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": MIB, "gib": GIB}
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def option(default: T, doc: str, least: float = -math.inf, most: float = math.inf) -> T:
    """Declares a field of :class:`Options`: its default, its description, and its range.

    A number is valid from `least` to `most`, both included; other values have no range.
    """
    return cast(T, _Option(default, doc, least, most))


def timeout(default: float, doc: str) -> float:
    """Declares a field in seconds: from a millisecond to a day, so that every wait ends."""
    return option(default, doc, least=0.001, most=_LONGEST_WAIT)


@dataclass(eq=False)
class _Option:
    """The default of an option's field; parses the option's variable and validates its values."""

    default: Any
    doc: str
    least: float
    most: float

    def __set_name__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.variable = f"{owner.variables}{name.upper()}"

    def __repr__(self) -> str:
        return f"{self.variable} or {self.default!r}"

    def type_and_words(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns the type of the option's values, and single values that are valid as well.

        Such single values are words such as ``auto``, and None. The type is None if only single
        values are valid.
        """
        hint = _hints_of(self.owner)[self.name]
        is_single = get_origin(hint) in (None, Annotated, Literal, tuple)
        kinds = [hint] if is_single else get_args(hint)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        none = type(None)
        types = [kind for kind in kinds if kind is not none and get_origin(kind) is not Literal]
        return types[0] if types else None, (*words, *[None] * (none in kinds))

    def from_environment(self) -> Any:
        """Returns the value of the environment variable; the default if it is unset or empty.

        Raises:
            ConfigError: If the variable's text can't be parsed.
        """
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        kind, words = self.type_and_words()
        if kind is None or text in words:
            return text
        try:
            return _READERS[kind][0](text)
        except (KeyError, ValueError):
            form = _choices(_READERS[kind][1], words)
            raise ConfigError(f"{self.variable}={text!r} is not valid: write {form}") from None

    def checked(self, value: Any) -> Any:
        """Validates a value; returns it in normalized form.

        Raises:
            ConfigError: If the value is not valid.
        """
        kind, words = self.type_and_words()
        shown = f"{self.owner.__name__}.{self.name}={value!r}"
        if (value is None or isinstance(value, str)) and value in words:
            return value
        if kind is None:
            raise ConfigError(f"{shown}: write {_choices('', tuple(filter(None, words)))}")
        if kind == Pairs:
            return _as_pairs(shown, value)
        of = int if kind == Bytes else kind
        if of in (int, float):
            value = _as_number(of, value)
        fits = isinstance(value, (int, float) if of is float else of)
        fits = fits and isinstance(value, bool) == (of is bool)
        require(fits, f"{shown}: write a value of type {_choices(of.__name__, words)}")
        if of in (int, float):
            size = _size if kind == Bytes else str
            limits = f"a value from {size(self.least)} to {size(self.most)}"
            if self.most == math.inf:
                limits = f"a value of at least {size(self.least)}"
            require(self.least <= value <= self.most, f"{shown}: write {limits}")
        return value


def whole_number(value: object) -> int | None:
    """Converts an integer of Python, numpy or torch (zero-dimensional) to int.

    Returns:
        The integer; None for all other values, also for True and 5.0.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it refuses anything else
    # also for tensors with several elements, or without a value
    except (TypeError, ValueError, RuntimeError):
        return None


def _as_number(kind: type, value: Any) -> Any:
    """Converts a number of numpy or torch to Python's, if `kind` (int or float) admits it.

    Any other value is returned unchanged.
    """
    if (whole := whole_number(value)) is not None:
        return whole
    is_real = kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_real else value


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base class of options, which are validated on construction.

    An option that is not given is read from its environment variable; if that is unset or empty,
    the option has its default.

    Attributes:
        variables: The prefix of the environment variables.

    Raises:
        TypeError: If a given name is not that of an option.
        ConfigError: If a value is invalid, or values that are valid alone can't be combined.
    """

    variables: ClassVar[str]

    def __new__(cls, **given: object) -> Any:
        refuse_unknown(cls.__name__, [field.name for field in fields(cls)], given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, _Option):
                if value is field.default:
                    value = field.default.from_environment()
                object.__setattr__(self, field.name, field.default.checked(value))
            elif field.default is MISSING:
                kind: Any = field.default_factory
                give = f"give a cloudckpt.{field.type}(...)"
                require(isinstance(value, kind), f"{field.name}={value!r}: {give}")
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if values that are valid alone can't be combined."""


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    return inspect.get_annotations(cls, eval_str=True)


def documented_options(cls: type[Any]) -> list[tuple[str, str, Any, str]]:
    """Returns ``(name, environment variable, default, description)`` of all described options."""
    options = [field.default for field in fields(cls) if isinstance(field.default, _Option)]
    return [(each.name, each.variable, each.default, each.doc) for each in options]


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def check_endpoint(url: str | None, name: str = "endpoint_url") -> None:
    """Checks that an endpoint is a plain URL, or None.

    Args:
        url: The endpoint.
        name: The name of its option, for the message.

    Raises:
        ConfigError: If the URL is not plain; the message shows no password or signature.
    """
    if url is None:
        return
    require(
        not re.search(r"[@?#\s\x00-\x1f]", url),
        f"{name} must be a plain URL, http://host:port or https://host:port, without "
        "credentials, query and white space",
    )
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # wrong brackets, or an invalid port
        is_valid = False
    require(is_valid, f"{name}={url!r} must have the form http://host:port or https://host")


def _read_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([kmg]ib|b|)\s*", text.lower())
    if match is None:
        raise ValueError
    return int(match.group(1)) * _UNITS[match.group(2)]


def _read_pairs(text: str) -> Pairs:
    pairs = [part.partition("=") for part in text.split(",") if part]
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


# for each type: the parser of a variable's text, and a description of the format
_READERS: dict[Any, Any] = {
    str: (str, "a text"),
    bool: (lambda text: _FLAGS[text.lower()], "1 or 0"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    Bytes: (_read_size, "a number of bytes, or one with KiB, MiB or GiB"),
    Pairs: (_read_pairs, "key=value,key=value"),
}


def _as_pairs(shown: str, value: Any) -> Pairs:
    """Converts a mapping or pairs to a hashable tuple of pairs of strings."""
    try:
        return tuple((str(key), str(content)) for key, content in dict(value).items())
    except (TypeError, ValueError):
        raise ConfigError(f"{shown}: give a mapping or pairs of strings") from None


def _choices(form: str, words: tuple[Any, ...]) -> str:
    """Returns the accepted values in words, such as ``a number, 'auto' or None``."""
    texts = [*filter(None, [form]), *map(repr, words)]
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _size(nbytes: float) -> str:
    unit, name = (GIB, "GiB") if nbytes >= GIB else (MIB, "MiB") if nbytes >= MIB else (1, "bytes")
    return f"{nbytes / unit:g} {name}"
