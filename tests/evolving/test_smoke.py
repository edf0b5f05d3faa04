import sys, time
import pytest
from dcp.conftest import places
from . import drawing, machine

@pytest.mark.timeout(0)
def test_smoke(ranks, places):
    import os
    a, b = map(int, os.environ.get("SEEDS", "0:5").split(":"))
    stores = os.environ.get("STORES", "local").split(",")
    total = 0
    for seed in range(a, b):
        case = drawing.drawn(str(seed), stores=stores)
        t = time.monotonic()
        found = machine.found_in(case, ranks, places)
        total += len(case.saves)
        print(seed, [s.world for s in case.segments], len(case.saves), f"{time.monotonic()-t:.2f}s", case.tight, case.store, file=sys.__stderr__)
        if found and os.environ.get("SHRINK"):
            t = time.monotonic()
            found = machine.shrunk(found, ranks, places)
            print(f"shrunk in {time.monotonic()-t:.0f}s", found, file=sys.__stderr__)
        elif found:
            print(*[f"   {f.step} {case.saves[f.step].by} {case.saves[f.step].fault} {f.what} {f.kind} {f.text[:300]}" for f in found.findings], sep="\n", file=sys.__stderr__)
    print(total, "saves", file=sys.__stderr__)
