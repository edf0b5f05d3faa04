"""The options that apply to every store."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal

from cloudckpt.config.clouds import AzureOptions, GCSOptions, S3Options
from cloudckpt.config.options import (
    MIB,
    Bytes,
    Options,
    Switch,
    documented_options,
    option,
    require,
    timeout,
)

__all__ = ["MOST_ON_A_MACHINE", "BackgroundOptions", "Config", "RetryPolicy", "config_or_default"]

MOST_ON_A_MACHINE = 64
"""Maximum connections that all ranks of a machine open together if ``connections`` is not set.

At 90 MB/s for each connection, as S3 gives, they fill 45 Gb/s.
"""

_SMALL_REQUESTS = 16

logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy(Options):
    """How long a failed request is retried, and with which pauses.

    Only transient failures are retried: a store that can't be reached, fails internally or
    throttles. Pauses are random and grow.

    Attributes:
        deadline: Seconds after its first failure during which a request is retried; 0 for no
            retries.
        attempts: Maximum number of tries, including the first; None for as many as the deadline
            allows.
        base: The shortest pause, in seconds; at most ``cap``.
        cap: The longest pause, in seconds, unless the store asks for a longer one. If it is 0,
            ``attempts`` must be given.

    ``attempts``, ``base`` and ``cap`` have no environment variables.
    """

    variables: ClassVar[str] = "CLOUDCKPT_RETRY_"

    deadline: float = option(
        300.0, "for how many seconds after its first failure a request is retried", 0, 86_400
    )
    attempts: int | None = None
    base: float = 0.1
    cap: float = 8.0

    def _check(self) -> None:
        least = self.attempts is None or self.attempts >= 1
        give = "write at least 1, or None for no limit"
        require(least, f"RetryPolicy.attempts={self.attempts}: {give}")
        require(
            0 <= self.base <= self.cap and (self.cap > 0 or self.attempts is not None),
            f"RetryPolicy(base={self.base}, cap={self.cap}): write 0 <= base <= cap, and give "
            "attempts if both are 0",
        )


@dataclass(frozen=True, kw_only=True)
class BackgroundOptions(Options):
    """Options for how asynchronous saves are staged, ordered and sent."""

    variables: ClassVar[str] = "CLOUDCKPT_ASYNC_"

    when_busy: Literal["wait", "skip", "auto"] | None = option(
        None,
        "what a save does while the one before is under way: 'wait' for it; 'skip' this one (on "
        "all ranks alike); or wait as long as that one makes progress, and else skip ('auto'). "
        "Default: 'auto' for a CheckpointManager, 'wait' for other saves",
    )
    patience: float = timeout(
        3600.0, "seconds a save waits for the staged copy to be free, and closing waits for a save"
    )
    pin_memory: Switch = option("auto", "pin the staged copy of CUDA tensors; 'auto' is on")
    outlive: float = option(
        900.0,
        "seconds that a saving process has to finish a staged save after its trainer was killed, "
        "so that the next job can commit it; 0: it ends with its trainer",
        least=0,
        most=12 * 3600,
    )


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """All options of saving and loading; hashable and picklable."""

    variables: ClassVar[str] = "CLOUDCKPT_"

    connections: int | Literal["auto"] = option(
        "auto",
        "parallel transfers of one rank (about 90 MB/s each on S3); 'auto' begins with 8 and adds "
        "more as long as that pays, up to 64 on a machine, which its ranks share",
        least=1,
        most=512,
    )
    part_size: Bytes | None = option(
        None, "bytes of an upload part; default: by the size of the shard", 5 * MIB, 5 * 1024 * MIB
    )
    memory_budget: Bytes = option(
        64 * MIB, "bytes of copies in flight: of accelerators' and strided tensors", 32 * MIB
    )
    checksum: Switch = option(
        "auto",
        "send a checksum of each body for the store to verify: CRC32C, for Azure CRC64; 'auto' is "
        "on where the store's vendor documents that it does",
    )
    verify: bool = option(True, "check the checksum of every block that is read")
    shared_reads: Literal["auto", "host", "off"] = option(
        "auto",
        "whether bytes that several ranks want are fetched by one of them, which hands them on: "
        "among all ranks ('auto'), among those of a machine ('host'), or not at all",
    )
    replicas: Literal["warn", "refuse", "trust"] = option(
        "warn",
        "what happens to a save if ranks have different values under one name, of which it keeps "
        "only one: 'warn' logs each name once; 'refuse' raises an error on all ranks, and nothing "
        "is committed; 'trust' compares nothing. 'refuse' compares tensors whole, 'warn' only "
        "samples of those of 64 KiB or more",
    )
    unloadable: Literal["auto", "warn", "refuse"] = option(
        "auto",
        "what happens to a save with values that a load takes only with trust_pickle=True, such as "
        "objects of your classes: 'warn' logs each once; 'refuse' raises an error that names them; "
        "'auto' refuses in a CheckpointManager until a save has succeeded, and else warns",
    )
    overwrite: bool = option(True, "replace a checkpoint at the same URI, atomically")
    incremental: bool = option(
        False, "send only what the newest step in the folder lacks, and refer to the rest"
    )
    conditional_writes: Switch = option(
        "auto",
        "commit by conditional PUT; 'auto' tests stores that are not known to honour it, "
        "'off' gives up the protection against concurrent writers",
    )
    connect_timeout: float = timeout(10.0, "seconds to establish a connection")
    read_timeout: float = timeout(
        60.0, "seconds for an answer to begin; 15 times as many if the store joins parts or copies"
    )
    stall_timeout: float = timeout(60.0, "seconds below 4 KiB/s after which a connection fails")
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    s3: S3Options = field(default_factory=S3Options)
    gcs: GCSOptions = field(default_factory=GCSOptions)
    azure: AzureOptions = field(default_factory=AzureOptions)
    background: BackgroundOptions = field(default_factory=BackgroundOptions)

    def _check(self) -> None:
        given = frozenset(name for name in os.environ if name.startswith(Config.variables))
        if unknown := given - _variables():
            _warn_unknown(unknown)

    @property
    def most_connections(self) -> int:
        """The maximum number of connections that a transfer of this rank may open."""
        shared = max(1, MOST_ON_A_MACHINE // _ranks_here())
        return shared if self.connections == "auto" else self.connections

    @property
    def requests_at_once(self) -> int:
        """The maximum number of concurrent small requests, such as deletions."""
        most = self.most_connections
        return min(_SMALL_REQUESTS, most) if self.connections == "auto" else most


def config_or_default(config: Config | None) -> Config:
    """Returns the caller's options, or those of the environment if `config` is None.

    Raises:
        ConfigError: If `config` is not a Config, such as a dict; or if it is None and a variable of
            the environment has an invalid value.
    """
    if config is None:
        return Config()
    shown = f"config is a {type(config).__name__}: give a cloudckpt.Config(...)"
    require(isinstance(config, Config), shown)
    return config


def _ranks_here() -> int:
    """Returns the number of ranks on this machine by the launcher's variables; 1 without them."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text):
            return int(text)
    return 1


@cache
def _variables() -> frozenset[str]:
    """Returns the names of the environment variables of all options."""
    classes = Config, RetryPolicy, S3Options, GCSOptions, AzureOptions, BackgroundOptions
    options = (variable for cls in classes for _, variable, _, _ in documented_options(cls))
    return frozenset(options)


@cache
def _warn_unknown(unknown: frozenset[str]) -> None:
    """Warns of ``CLOUDCKPT_*`` variables that are not options, once per process."""
    for name in sorted(unknown):
        if not name.startswith("CLOUDCKPT_TEST_"):  # tests read these to find a store
            similar = difflib.get_close_matches(name, _variables(), n=1)
            logger.warning(
                "the environment variable %s is not an option of cloudckpt and has no effect%s",
                name,
                f"; did you mean {similar[0]}?" if similar else "",
            )
