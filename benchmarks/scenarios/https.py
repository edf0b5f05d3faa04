"""One process saves and loads 1 GiB by https: what a real cloud speaks."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench, rotated
from benchmarks.children import ChildFailedError
from benchmarks.contenders import CONTENDERS
from benchmarks.floor_tls import build
from benchmarks.meter import Cost
from benchmarks.operation import SINK, Action, Surroundings, run
from benchmarks.rows import FLOOR, OURS, OURS_ELSEWHERE, Limits, Row, limit_for
from benchmarks.scenarios.plain import ACTIONS
from benchmarks.server.terminator import Terminator, running_terminator
from benchmarks.states import GIB, MIB, StateSpec, mixed

Costs = dict[tuple[str, str], list[Cost]]

_CONNECTIONS = (8, 16)
_CORES = (1, 2, 4)


def measure(bench: Bench) -> list[Row]:
    """Returns CPU and wall time of every contender; of ours also beside others and by cores."""
    spec = mixed(bench.sized(GIB, 128 * MIB))
    names = [
        name for name, entry in CONTENDERS.items() if not entry.only_async and name != "filesystem"
    ]
    with tempfile.TemporaryDirectory(prefix="bench-floor-") as folder:
        try:
            library = str(build(Path(folder)))
            with running_terminator(bench.server.port) as terminator:
                return _measure(bench, bench.taking_part(*names), spec, terminator, library)
        except (ChildFailedError, RuntimeError) as failure:
            bench.failures[bench.scenario, FLOOR] = str(failure)
            return []


def _measure(
    bench: Bench, contenders: list[str], spec: StateSpec, terminator: Terminator, library: str
) -> list[Row]:
    usual = Surroundings(port=terminator.port, bundle=terminator.bundle, library=library)
    for name in contenders:
        bench.attempt(name, run, bench.server, name, "save", spec, f"{name}-loads")
    costs: Costs = defaultdict(list)
    for turn in range(max(map(bench.rounds_of, contenders), default=0)):
        for action in ACTIONS:
            for connections in _CONNECTIONS:
                for name in rotated(contenders, turn):
                    if turn >= bench.rounds_of(name) or (
                        connections != _CONNECTIONS[0] and name not in (FLOOR, OURS)
                    ):
                        continue
                    case = f"{action} {spec.total // MIB} MiB, {connections} connections"
                    around = usual.but(connections=connections)
                    _once(bench, costs, name, action, spec, case, around)
        if OURS in contenders:
            _loads_of_ours(bench, costs, spec, usual)
    rows = [
        row
        for (case, name), found in costs.items()
        for row in _rows(case, name, spec, found, costs)
    ]
    return sorted(rows, key=lambda row: (row.case.startswith("load"), row.case))


def _loads_of_ours(bench: Bench, costs: Costs, spec: StateSpec, usual: Surroundings) -> None:
    beside = usual.but(connections=16, is_beside_python=True)
    _once(bench, costs, OURS, "load", spec, _BESIDE, beside)
    for cores in _CORES:
        around = usual.but(connections=16, cores=cores)
        _once(bench, costs, OURS, "load", spec, f"load on {cores} cores", around)


_BESIDE = "load beside a Python thread that holds the GIL"


def _once(
    bench: Bench,
    costs: Costs,
    name: str,
    action: Action,
    spec: StateSpec,
    case: str,
    around: Surroundings,
) -> None:
    bucket, called = (SINK, f"{name}-sunk") if action == "save" else ("keep", f"{name}-loads")
    done = bench.attempt(
        name, run, bench.server, name, action, spec, called, bucket=bucket, around=around
    )
    if done is not None:
        costs[case, name].append(done.cost)
    bench.server.clear(SINK)


def _rows(case: str, name: str, spec: StateSpec, found: list[Cost], costs: Costs) -> list[Row]:
    gib = spec.total / GIB
    undisturbed = f"load {spec.total // MIB} MiB, 16 connections"
    base, baseline = costs.get((case, FLOOR), []), FLOOR
    limits = {
        "CPU": Limits.HTTPS_SAVE_CPU if case.startswith("save") else Limits.HTTPS_LOAD_CPU,
        "wall": None if case.startswith("save") else Limits.HTTPS_LOAD_WALL,
    }
    if case == _BESIDE:
        base, baseline = costs.get((undisturbed, OURS), []), "undisturbed"
        limits = {"CPU": None, "wall": Limits.BESIDE_PYTHON}
    rows = []
    for metric, field in (("CPU", "cpu_s"), ("wall", "wall_s")):
        if case == _BESIDE and metric == "CPU":
            continue  # it would be that of the other thread
        samples = tuple(getattr(cost, field) / gib for cost in found)
        ratio = (
            median(samples) / median(getattr(cost, field) / gib for cost in base) if base else None
        )
        limit = limits[metric]
        is_judged = ratio is not None and limit is not None and name not in OURS_ELSEWHERE
        rows.append(
            Row(
                scenario="https",
                case=case,
                contender=name,
                metric=metric,
                unit="s/GiB",
                samples=samples,
                ratio=ratio,
                baseline=baseline if ratio is not None else "",
                limit=limit_for(name, limit) if is_judged and limit is not None else None,
            )
        )
    memory = tuple(cost.extra_memory / MIB for cost in found)
    rows.append(
        Row(
            scenario="https",
            case=case,
            contender=name,
            metric="extra memory",
            unit="MiB",
            samples=memory,
            limit=limit_for(name, Limits.EXTRA_MEMORY_MIB),
        )
    )
    return rows
