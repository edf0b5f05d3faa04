"""Makes the pictures of docs/cli.md anew: ``make pictures``.

The commands run for real, against moto, in a pseudo-terminal whose output is drawn as SVG; of the
page of a checkpoint a headless Chromium takes a picture.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from support.emulators import DUMMY_AWS, free_port, moto_server

IMAGES = Path(__file__).parent / "images"
RUN = "s3://bucket/run"
WORLD = 4
COLUMNS = 104
SHAPES = {"tok_embeddings": (16_384, 384), "output": (16_384, 384), "norm": (384,)} | {
    f"layers.{layer}.{name}": shape
    for layer in range(8)
    for name, shape in {
        "attention.wq": (384, 384),
        "attention.wk": (128, 384),
        "attention.wv": (128, 384),
        "attention.wo": (384, 384),
        "feed_forward.w1": (1344, 384),
        "feed_forward.w2": (384, 1344),
        "feed_forward.w3": (1344, 384),
        "norm": (384,),
    }.items()
}


def train(rank: int, port: int) -> None:
    """One of the ranks of a job that saves four steps; its embeddings are frozen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=WORLD, rank=rank)
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(7)
    model = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in SHAPES.items()}
    manager = cloudckpt.CheckpointManager(RUN, asynchronous=False)
    for step in (1000, 2000, 3000, 4000):
        for name, weight in model.items():
            if "embeddings" not in name and "norm" not in name:
                weight += torch.randn_like(weight) * 0.001

        def sharded(tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, [Shard(0)])

        moments = {
            name: {"exp_avg": sharded(weight * 0.1), "exp_avg_sq": sharded(weight**2)}
            for name, weight in model.items()
        }
        weights = {name: sharded(weight.to(torch.bfloat16)) for name, weight in model.items()}
        state = {"model": weights, "optimizer": {"state": moments}, "step": step}
        loss = 2.0 + 3000 / step
        manager.save(step, state, metrics={"loss": loss}, notes={"commit": "4f1c9e2", "lr": 3e-4})
    manager.close()
    dist.destroy_process_group()


def on_a_terminal(*arguments: str) -> str:
    """All that the command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "cloudckpt", *arguments]
    surroundings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=surroundings):
        os.close(theirs)
        written = b""
        while True:
            try:
                written += os.read(ours, 65536)
            except OSError:  # its end
                break
    os.close(ours)
    return written.decode()


def middle(written: str) -> str:
    """The progress bar when about half was done, and what was printed at the end."""
    frames = re.split(r"\r|\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh]", written)
    bars = [frame for frame in frames if re.search(r"\d/\d.*MB", frame)]
    last = [frame for frame in frames if "intact" in frame]
    return f"{bars[len(bars) // 2]}\n{last[-1].strip()}"


def draw(name: str, *shown: tuple[str, str]) -> None:
    """Writes a picture of a terminal in which commands were typed, with what they wrote."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command, written in shown:
        console.print(Text.assemble(("$ ", "green"), (f"cloudckpt {command}", "bold")))
        console.print(Text.from_ansi(written.replace("\r", "").rstrip("\n")), soft_wrap=True)
    style = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    style = style.replace("font-family: Fira Code, monospace", "font-family: monospace")
    console.save_svg(str(IMAGES / f"{name}.svg"), title="", code_format=style)


def photograph(page: Path) -> None:
    """Takes pictures of a page in a browser, on light and on dark ground."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        print("SKIPPED: there is no Chromium for the pictures of the page")
        return
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    for ground, options in (("light", []), ("dark", dark)):
        target = IMAGES / f"page-{ground}.png"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--window-size=1280,1240", "--virtual-time-budget=4000", *options]
        command += [f"--screenshot={target}", page.as_uri()]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> None:
    """Makes all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with moto_server() as url, tempfile.TemporaryDirectory() as folder:
        os.environ.update(DUMMY_AWS, AWS_ENDPOINT_URL_S3=url, CLOUDCKPT_S3_ADDRESSING_STYLE="path")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        torch.multiprocessing.spawn(train, (free_port(),), nprocs=WORLD)
        client.delete_object(Bucket="bucket", Key="run/step-4000/.metadata")  # as if killed
        last, before, layer = f"{RUN}/step-3000", f"{RUN}/step-2000", "model.layers.0.*"
        for name, commands in {
            "ls": [("ls", RUN), ("latest", RUN)],
            "inspect": [("inspect", last, layer)],
            "diff": [("diff", before, last, layer)],
        }.items():
            draw(name, *((shlex.join(command), on_a_terminal(*command)) for command in commands))
        draw("verify", (f"verify {last}", middle(on_a_terminal("verify", last))))
        page = Path(folder) / "step-3000.html"
        on_a_terminal("inspect", last, "--html", str(page))
        photograph(page)


if __name__ == "__main__":
    main()
