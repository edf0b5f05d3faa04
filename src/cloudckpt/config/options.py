"""How options are declared: dataclass fields that an environment variable can set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from cloudckpt.errors import ConfigError

__all__ = [
    "MIB",
    "Pairs",
    "Switch",
    "as_pairs",
    "check_endpoint",
    "check_switch",
    "check_tags",
    "check_types",
    "check_unique",
    "documented_options",
    "option",
    "parse_flag",
    "parse_pairs",
    "parse_size",
    "require",
]

T = TypeVar("T")
Switch = Literal["auto", "on", "off"]
Pairs = tuple[tuple[str, str], ...]

MIB = 1024 * 1024

_MOST_TAGS = 10  # of an object on S3 and Azure, and the characters of a tag's name and its value
_LONGEST_TAG = (128, 256)
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB}


def parse_size(text: str) -> int:
    """Bytes, written as a number or with KiB, MiB or GiB."""
    match = re.fullmatch(r"\s*(\d+)\s*([kmg]ib|b)?\s*", text.lower())
    if match is None:
        raise ValueError("write a number of bytes, or one with KiB, MiB or GiB")
    return int(match.group(1)) * _UNITS[match.group(2) or ""]


def parse_flag(text: str) -> bool:
    """A switch, written 1 or 0, true or false, on or off."""
    known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in known:
        raise ValueError("write 1 or 0")
    return known[text.lower()]


def parse_pairs(text: str) -> Pairs:
    """Pairs, written ``key=value,key=value``."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def option(default: T, variable: str, parse: Callable[[str], Any], doc: str) -> T:
    """A dataclass field whose default is read from the environment at construction."""

    def read() -> Any:
        text = os.environ.get(variable)
        if text is None or text == "":
            return default
        try:
            return parse(text)
        except ValueError as exc:
            raise ConfigError(f"{variable}={text!r} is not valid: {exc}") from None

    metadata = {"variable": variable, "doc": doc, "default": default}
    made: T = field(default_factory=read, metadata=metadata)
    return made


def documented_options(cls: type[Any]) -> list[tuple[str, str, Any, str]]:
    """``(name, variable, default, meaning)`` of each option of a class, for the documentation."""
    rows: list[tuple[str, str, Any, str]] = []
    option: Field[Any]
    for option in fields(cls):
        meta: Mapping[str, Any] = option.metadata
        if "variable" in meta:
            rows.append((option.name, meta["variable"], meta["default"], meta["doc"]))
    return rows


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with ``message`` unless ``ok``."""
    if not ok:
        raise ConfigError(message)


def check_endpoint(url: str | None, name: str = "endpoint_url") -> None:
    """Whether an endpoint is a plain URL; what may hold a password or signature is not shown.

    Raises:
        ConfigError: If it is none.
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
    except ValueError:  # of brackets, or a port that is no number
        names_host = False
    require(names_host, f"{name}={url!r} names no host and port: write http://host:port")


def check_types(options: Any) -> None:
    """Whether values are of the types that their annotations say."""
    kinds: dict[str, tuple[type[Any], ...]] = {
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
        "None": (type(None),),
    }
    for option in fields(options):
        names = [name.strip() for name in str(option.type).split("|")]
        if not all(name in kinds for name in names):
            continue
        value = getattr(options, option.name)
        fits = any(isinstance(value, kinds[name]) for name in names)
        if isinstance(value, bool) and "bool" not in names:
            fits = False
        require(fits, f"{option.name}={value!r}: must be {option.type}")


def check_switch(name: str, value: str) -> None:
    """Whether a switch has one of its three values."""
    require(value in ("auto", "on", "off"), f"{name}={value!r}: write 'auto', 'on' or 'off'")


def as_pairs(name: str, value: object) -> Pairs:
    """A mapping, or pairs of strings, as what can be hashed."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((str(key), str(content)) for key, content in pairs)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: give a mapping or pairs of strings") from None


def check_tags(tags: Pairs, allowed: str = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]") -> None:
    """Whether tags are such as S3 and Azure take; they refuse others when all data is on its way.

    Args:
        tags: Names and values.
        allowed: The pattern of a character.

    Raises:
        ConfigError: If they are not.
    """
    require(len(tags) <= _MOST_TAGS, f"tags: {len(tags)} tags are given, {_MOST_TAGS} is the most")
    longest_name, longest_value = _LONGEST_TAG
    for name, value in tags:
        require(
            1 <= len(name) <= longest_name and len(value) <= longest_value,
            f"tags: {name!r}={value!r}: a name has 1 to {longest_name} characters, a value at most "
            f"{longest_value}",
        )
        require(
            re.fullmatch(f"{allowed}*", name + value) is not None,
            f"tags: {name!r}={value!r} holds a character that the store does not take",
        )
    check_unique("tags", tags)


def check_unique(option: str, pairs: Pairs, *, ignore_case: bool = False) -> None:
    """Whether no name is given twice: a store refuses that, or keeps one of the values."""
    seen: set[str] = set()
    for name, _ in pairs:
        folded = name.lower() if ignore_case else name
        require(folded not in seen, f"{option}: give {name!r} once, not twice")
        seen.add(folded)
