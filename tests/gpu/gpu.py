"""What only a GPU can show: ``make gpu``. On a CPU: ``python tests/gpu/gpu.py --device cpu``.

Needs this clone, a torch build for the GPU, and cloudckpt's own dependencies; no network and no
other process on the card. It saves to a folder, loads straight to the device, and compares each
value to the bit. It prints a table, and exits with 1 if any value differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import cloudckpt
from cloudckpt import BackgroundOptions, Config
from dcp.values import assert_same

MIB = 2**20
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8, torch.uint8, torch.bool),
]


class Accelerator:
    """A device and its clock."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def title(self) -> str:
        if self.name == "cpu":
            return f"no accelerator ({platform.machine()})"
        return str(torch.cuda.get_device_name())

    def wait(self) -> None:
        """Until all that was begun on the device is done."""
        if self.name != "cpu":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """How long the device itself takes, by its events."""
        if self.name == "cpu":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        start.record()
        work()
        end.record()
        self.wait()
        return float(start.elapsed_time(end)) / 1000


def differences(found: Any, expected: Any) -> list[str]:
    """What is not the same to the bit and on the same device; the first of it."""
    try:
        assert_same(found, expected)
    except AssertionError as error:
        return [str(error)]
    return []


def size_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def blank(state: Any) -> Any:
    """The same structure and places, without the values."""

    def zeros(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)()

    return tree_map(zeros, state)


