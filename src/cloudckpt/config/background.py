"""The options of saving in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloudckpt.config.options import Switch, check_switch, check_types, option, require

__all__ = ["BackgroundOptions"]


def _parse_io_priority(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text


@dataclass(frozen=True, kw_only=True)
class BackgroundOptions:
    """How asynchronous saves are staged, ordered and carried out."""

    when_busy: Literal["wait", "skip", "double_buffer"] = option(
        "wait",
        "CLOUDCKPT_ASYNC_WHEN_BUSY",
        str,
        "what a save does while the one before is under way: 'wait' for it, 'skip' this one (on "
        "all ranks alike), or stage a second copy ('double_buffer')",
    )
    patience: float = option(
        3600.0,
        "CLOUDCKPT_ASYNC_PATIENCE",
        float,
        "seconds that a save waits for a staged copy that is still being read",
    )
    stage_threads: int | None = option(
        None,
        "CLOUDCKPT_ASYNC_STAGE_THREADS",
        int,
        "threads that copy on the CPU; default: as many as torch uses, at most 8",
    )
    pin_memory: Switch = option(
        "auto",
        "CLOUDCKPT_ASYNC_PIN_MEMORY",
        str,
        "whether the staged copy of CUDA tensors is pinned; 'auto' is on",
    )
    nice: int = option(
        5,
        "CLOUDCKPT_ASYNC_NICE",
        int,
        "by how much the saving process yields the CPU to the trainer: 0 (not at all) to 19",
    )
    io_priority: Literal["idle", 0, 1, 2, 3, 4, 5, 6, 7] | None = option(
        None,
        "CLOUDCKPT_ASYNC_IO_PRIORITY",
        _parse_io_priority,
        "I/O priority of the saving process, on Linux with psutil: 'idle', or a best-effort level "
        "from 0 (first) to 7 (last)",
    )
    start_timeout: float = option(
        300.0,
        "CLOUDCKPT_ASYNC_START_TIMEOUT",
        float,
        "seconds in which the saving process must be ready, and meet those of the other ranks",
    )
    collective_timeout: float = option(
        1800.0,
        "CLOUDCKPT_ASYNC_COLLECTIVE_TIMEOUT",
        float,
        "seconds that a rank waits for the others within a save",
    )
    heartbeat_timeout: float = option(
        120.0,
        "CLOUDCKPT_ASYNC_HEARTBEAT_TIMEOUT",
        float,
        "seconds without a sign of life after which a saving process with a save is ended",
    )
    close_timeout: float = option(
        600.0,
        "CLOUDCKPT_ASYNC_CLOSE_TIMEOUT",
        float,
        "seconds that closing waits for saves under way",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_switch("pin_memory", self.pin_memory)
        require(
            self.when_busy in ("wait", "skip", "double_buffer"),
            f"when_busy={self.when_busy!r}: write 'wait', 'skip' or 'double_buffer'",
        )
        require(0 <= self.nice <= 19, f"nice={self.nice}: 0 to 19")
        level = self.io_priority
        is_level = isinstance(level, int) and not isinstance(level, bool) and 0 <= level <= 7
        require(
            level in (None, "idle") or is_level,
            f"io_priority={level!r}: write 'idle', or a level from 0 to 7",
        )
        require(
            self.stage_threads is None or self.stage_threads >= 1,
            f"stage_threads={self.stage_threads}: at least 1 is needed",
        )
        for name in (
            *("patience", "start_timeout", "collective_timeout"),
            *("heartbeat_timeout", "close_timeout"),
        ):
            value = getattr(self, name)
            require(0 < value <= 86_400, f"{name}={value}: 0 to 86400 seconds")
