"""One save or load in a process of its own: the unit that scenarios are made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.children import DEFAULT_TIMEOUT, in_child
from benchmarks.contenders import CONTENDERS, limit_threads
from benchmarks.meter import Cost, measure
from benchmarks.places import Place
from benchmarks.server.process import Counts, ServerHandle
from benchmarks.states import StateSpec, blank, filled, uniform, wrong_tensors

Action = Literal["save", "load"]

KEEP = "keep"
"""The bucket whose objects can be loaded again."""
SINK = "sink"
"""The bucket that measured saves go to: bodies are counted and dropped."""

_WARM_UP = uniform(8, 256 * 1024)


class WrongBytesError(RuntimeError):
    """A load returned, and the tensors hold other bytes than were saved."""


@dataclass(frozen=True)
class Operation:
    """What one operation cost the client, and what the server saw of it."""

    cost: Cost
    counts: Counts


def run(
    server: ServerHandle,
    contender: str,
    action: Action,
    spec: StateSpec,
    name: str,
    *,
    bucket: str = KEEP,
    timeout: float = DEFAULT_TIMEOUT,
) -> Operation:
    """Measures `action` in a fresh child process, after a small warm-up in the same process.

    A load is checked byte for byte afterwards, outside the measured time.

    Args:
        server: The running server; its statistics are reset.
        contender: A name in `CONTENDERS`.
        action: What to measure. A load needs an earlier save under the same name in `KEEP`.
        spec: The state dict.
        name: The checkpoint.
        bucket: Where a save goes.
        timeout: Seconds.

    Raises:
        ChildFailedError: If the child fails.
    """
    server.reset()
    raw = in_child(
        _perform,
        server.port,
        timeout=timeout,
        contender=contender,
        action=action,
        sizes=spec.sizes,
        bucket=bucket,
        name=name,
    )
    return Operation(Cost(**raw), server.counts())


def prepare(server: ServerHandle, contender: str, spec: StateSpec, name: str) -> None:
    """Saves a checkpoint, unmeasured, for later loads."""
    run(server, contender, "save", spec, name, bucket=KEEP)


def _perform(
    port: int, contender: str, action: Action, sizes: list[int], bucket: str, name: str
) -> dict[str, Any]:
    limit_threads()
    subject = CONTENDERS[contender].build(Place(port, bucket))
    spec = StateSpec(tuple(sizes))
    warm_name = f"{name}-warm"
    if action == "save":
        subject.save(filled(_WARM_UP), warm_name)
        state = filled(spec)
        return asdict(measure(lambda: subject.save(state, name)))
    subject.load(blank(_WARM_UP), warm_name)
    state = blank(spec)
    cost = measure(lambda: subject.load(state, name))
    if wrong := wrong_tensors(spec, state):
        raise WrongBytesError(f"{contender} loaded wrong bytes into {wrong[:5]}")
    return asdict(cost)
