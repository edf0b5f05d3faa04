"""Declares options: a dataclass field with a type, a default and a text is all that is needed.

The environment variable follows from class and name; the check, and the parsing of the variable's
text, from the annotation. The meaning is an argument of :func:`option`, since Python discards a
string that merely follows a field.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import urlsplit

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
"""A number of bytes; its variable also accepts ``64MiB``."""

MIB = 1024 * 1024
GIB = 1024 * MIB

_LONGEST_WAIT = 86_400
_UNITS = {"b": 1, "kib": 1024, "mib": MIB, "gib": GIB}
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def option(default: T, doc: str, *, least: float | None = None, most: float = math.inf) -> T:
    """Declares a field of :class:`Options`.

    Args:
        default: The value without argument and variable.
        doc: What it means.
        least: The least valid number, if there is one.
        most: The greatest valid number, if there is a least.
    """
    return cast(T, _Option(default, doc, least, most))


def timeout(default: float, doc: str) -> float:
    """Declares a field of seconds: above 0, and at most a day, so that every wait ends."""
    return cast(float, _Option(default, doc, is_timeout=True))


@dataclass(eq=False)
class _Option:
    """The default of a field, which knows the valid values."""

    default: Any
    doc: str
    least: float | None = None
    most: float = math.inf
    is_timeout: bool = False

    def __set_name__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.variable = f"{owner.variables}{name.upper()}"

    def __repr__(self) -> str:
        return f"{self.variable} or {self.default!r}"

    @cached_property
    def _annotation(self) -> tuple[Any, bool, tuple[str, ...]]:
        """Its type, whether it may be None, and the words allowed instead."""
        hint = _hints_of(self.owner)[self.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = [get_args(kind) for kind in kinds[1:] if get_origin(kind) is Literal]
        return kinds[0], NoneType in kinds, tuple(itertools.chain(*words))

    def from_environment(self) -> Any:
        """The value of its variable, else the default."""
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        kind, _, words = self._annotation
        if get_origin(kind) is Literal or text in words:
            return text
        read, form = _READERS[kind]
        form = _or_word(form, words)
        try:
            return read(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{self.variable}={text!r} is not valid: write {form}") from None

    def checked(self, value: Any) -> Any:
        """The value, normalised.

        Raises:
            ConfigError: If it is not valid.
        """
        kind, optional, words = self._annotation
        shown = f"{self.owner.__name__}.{self.name}={value!r}"
        if (value is None and optional) or (isinstance(value, str) and value in words):
            return value
        if kind == Pairs:
            return _as_pairs(shown, value)
        if get_origin(kind) is Literal:
            require(value in get_args(kind), f"{shown}: write {_choices(get_args(kind))}")
            return value
        of = int if kind == Bytes else kind
        if of in (int, float):
            value = _as_number(of, value)
        fits = isinstance(value, (int, float) if of is float else of)
        fits = fits and isinstance(value, bool) == (of is bool)
        require(fits, f"{shown}: must be {_or_word(of.__name__, words)}{' or None' * optional}")
        show = _size if kind == Bytes else str
        if self.is_timeout:
            require(0 < value <= _LONGEST_WAIT, f"{shown}: write 0 to {_LONGEST_WAIT} seconds")
        elif self.least is not None:
            least, most = show(self.least), show(self.most)
            allowed = (
                f"at least {least} is needed"
                if self.most == math.inf
                else f"write {least} to {most}"
            )
            require(self.least <= value <= self.most, f"{shown}: {allowed}")
        return value


def whole_number(value: object) -> int | None:
    """A whole number of Python, numpy or torch (zero-dimensional); None for anything else.

    True does not count, although Python's bool is an int, and neither does 5.0.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it refuses anything else
    except (TypeError, ValueError, RuntimeError):  # also a tensor of many, or without a value
        return None


def _as_number(kind: type, value: Any) -> Any:
    """The same number as a Python number, if it is a number."""
    if (whole := whole_number(value)) is not None:
        return whole
    is_real = kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_real else value


@dataclass(frozen=True, kw_only=True)
class Options:
    """Values that are validated on construction; the base of classes of options.

    An option that is not given comes from the environment at that moment, else it has its default.

    Attributes:
        variables: The prefix of its variables.
    """

    variables: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, _Option):
                if value is field.default:
                    value = field.default.from_environment()
                object.__setattr__(self, field.name, field.default.checked(value))
            else:
                kind: Any = field.default_factory
                require(isinstance(value, kind), f"{field.name}={value!r}: must be {field.type}")
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if values that are valid alone don't go together."""


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def documented_options(cls: type[Any]) -> list[tuple[str, str, Any, str]]:
    """``(name, variable, default, meaning)`` of each option of a class, for the documentation."""
    options = [field.default for field in fields(cls) if isinstance(field.default, _Option)]
    return [(each.name, each.variable, each.default, each.doc) for each in options]


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with ``message`` unless ``ok``."""
    if not ok:
        raise ConfigError(message)


def check_endpoint(url: str | None, name: str = "endpoint_url") -> None:
    """Checks that an endpoint is a plain URL; possible passwords and signatures are not shown.

    Raises:
        ConfigError: If it is not.
    """
    if url is None:
        return
    require(url == url.strip(), f"{name} begins with or ends in white space: remove it")
    require(
        not re.search(r"[@?#\s\x00-\x1f]", url),
        f"{name} must be a plain URL, http://host:port or https://host:port: credentials and "
        "queries do not belong into it",
    )
    require(
        url.startswith(("http://", "https://")),
        f"{name}={url!r} must begin with http:// or https://",
    )
    try:
        parts = urlsplit(url)
        names_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # for wrong brackets, or a port that is not a number
        names_host = False
    require(names_host, f"{name}={url!r} names no host and port: write http://host:port")


def _read_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([kmg]ib|b)?\s*", text.lower())
    if match is None:
        raise ValueError
    return int(match.group(1)) * _UNITS[match.group(2) or "b"]


def _read_pairs(text: str) -> Pairs:
    pairs = [part.partition("=") for part in text.split(",") if part]
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "a text"),
    bool: (lambda text: _FLAGS[text.lower()], "1 or 0"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    Bytes: (_read_size, "a number of bytes, or one with KiB, MiB or GiB"),
    Pairs: (_read_pairs, "key=value,key=value"),
}


def _as_pairs(shown: str, value: object) -> Pairs:
    """A mapping, or pairs of strings, in a hashable form."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((str(key), str(content)) for key, content in pairs)
    except (TypeError, ValueError):
        raise ConfigError(f"{shown}: give a mapping or pairs of strings") from None


def _or_word(form: str, words: tuple[str, ...]) -> str:
    """The accepted form, and the words accepted instead of it."""
    return " or ".join([form, *map(repr, words)])


def _choices(values: tuple[Any, ...]) -> str:
    """``'a', 'b' or 'c'``."""
    texts = [repr(value) for value in values]
    return f"{', '.join(texts[:-1])} or {texts[-1]}"


def _size(nbytes: float) -> str:
    unit, name = (GIB, "GiB") if nbytes >= GIB else (MIB, "MiB") if nbytes >= MIB else (1, "bytes")
    return f"{nbytes / unit:g} {name}"
