"""What a benchmark found: one row a number, with the limit it must reach, if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured quantity of one contender."""

    scenario: str
    case: str
    """What was done, such as `save 1 GiB`."""
    contender: str
    metric: str
    """What was measured, such as `CPU`."""
    unit: str
    samples: tuple[float, ...]
    """Every round's number, in order; empty if there is none."""
    ratio: float | None = None
    """The median over `baseline`'s."""
    baseline: str = ""
    """What `ratio` divides by."""
    limit: float | None = None
    """The most that the ratio, or without one the median, may be."""
    note: str = ""

    @property
    def value(self) -> float | None:
        """The median of the samples."""
        return median(self.samples) if self.samples else None

    @property
    def passed(self) -> bool | None:
        """Whether the limit holds; None if there is no limit."""
        if self.limit is None:
            return None
        judged = self.ratio if self.ratio is not None else self.value
        return judged is not None and judged <= self.limit


class Limits:
    """What cloudckpt must reach. Other contenders are not judged."""

    CPU = 1.5
    """CPU of a save or a load over the reference's."""
    CPU_AIM = 1.25
    """The same, where we want to be."""
    HTTPS_LOAD_CPU = 1.35
    """CPU of a load by https over the reference's."""
    HTTPS_LOAD_WALL = 1.5
    """Wall time of the same."""
    HTTPS_SAVE_CPU = 1.25
    """CPU of a save by https over the reference's."""
    PLAIN_CPU = 1.35
    """CPU of a save or a load without TLS, on 16 connections, over the reference's."""
    FUTEX_CALLS = 3000.0
    """Futex calls of a save or a load for each GiB: threads wait for the GIL, or for others."""
    FOUR_CORES = 0.4
    """Wall time of a load by https on four cores over one on one core."""
    HTTPS_STEP_MEAN = 1.03
    """Mean time of a training step during an upload by https, over the same without."""
    BESIDE_PYTHON = 2.0
    """Wall time of a load by https beside a thread that holds the GIL, over one without."""
    EXTRA_MEMORY_MIB = 96.0
    """Peak memory of a save or a load beyond what was there before."""
    SHAPED = 1.25
    """Time on a slow link over bytes / (connections x rate)."""
    LANES_WALL = 1.1
    """Time on a link by ``connections="auto"``, over the best number among 4 to 64."""
    LANES_CPU = 1.05
    """CPU of the same."""
    INCREMENTAL_BYTES = 1.02
    """Bytes of a later save of which nearly nothing has changed, over those that have."""
    INCREMENTAL_COST = 0.2
    """Wall time and CPU of the same."""
    INCREMENTAL_TENTH = 0.12
    """Bytes of a later save of which a tenth has changed, over those of the first."""
    INCREMENTAL_DENSE = 1.1
    """CPU of an incremental save of which everything has changed, over one that is not."""
    MODEL_CPU = 1.2
    """CPU of saving or loading a model in safetensors files over that of our own format."""
    STALL = 1.15
    """Stall of the second and later `async_save` over a memcpy of the same bytes, plus
    `STALL_SECONDS`."""
    STALL_SECONDS = 0.005
    STEP_MEAN: ClassVar = {"cloudckpt": 1.05, "cloudckpt-process": 1.03}
    """Mean time of a training step during an upload, over the same without."""
    STEP_P99: ClassVar = {"cloudckpt-process": 1.10}
    """The 99th percentile of the same."""


OURS = "cloudckpt"
OURS_IN_A_PROCESS = "cloudckpt-process"
"""The same, saving in the background in a process of its own."""
OURS_AS_MODEL = "cloudckpt-safetensors"
"""The same, as models in safetensors files."""
REFERENCE = "reference"


def is_ours(contender: str) -> bool:
    """Returns whether `contender` is cloudckpt, whichever way it saves."""
    return contender in (OURS, OURS_IN_A_PROCESS, OURS_AS_MODEL)


def limit_for(contender: str, limit: float) -> float | None:
    """Returns `limit` if `contender` is ours."""
    return limit if is_ours(contender) else None
