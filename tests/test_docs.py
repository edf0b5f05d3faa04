"""The documentation says what the code does."""

import ast
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cloudckpt
from support.forks import child

ROOT = Path(__file__).parent.parent


def test_the_table_of_options_is_that_of_the_code():
    tables = runpy.run_path(str(ROOT / "docs" / "options_table.py"))["tables"]
    assert tables() in (ROOT / "docs" / "configuration.md").read_text()


_FENCE = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: [^>]{20,} -->\n *$")  # above the fence, with the reason


def _examples(page: str) -> list[str]:
    """The Python of a page, without that of which the page says why it is not run."""
    text = (ROOT / page).read_text()
    return [
        textwrap.dedent(found[2])
        for found in _FENCE.finditer(text)
        if not _NOT_RUN.search(text, 0, found.start())
    ]


def _run(code: str, endpoint: str, place: str, folder: str) -> None:
    """Runs an example as the script of a user who has what its page speaks of."""
    import torch
    import torch.distributed.checkpoint as dcp

    import cloudckpt

    os.chdir(folder)
    os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    places = {
        "s3://bucket": place,
        "gs://other": f"{place}/other",
        "gs://models": place,
        "s3://models": place,
        "s3://name--usw2-az1--x-s3": place,
        "hf://buckets/namespace/name": place,
        "http://minio:9000": endpoint,
        "/mnt/old": folder,
    }
    for theirs, ours in places.items():
        code = code.replace(theirs, ours)
    model = torch.nn.Linear(4, 2)
    state = {"weights": torch.zeros(4), "step": 0, "model": model.state_dict()}
    if "CheckpointManager" not in code:
        for step in (1000, 2000, 3000):
            cloudckpt.save(state, checkpoint_id=f"{place}/run/step-{step}")
    if "model.pt" in code:
        torch.save(state, "model.pt")
        cloudckpt.files.save_file(f"{place}/model.pt", Path("model.pt"))
        dcp.save(state, checkpoint_id=f"{folder}/checkpoint", no_dist=True)
    exec(
        compile(code, "example", "exec"),
        {
            "__name__": "__main__",
            "changed": "more text",
            "cloudckpt": cloudckpt,
            "loss": 0.5,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "state": state,
            "state_dict": state,
            "step": 1000,
            "steps": 3001,
            "text": "text",
            "torch": torch,
            "train": lambda step: None,
        },
    )
    if "CheckpointManager" in code:
        assert cloudckpt.latest(f"{place}/run") == f"{place}/run/step-3000"


def test_the_code_for_each_framework_is_run_by_a_job_of_integration():
    frameworks = ROOT / "integration" / "frameworks"
    page = runpy.run_path(str(frameworks / "page.py"))
    jobs = [path for path in frameworks.glob("*.py") if path.name != "page.py"]
    run = re.findall(r"""\bcode\(\s*"([^"]+)\"""", "\n".join(job.read_text() for job in jobs))
    assert sorted(set(run)) == sorted(page["headings"]())


def test_the_example_of_the_readme_trains_and_resumes_as_it_stands(tmp_path):
    (script,) = _examples("README.md")
    (tmp_path / "train.py").write_text(script)
    for begin in (1, 501):
        command = [sys.executable, "train.py"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stdout) == (0, f"begins at step {begin}\n"), ended.stderr
    kept = sorted(folder.name for folder in (tmp_path / "runs" / "first").glob("step-*"))
    assert kept == ["step-1000", "step-800", "step-900"]


def _run_by(runner: str, arguments: list[str], folder: Path) -> None:
    """As a process of its own does it, but for the seconds in which it imports torch."""
    os.chdir(folder)
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    sys.argv = [runner, *arguments]
    if runner == "torchrun":
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        runpy.run_path(runner, run_name="__main__")


def test_the_quick_start_runs_as_it_stands_on_one_process_and_on_ranks(tmp_path):
    first, ranks = _examples("docs/quickstart.md")
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "train.py").write_text(ranks)
    for runner, arguments, printed in (
        ("first.py", [], ""),
        ("torchrun", ["--standalone", "--nproc-per-node", "2", "train.py"], "begins at step 1\n"),
        ("torchrun", ["--standalone", "--nproc-per-node", "1", "train.py"], "begins at step 21\n"),
    ):
        job = {"runner": runner, "arguments": arguments, "folder": tmp_path}
        with child(_run_by, patience=250, **job) as running:
            assert running.wait()[0] == 0
        assert (tmp_path / "printed").read_text() == printed


# quickstart is run above, frameworks in integration/frameworks
RUN = [
    *("background", "conversion", "layers", "looking", "moving", "ranks", "runs", "s3"),
    *("safetensors", "saving"),
]


@pytest.mark.parametrize("page", RUN)
def test_the_examples_of_a_page_run(page, s3_url, bucket, tmp_path):
    found = _examples(f"docs/{page}.md")
    assert found
    for number, code in enumerate(found):
        place, folder = f"s3://{bucket}/{number}", tmp_path / str(number)
        folder.mkdir()
        job = {"code": code, "endpoint": s3_url, "place": place, "folder": str(folder)}
        with child(_run, **job) as running:
            assert running.wait()[0] == 0, code


def test_the_headings_of_troubleshooting_are_parts_of_messages():
    files = (ROOT / "src").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [
        node for node in nodes if type(node) is ast.Constant and id(node) not in docstrings
    ]
    texts = "\0".join(str(constant.value) for constant in constants)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### [\w ]+: `(.+)`$", page, re.MULTILINE)
    assert "which is saved as one value, but holds a Stateful" in headings
    assert [heading for heading in headings if heading not in texts] == []


def test_all_that_is_public_is_in_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    listed = set(re.findall(r"<!-- names of ([\w.]+) -->", "".join(p.read_text() for p in pages)))
    assert {"cloudckpt", "cloudckpt.errors"} <= listed
    names = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["public_names"]
    shown = {name for module in ("cloudckpt", "cloudckpt.errors") for name in names(module)}
    modules = {name.rpartition(".")[2] for name in listed}
    elsewhere = {"__version__", "integrations"}  # frameworks.md has those, one after the other
    assert set(cloudckpt.__all__) - shown - modules - elsewhere == set()
    assert {"aio", "checkpointer", "runs", "hf", "files", "uri", "experimental"} <= modules
