"""The options: frozen, validated, and each settable by an environment variable.

An option given to the constructor wins over its ``CLOUDCKPT_*`` variable, and that over the
default. Sizes are bytes (variables also take ``64MiB``), times are seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from cloudckpt.errors import ConfigError

__all__ = ["MIB", "Config", "RetryPolicy", "S3Options", "Switch", "documented_options"]

T = TypeVar("T")
Switch = Literal["auto", "on", "off"]

MIB = 1024 * 1024
_LONGEST_WAIT = 86_400.0  # seconds; every wait has an end
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB}


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([kmg]ib|b)?\s*", text.lower())
    if match is None:
        raise ValueError("write a number of bytes, or one with KiB, MiB or GiB")
    return int(match.group(1)) * _UNITS[match.group(2) or ""]


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in known:
        raise ValueError("write 1 or 0")
    return known[text.lower()]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def _option(default: T, variable: str, parse: Callable[[str], Any], doc: str) -> T:
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


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _check_types(options: Any) -> None:
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
        _require(fits, f"{option.name}={value!r}: must be {option.type}")


def _check_switch(name: str, value: str) -> None:
    _require(value in ("auto", "on", "off"), f"{name}={value!r}: write 'auto', 'on' or 'off'")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long a failed request is tried again: full jitter, doubled each time."""

    attempts: int = _option(
        10, "CLOUDCKPT_RETRY_ATTEMPTS", int, "tries of one request, the first included"
    )
    deadline: float = _option(
        300.0,
        "CLOUDCKPT_RETRY_DEADLINE",
        float,
        "seconds after its first failure in which a request may be tried again",
    )
    base: float = _option(
        0.1, "CLOUDCKPT_RETRY_BASE", float, "upper bound of the first pause in seconds"
    )
    cap: float = _option(
        20.0, "CLOUDCKPT_RETRY_CAP", float, "upper bound of every later pause in seconds"
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _require(self.attempts >= 1, f"retry attempts={self.attempts}: at least 1 is needed")
        _require(self.deadline >= 0, f"retry deadline={self.deadline}: must not be negative")
        _require(
            0 <= self.base <= self.cap,
            f"retry base={self.base}, cap={self.cap}: 0 <= base <= cap is needed",
        )


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """What is special to S3 and the stores that speak its protocol.

    Credentials and region come from boto3's own chain unless ``profile`` or ``region`` is given.
    """

    endpoint_url: str | None = _option(
        None,
        "CLOUDCKPT_S3_ENDPOINT_URL",
        str,
        "endpoint of an S3-compatible store; AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL work too",
    )
    region: str | None = _option(
        None, "CLOUDCKPT_S3_REGION", str, "region of the bucket; else as boto3 finds it"
    )
    profile: str | None = _option(
        None, "CLOUDCKPT_S3_PROFILE", str, "profile of the AWS configuration files"
    )
    addressing_style: Literal["auto", "path", "virtual"] = _option(
        "auto", "CLOUDCKPT_S3_ADDRESSING_STYLE", str, "'auto', 'path' or 'virtual'"
    )
    checksum: Switch = _option(
        "auto",
        "CLOUDCKPT_S3_CHECKSUM",
        str,
        "send CRC32C for the store to verify; 'auto' is on for AWS and off for custom endpoints",
    )
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = _option(
        None, "CLOUDCKPT_S3_SSE", str, "server-side encryption: 'AES256', 'aws:kms', 'aws:kms:dsse'"
    )
    kms_key_id: str | None = _option(
        None, "CLOUDCKPT_S3_KMS_KEY_ID", str, "key of 'aws:kms' encryption"
    )
    bucket_key: bool = _option(
        False, "CLOUDCKPT_S3_BUCKET_KEY", _flag, "use an S3 bucket key with 'aws:kms'"
    )
    storage_class: str | None = _option(
        None, "CLOUDCKPT_S3_STORAGE_CLASS", str, "storage class of the objects, e.g. STANDARD_IA"
    )
    acl: str | None = _option(
        None, "CLOUDCKPT_S3_ACL", str, "canned ACL, e.g. bucket-owner-full-control"
    )
    tags: tuple[tuple[str, str], ...] = _option(
        (), "CLOUDCKPT_S3_TAGS", _pairs, "object tags, e.g. team=nlp,run=7"
    )
    requester_pays: bool = _option(
        False, "CLOUDCKPT_S3_REQUESTER_PAYS", _flag, "accept the charges of a requester-pays bucket"
    )

    def __post_init__(self) -> None:
        _check_types(self)
        pairs = self.tags.items() if isinstance(self.tags, Mapping) else self.tags
        try:
            object.__setattr__(self, "tags", tuple((str(key), str(value)) for key, value in pairs))
        except (TypeError, ValueError):
            raise ConfigError(f"tags={self.tags!r}: give a mapping or pairs of strings") from None
        _require(
            self.addressing_style in ("auto", "path", "virtual"),
            f"addressing_style={self.addressing_style!r}: write 'auto', 'path' or 'virtual'",
        )
        _check_switch("checksum", self.checksum)
        _require(
            self.sse in (None, "AES256", "aws:kms", "aws:kms:dsse"),
            f"sse={self.sse!r}: write 'AES256', 'aws:kms' or 'aws:kms:dsse'",
        )
        _require(
            not (self.kms_key_id or self.bucket_key) or self.sse in ("aws:kms", "aws:kms:dsse"),
            "kms_key_id and bucket_key need sse='aws:kms'",
        )
        _require(
            self.endpoint_url is None or self.endpoint_url.startswith(("http://", "https://")),
            f"endpoint_url={self.endpoint_url!r} must begin with http:// or https://",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options of saving and loading; hashable and picklable."""

    connections: int = _option(
        16,
        "CLOUDCKPT_CONNECTIONS",
        int,
        "parallel transfers of one rank (about 90 MB/s each on S3)",
    )
    part_size: int | None = _option(
        None,
        "CLOUDCKPT_PART_SIZE",
        _size,
        "bytes of an upload part; default: from the size of the shard, 16 MiB and more",
    )
    request_size: int | None = _option(
        None,
        "CLOUDCKPT_REQUEST_SIZE",
        _size,
        "most bytes that one download request asks for; default: from what is to be read, 16 MiB "
        "to 64 MiB",
    )
    merge_gap: int = _option(
        MIB,
        "CLOUDCKPT_MERGE_GAP",
        _size,
        "unneeded bytes that are rather read than skipped by another request",
    )
    memory_budget: int = _option(
        64 * MIB,
        "CLOUDCKPT_MEMORY_BUDGET",
        _size,
        "bytes of copies in flight: accelerator tensors, strided tensors, reads that need a detour",
    )
    verify: bool = _option(
        True, "CLOUDCKPT_VERIFY", _flag, "check the CRC32C of every block that is read"
    )
    overwrite: bool = _option(
        True, "CLOUDCKPT_OVERWRITE", _flag, "replace a checkpoint at the same URI, atomically"
    )
    conditional_writes: Switch = _option(
        "auto",
        "CLOUDCKPT_CONDITIONAL_WRITES",
        str,
        "commit by conditional PUT; 'auto' tests stores that are not known to honour it, "
        "'off' gives up the protection against concurrent writers",
    )
    zip_crc32: bool = _option(
        False,
        "CLOUDCKPT_ZIP_CRC32",
        _flag,
        "fill in the CRC32 of each zip record, which torch never reads (about 0.25 s/GiB)",
    )
    connect_timeout: float = _option(
        10.0, "CLOUDCKPT_CONNECT_TIMEOUT", float, "seconds to establish a connection"
    )
    read_timeout: float = _option(
        60.0, "CLOUDCKPT_READ_TIMEOUT", float, "seconds to wait for the first byte of an answer"
    )
    stall_timeout: float = _option(
        60.0,
        "CLOUDCKPT_STALL_TIMEOUT",
        float,
        "seconds that 4 MiB may take before the connection counts as stalled",
    )
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    s3: S3Options = field(default_factory=S3Options)

    def __post_init__(self) -> None:
        _check_types(self)
        _require(1 <= self.connections <= 512, f"connections={self.connections}: 1 to 512")
        _require(
            self.part_size is None or 5 * MIB <= self.part_size <= 5 * 1024 * MIB,
            f"part_size={self.part_size}: S3 takes parts of 5 MiB to 5 GiB",
        )
        _require(
            self.request_size is None or self.request_size >= MIB,
            f"request_size={self.request_size}: at least 1 MiB is needed",
        )
        _require(self.merge_gap >= 0, f"merge_gap={self.merge_gap}: must not be negative")
        _require(
            self.memory_budget >= 32 * MIB,
            f"memory_budget={self.memory_budget}: at least 32 MiB is needed to keep bytes moving",
        )
        for name in ("connect_timeout", "read_timeout", "stall_timeout"):
            value = getattr(self, name)
            _require(
                0 < value <= _LONGEST_WAIT, f"{name}={value}: 0 to {_LONGEST_WAIT:.0f} seconds"
            )
        _check_switch("conditional_writes", self.conditional_writes)
