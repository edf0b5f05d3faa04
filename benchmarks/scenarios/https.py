"""One process saves and loads 1 GiB by https: what a real cloud speaks."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench, rotated
from benchmarks.children import ChildFailedError
from benchmarks.contenders import CONTENDERS
from benchmarks.meter import Cost
from benchmarks.operation import SINK, Action, Surroundings, run
from benchmarks.reference_tls import build
from benchmarks.rows import OURS, REFERENCE, Limits, Row, limit_for
from benchmarks.scenarios.plain import ACTIONS
from benchmarks.scenarios.trainer import beside_training
from benchmarks.server.terminator import Terminator, running_terminator
from benchmarks.states import GIB, MIB, StateSpec, mixed

_CORES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is measured.

    Attributes:
        name: How the table calls it.
        action: What is done.
        around: Where and beside what.
        is_for_all: Whether all contenders do it, or only the reference and cloudckpt.
        baseline: The case of ours that wall time is compared with; by default it is the
            reference's in this case, which CPU is compared with.
        cpu: The most that CPU may be over the reference's.
        wall: The most that wall time may be over the baseline's.
    """

    name: str
    action: Action
    around: Surroundings
    is_for_all: bool = False
    baseline: Case | None = None
    cpu: float | None = None
    wall: float | None = None

    @property
    def is_ours_alone(self) -> bool:
        """Whether only cloudckpt does it: alone, on some cores, or beside others."""
        return self.around.is_beside_python or self.around.cores is not None


def measure(bench: Bench) -> list[Row]:
    """Returns what every contender costs; of ours also beside others and by cores."""
    names = [
        name for name, entry in CONTENDERS.items() if not entry.only_async and name != "filesystem"
    ]
    with tempfile.TemporaryDirectory(prefix="bench-reference-") as folder:
        try:
            library = str(build(Path(folder)))
            with running_terminator(bench.server.port) as terminator:
                tls = Surroundings(port=terminator.port, bundle=terminator.bundle, library=library)
                taking_part = bench.taking_part(*names)
                spec = mixed(bench.sized(GIB, 128 * MIB))
                rows = _Comparison(bench, taking_part, spec, tls, terminator).rows()
                if OURS in taking_part:
                    limits = {OURS: Limits.HTTPS_STEP_MEAN}
                    rows += beside_training(bench, [OURS], tls, limits, {})
                return rows
        except (ChildFailedError, RuntimeError) as failure:
            bench.failures[bench.scenario, REFERENCE] = str(failure)
            return []


def _cases(spec: StateSpec, tls: Surroundings) -> list[Case]:
    size = f"{spec.total // MIB} MiB"
    cases: list[Case] = []
    for action in ACTIONS:
        is_load = action == "load"
        for connections in (8, 16):
            usual = Case(
                name=f"{action} {size}, {connections} connections",
                action=action,
                around=tls.but(connections=connections),
                is_for_all=connections == 8,
                cpu=Limits.HTTPS_LOAD_CPU if is_load else Limits.HTTPS_SAVE_CPU,
                wall=Limits.HTTPS_LOAD_WALL if is_load else None,
            )
            cases.append(usual)
        without = Case(
            name=f"{action} {size}, 16 connections, no TLS",
            action=action,
            around=Surroundings(connections=16),
            cpu=Limits.PLAIN_CPU,
        )
        cases.append(without)
    undisturbed = cases[-2]  # a load by TLS, on 16 connections
    beside = Case(
        name="load beside a Python thread that holds the GIL",
        action="load",
        around=undisturbed.around.but(is_beside_python=True),
        baseline=undisturbed,
        wall=Limits.BESIDE_PYTHON,
    )
    cases.append(beside)
    one: Case | None = None
    for cores in _CORES:
        # the server has to have as many for itself
        is_judged = cores == max(_CORES) and (os.cpu_count() or 1) >= 2 * cores
        case = Case(
            name=f"load on {cores} core{'s' if cores > 1 else ''}",
            action="load",
            around=undisturbed.around.but(cores=cores),
            baseline=one,
            wall=Limits.FOUR_CORES if is_judged else None,
        )
        one = one or case
        cases.append(case)
    return cases