class Report:
    """Rows of a table, and what was wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._rows = [("check", "MiB", "ms", "GB/s", "values")]

    def row(self, what: str, nbytes: int = 0, seconds: float = 0.0, wrong: Any = None) -> None:
        """``wrong`` is what differs; None where nothing was compared."""
        rate = f"{nbytes / seconds / 1e9:.2f}" if nbytes and seconds else ""
        size = f"{nbytes / MIB:.0f}" if nbytes else ""
        time = f"{1000 * seconds:.1f}" if seconds else ""
        word = "" if wrong is None else "DIFFER" if wrong else "equal to the bit"
        self._rows.append((what, size, time, rate, word))
        self.wrong += [f"{what}: {one}" for one in wrong or ()]

    def __str__(self) -> str:
        widths = [max(len(row[column]) for row in self._rows) for column in range(5)]
        lines = [
            f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
            for row in self._rows
        ]
        lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
        return "\n".join([*lines, *self.wrong])


def of_each_kind(device: str) -> dict[str, Any]:
    """A small tensor of each dtype, and layouts that are no plain block of memory."""
    random = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (64 * dtype.itemsize,), generator=random, dtype=torch.uint8)
        raw = raw % 2 if dtype is torch.bool else raw
        state[str(dtype)] = raw.view(dtype).to(device)
    base = torch.randn(96, 64, generator=random).to(device)
    state |= {
        "transposed": base.t(),
        "strided": base[::2, 1:],
        "slice": base[3],
        "scalar": base[0, 0],
    }
    state |= {"empty": torch.empty(0, 5, device=device), "step": 7, "nested": [{"w": base + 1}]}
    return state


def save_and_load(report: Report, what: str, state: Any, place: str, **options: Any) -> None:
    """One save, and a load straight to where the tensors are."""
    config, nbytes = Config(**options), size_of(state)
    began = time.perf_counter()
    cloudckpt.save(state, checkpoint_id=place, config=config)
    report.row(f"{what}: save", nbytes, time.perf_counter() - began)
    found = blank(state)
    began = time.perf_counter()
    cloudckpt.load(found, checkpoint_id=place, config=config)
    report.row(f"{what}: load", nbytes, time.perf_counter() - began, differences(found, state))


def optimizers(report: Report, device: str, place: str) -> None:
    """A model after some steps and another one that goes on from its checkpoint."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device != "cpu" or None)
        for _ in range(3):
            model(torch.ones(4, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = made()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    cloudckpt.save(state, checkpoint_id=place)
    other, other_optimizer = made()
    found = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    cloudckpt.load(found, checkpoint_id=place)
    set_state_dict(
        other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    again = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    report.row("a model with AdamW", size_of(state), wrong=differences(again, state))


def distributed(report: Report, device: str, place: str) -> None:
    """DTensors of one rank."""
    mesh = init_device_mesh(device, (1,))
    whole = torch.arange(4096.0, device=device).reshape(64, 64)
    layouts = {"sharded": Shard(0), "by columns": Shard(1), "replicated": Replicate()}
    state = {name: distribute_tensor(whole, mesh, [kind]) for name, kind in layouts.items()}
    save_and_load(report, "DTensors", state, place)


def copies(report: Report, device: Accelerator, state: dict[str, torch.Tensor]) -> None:
    """The floor of a stall: the device's memory into the machine's, by the device's own clock."""
    for name, pinned in (("pageable", False), ("pinned", device.name != "cpu")):
        hosts = {
            key: torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            for key, value in state.items()
        }

        def copy(hosts: dict[str, torch.Tensor] = hosts, pinned: bool = pinned) -> None:
            for key, value in state.items():
                hosts[key].copy_(value, non_blocking=pinned)

        copy()
        seconds = min(device.seconds(copy) for _ in range(3))
        report.row(f"copy to {name} memory", size_of(state), seconds)


def stall(
    device: Accelerator, save: Callable[..., Any], place: str, **options: Any
) -> tuple[float, str]:
    """Returns the seconds that a background save holds a loop up, and where the last one is."""
    waits = []
    for number in range(3):  # the first one prepares what the others use again
        device.wait()
        began = time.perf_counter()
        future = save(checkpoint_id=f"{place}-{number}", **options)
        waits.append(time.perf_counter() - began)
        future.result(300)
    return min(waits[1:]), f"{place}-{number}"


def stalls(report: Report, device: Accelerator, state: dict[str, Any], folder: str) -> None:
    """For how long a save in the background holds a training loop up; and torch's own."""
    size = size_of(state)
    for kind in (THREAD, PROCESS):
        options = {"state_dict": state, "async_checkpointer_type": kind}
        for pin in ("off", "on"):
            config = Config(background=BackgroundOptions(pin_memory=pin))
            place = f"{folder}/{kind.name}-{pin}"
            seconds, place = stall(device, cloudckpt.async_save, place, config=config, **options)
            found = blank(state)
            cloudckpt.load(found, checkpoint_id=place)
            name = f"stall of async_save ({kind.name}, pin_memory={pin!r})"
            report.row(name, size, seconds, differences(found, state))
        seconds, _ = stall(device, dcp.async_save, f"{folder}/torch-{kind.name}", **options)
        report.row(f"stall of torch's async_save ({kind.name})", size, seconds)


def steps(report: Report, device: Accelerator, state: dict[str, Any], folder: str) -> None:
    """The time of a step alone, and while a save is on its way."""
    side = 2048 if device.name != "cpu" else 128
    a, b = (torch.randn(side, side, device=device.name) for _ in range(2))

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        device.wait()
        return time.perf_counter() - began

    def tell(name: str, taken: list[float]) -> None:
        report.row(f"{name}, p50", seconds=statistics.median(taken))
        report.row(f"{name}, p99", seconds=sorted(taken)[int(0.99 * (len(taken) - 1))])

    for _ in range(10):
        step()
    tell("a step alone", [step() for _ in range(200)])
    for kind in (THREAD, PROCESS):
        place = f"{folder}/steps-{kind.name}"
        future = cloudckpt.async_save(
            state, checkpoint_id=place, async_checkpointer_type=kind, config=Config()
        )
        taken = [step()]
        while not future.done() and len(taken) < 100_000:
            taken.append(step())
        future.result(300)
        tell(f"a step beside a save ({kind.name})", taken)
        found = blank(state)
        cloudckpt.load(found, checkpoint_id=place)
        report.row(f"what was saved beside steps ({kind.name})", wrong=differences(found, state))


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    """A process group of this process only."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mib", type=int, default=2048, help="size of the large state")
    parser.add_argument("--folder", help="where checkpoints go; by default a temporary folder")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that this torch can use; --device cpu tries the script without")
        return 2
    device, report = Accelerator(given.device), Report()
    torch.manual_seed(0)
    each = given.mib * MIB // 16
    large = {
        f"layer{number}": torch.randn(each // 4, device=given.device).reshape(64, -1)
        for number in range(16)
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, alone(given.device):
        save_and_load(
            report, "each dtype and layout", of_each_kind(given.device), f"{folder}/kinds"
        )
        optimizers(report, given.device, f"{folder}/optimizer")
        distributed(report, given.device, f"{folder}/dtensors")
        save_and_load(report, "a large state", large, f"{folder}/large")
        copies(report, device, large)
        stalls(report, device, large, folder)
        steps(report, device, large, folder)
    print(f"{device.title}, torch {torch.__version__}, {os.cpu_count()} cores")
    print(report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
