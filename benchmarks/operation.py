"""One save or load in a process of its own: the unit that scenarios are made of."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.children import DEFAULT_TIMEOUT, in_child
from benchmarks.contenders import CONTENDERS, limit_threads
from benchmarks.meter import Cost, measure
from benchmarks.places import CONNECTIONS, Connections, Place
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


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What an operation is measured in, if it is not the usual.

    Attributes:
        port: Where the server is reached; its own by default.
        bundle: The authority of its certificate, if that is by TLS.
        library: The reference's TLS, compiled.
        connections: How many the reference and cloudckpt make.
        cores: How many the process may use; all by default.
        is_again: Whether the same was done before, unmeasured, in the same process.
        is_beside_python: Whether a thread computes in Python meanwhile, and holds the GIL.
    """

    port: int | None = None
    bundle: str | None = None
    library: str | None = None
    connections: Connections = CONNECTIONS
    cores: int | None = None
    is_again: bool = False
    is_beside_python: bool = False

    def but(self, **changes: Any) -> Surroundings:
        """The same with some things changed."""
        return replace(self, **changes)


USUAL = Surroundings()


def run(
    server: ServerHandle,
    contender: str,
    action: Action,
    spec: StateSpec,
    name: str,
    *,
    bucket: str = KEEP,
    timeout: float = DEFAULT_TIMEOUT,
    around: Surroundings = USUAL,
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
        around: Where and beside what.

    Raises:
        ChildFailedError: If the child fails.
    """
    server.reset()
    raw = in_child(
        _perform,
        server.port if around.port is None else around.port,
        timeout=timeout,
        bundle=around.bundle,
        contender=contender,
        action=action,
        sizes=spec.sizes,
        bucket=bucket,
        name=name,
        around=asdict(around),
    )
    return Operation(Cost(**raw), server.counts())


def prepare(server: ServerHandle, contender: str, spec: StateSpec, name: str) -> None:
    """Saves a checkpoint, unmeasured, for later loads."""
    run(server, contender, "save", spec, name, bucket=KEEP)


def _perform(
    port: int,
    contender: str,
    action: Action,
    sizes: list[int],
    bucket: str,
    name: str,
    around: dict[str, Any],
) -> dict[str, Any]:
    limit_threads()
    here = Surroundings(**around)
    if here.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: here.cores])
    place = Place(port, bucket, here.connections, bundle=here.bundle, library=here.library)
    subject = CONTENDERS[contender].build(place)
    spec = StateSpec(tuple(sizes))
    warm_name = f"{name}-warm"
    if action == "save":
        subject.save(filled(_WARM_UP), warm_name)
        state = filled(spec)
        if here.is_again:
            subject.save(state, f"{name}-before")
        if here.is_beside_python:
            threading.Thread(target=_hold_the_gil, daemon=True).start()
        return asdict(measure(lambda: subject.save(state, name)))
    subject.load(blank(_WARM_UP), warm_name)
    state = blank(spec)
    if here.is_again:
        subject.load(state, name)
    if here.is_beside_python:
        threading.Thread(target=_hold_the_gil, daemon=True).start()
    cost = measure(lambda: subject.load(state, name))
    if wrong := wrong_tensors(spec, state):
        raise WrongBytesError(f"{contender} loaded wrong bytes into {wrong[:5]}")
    return asdict(cost)


def _hold_the_gil() -> None:
    while True:
        pass