class _Comparison:
    def __init__(
        self,
        bench: Bench,
        contenders: list[str],
        spec: StateSpec,
        tls: Surroundings,
        terminator: Terminator,
    ) -> None:
        self._bench = bench
        self._contenders = contenders
        self._spec = spec
        self._tls = tls
        self._terminator = terminator
        self._cases = _cases(spec, tls)
        self._costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
        self._server_cpu: dict[str, list[float]] = defaultdict(list)
        """Seconds of the server and of its TLS, by case."""

    def rows(self) -> list[Row]:
        """Measures, and returns what was found."""
        bench, spec = self._bench, self._spec
        for name in self._contenders:
            bench.attempt(
                name, run, bench.server, name, "save", spec, f"{name}-loads", around=self._tls
            )
        for turn in range(max(map(bench.rounds_of, self._contenders), default=0)):
            for case in self._cases:
                for name in rotated(self._taking_part(case), turn):
                    if turn < bench.rounds_of(name):
                        self._once(case, name)
        return [
            row
            for case in self._cases
            for name in self._taking_part(case)
            if self._costs[case.name, name]
            for row in self._rows_of(case, name)
        ]

    def _taking_part(self, case: Case) -> list[str]:
        wanted = (OURS,) if case.is_ours_alone else (REFERENCE, OURS)
        return [name for name in self._contenders if case.is_for_all or name in wanted]

    def _once(self, case: Case, name: str) -> None:
        is_save = case.action == "save"
        before = self._terminator.cpu_seconds()
        done = self._bench.attempt(
            name,
            run,
            self._bench.server,
            name,
            case.action,
            self._spec,
            f"{name}-sunk" if is_save else f"{name}-loads",
            bucket=SINK if is_save else "keep",
            around=case.around,
        )
        if done is not None:
            self._costs[case.name, name].append(done.cost)
            if name == OURS:
                spent = self._terminator.cpu_seconds() - before + done.counts.cpu_seconds
                self._server_cpu[case.name].append(spent)
        self._bench.server.clear(SINK)

    def _rows_of(self, case: Case, name: str) -> Iterator[Row]:
        gib = self._spec.total / GIB

        def row(
            metric: str,
            unit: str,
            of: Callable[[Cost], float],
            limit: float | None,
            over: tuple[str, str] | None = None,
            note: str = "",
        ) -> Row:
            samples = tuple(map(of, self._costs[case.name, name]))
            base = [of(cost) for cost in self._costs[over]] if over is not None else []
            return Row(
                scenario="https",
                case=case.name,
                contender=name,
                metric=metric,
                unit=unit,
                samples=samples,
                ratio=median(samples) / median(base) if base else None,
                baseline=_baseline(case, over) if base and over is not None else "",
                limit=limit_for(name, limit)
                if limit is not None and (base or over is None)
                else None,
                note=note,
            )

        to_reference = None if case.is_ours_alone else (case.name, REFERENCE)
        to_other = (case.baseline.name, OURS) if case.baseline is not None else to_reference
        if not case.around.is_beside_python:  # it would be that of the other thread
            yield row("CPU", "s/GiB", lambda cost: cost.cpu_s / gib, case.cpu, to_reference)
        yield row(
            "wall", "s/GiB", lambda cost: cost.wall_s / gib, case.wall, to_other, self._note(case)
        )
        yield row(
            "extra memory", "MiB", lambda cost: cost.extra_memory / MIB, Limits.EXTRA_MEMORY_MIB
        )
        found = [cost.futex_calls for cost in self._costs[case.name, name]]
        calls = tuple(count / gib for count in found if count is not None)
        if calls and not case.is_ours_alone:
            yield Row(
                scenario="https",
                case=case.name,
                contender=name,
                metric="futex calls",
                unit="/GiB",
                samples=calls,
                limit=limit_for(name, Limits.FUTEX_CALLS),
            )

    def _note(self, case: Case) -> str:
        """How fast a load on some cores can be at all, where the server shares them."""
        cores = case.around.cores
        if cores is None or not self._costs[case.name, OURS]:
            return ""
        client = median(cost.cpu_s for cost in self._costs[case.name, OURS])
        server = median(self._server_cpu[case.name])
        there = os.cpu_count() or 1
        least = max(client / cores, (client + server) / there) / (self._spec.total / GIB)
        return (
            f"with {server / (self._spec.total / GIB):.2f} CPU s/GiB of the server on the same "
            f"{there} cores, {least:.2f} s at best"
        )


def _baseline(case: Case, over: tuple[str, str]) -> str:
    if over[1] == REFERENCE:
        return REFERENCE
    return "undisturbed" if case.around.is_beside_python else over[0].removeprefix("load on ")
