"""The options that every store shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudckpt.config.azure import AzureOptions
from cloudckpt.config.background import BackgroundOptions
from cloudckpt.config.gcs import GCSOptions
from cloudckpt.config.options import (
    MIB,
    Switch,
    check_switch,
    check_types,
    option,
    parse_flag,
    parse_size,
    require,
)
from cloudckpt.config.s3 import S3Options

__all__ = ["Config", "RetryPolicy"]

_LONGEST_WAIT = 86_400.0  # seconds; every wait has an end


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long a failed request is tried again, with pauses that grow at random."""

    attempts: int = option(
        10,
        "CLOUDCKPT_RETRY_ATTEMPTS",
        int,
        "tries of one request, the first included; those that the store throttles count only if "
        "this is 1 or there are no pauses, else the deadline ends them",
    )
    deadline: float = option(
        300.0,
        "CLOUDCKPT_RETRY_DEADLINE",
        float,
        "seconds after its first failure in which a request may be tried again",
    )
    base: float = option(0.1, "CLOUDCKPT_RETRY_BASE", float, "shortest pause in seconds")
    cap: float = option(
        20.0,
        "CLOUDCKPT_RETRY_CAP",
        float,
        "longest pause in seconds, unless the store asks for more",
    )

    def __post_init__(self) -> None:
        check_types(self)
        require(self.attempts >= 1, f"retry attempts={self.attempts}: at least 1 is needed")
        require(self.deadline >= 0, f"retry deadline={self.deadline}: must not be negative")
        require(
            0 <= self.base <= self.cap,
            f"retry base={self.base}, cap={self.cap}: 0 <= base <= cap is needed",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options of saving and loading; hashable and picklable."""

    connections: int = option(
        16,
        "CLOUDCKPT_CONNECTIONS",
        int,
        "parallel transfers of one rank (about 90 MB/s each on S3)",
    )
    part_size: int | None = option(
        None,
        "CLOUDCKPT_PART_SIZE",
        parse_size,
        "bytes of an upload part; default: from the size of the shard, 16 MiB and more",
    )
    request_size: int | None = option(
        None,
        "CLOUDCKPT_REQUEST_SIZE",
        parse_size,
        "most bytes that one download request asks for; default: from what is to be read, 16 MiB "
        "to 64 MiB",
    )
    merge_gap: int = option(
        MIB,
        "CLOUDCKPT_MERGE_GAP",
        parse_size,
        "unneeded bytes that are rather read than skipped by another request",
    )
    memory_budget: int = option(
        64 * MIB,
        "CLOUDCKPT_MEMORY_BUDGET",
        parse_size,
        "bytes of copies in flight: accelerator tensors, strided tensors, reads that need a detour",
    )
    verify: bool = option(
        True, "CLOUDCKPT_VERIFY", parse_flag, "check the checksum of every block that is read"
    )
    overwrite: bool = option(
        True, "CLOUDCKPT_OVERWRITE", parse_flag, "replace a checkpoint at the same URI, atomically"
    )
    conditional_writes: Switch = option(
        "auto",
        "CLOUDCKPT_CONDITIONAL_WRITES",
        str,
        "commit by conditional PUT; 'auto' tests stores that are not known to honour it, "
        "'off' gives up the protection against concurrent writers",
    )
    zip_crc32: bool = option(
        False,
        "CLOUDCKPT_ZIP_CRC32",
        parse_flag,
        "fill in the CRC32 of each zip record, which torch never reads (about 0.25 s/GiB)",
    )
    connect_timeout: float = option(
        10.0, "CLOUDCKPT_CONNECT_TIMEOUT", float, "seconds to establish a connection"
    )
    read_timeout: float = option(
        60.0, "CLOUDCKPT_READ_TIMEOUT", float, "seconds to wait for the first byte of an answer"
    )
    completion_timeout: float = option(
        900.0,
        "CLOUDCKPT_COMPLETION_TIMEOUT",
        float,
        "seconds to wait for the answer to the request that puts the parts of an object together",
    )
    stall_timeout: float = option(
        60.0,
        "CLOUDCKPT_STALL_TIMEOUT",
        float,
        "seconds with less than 4 KiB/s before the connection counts as stalled",
    )
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    s3: S3Options = field(default_factory=S3Options)
    gcs: GCSOptions = field(default_factory=GCSOptions)
    azure: AzureOptions = field(default_factory=AzureOptions)
    background: BackgroundOptions = field(default_factory=BackgroundOptions)

    def __post_init__(self) -> None:
        check_types(self)
        require(1 <= self.connections <= 512, f"connections={self.connections}: 1 to 512")
        require(
            self.part_size is None or 5 * MIB <= self.part_size <= 5 * 1024 * MIB,
            f"part_size={self.part_size}: parts of 5 MiB to 5 GiB are possible",
        )
        require(
            self.request_size is None or self.request_size >= MIB,
            f"request_size={self.request_size}: at least 1 MiB is needed",
        )
        require(self.merge_gap >= 0, f"merge_gap={self.merge_gap}: must not be negative")
        require(
            self.memory_budget >= 32 * MIB,
            f"memory_budget={self.memory_budget}: at least 32 MiB is needed to keep bytes moving",
        )
        for name in ("connect_timeout", "read_timeout", "completion_timeout", "stall_timeout"):
            value = getattr(self, name)
            require(0 < value <= _LONGEST_WAIT, f"{name}={value}: 0 to {_LONGEST_WAIT:.0f} seconds")
        check_switch("conditional_writes", self.conditional_writes)
