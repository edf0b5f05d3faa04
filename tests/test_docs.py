"""The documentation says what the code does."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from forks import child

ROOT = Path(__file__).parent.parent


def test_the_table_of_options_is_that_of_the_code():
    tables = runpy.run_path(str(ROOT / "docs" / "options_table.py"))["tables"]
    assert tables() in (ROOT / "docs" / "configuration.md").read_text()


def test_the_architecture_page_names_every_room_that_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "cloudckpt"
    rooms = [path.name for path in source.iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if room not in page] == []


def test_the_clients_that_requests_were_compared_with_are_those_that_are_pinned():
    pages = ("decisions.md", "gcs.md", "azure.md")
    text = " ".join(" ".join((ROOT / "docs" / page).read_text().split()) for page in pages)
    pinned = (ROOT / "constraints.txt").read_text()
    for client in ("boto3", "google-cloud-storage", "azure-storage-blob"):
        named = set(re.findall(rf"{client} (\d+\.\d+)", text))
        assert named == set(re.findall(rf"^{client}==(\d+\.\d+)\.", pinned, re.MULTILINE))


def _examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def _run(code: str, endpoint: str, run: str) -> None:
    """Runs an example as the script of a user who has what its page speaks of."""
    import torch

    import cloudckpt

    os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    code = code.replace("s3://bucket/run", run).replace("gs://other/run", f"{run}-copied")
    code = code.replace("http://minio:9000", endpoint)
    model = torch.nn.Linear(4, 2)
    state = {"weights": torch.zeros(4), "step": 0}
    if "CheckpointManager" not in code:
        for step in (1000, 2000, 3000):
            cloudckpt.save(state, checkpoint_id=f"{run}/step-{step}")
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
            "train": lambda step: None,
        },
    )
    if "CheckpointManager" in code:
        assert cloudckpt.latest(run) == f"{run}/step-3000"


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


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_links_within_the_documentation_lead_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("terraform/**/README.md"),
    ]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if link.startswith(("http://", "https://")):
                continue
            to = (page.parent / path).resolve() if path else page
            if not to.exists() or (anchor and anchor not in _anchors(to)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["docs/saving.md", "docs/runs.md", "docs/s3.md"])
def test_the_examples_of_a_page_run(page, s3_url, bucket):
    found = _examples(page)
    assert found
    for number, code in enumerate(found):
        with child(_run, code=code, endpoint=s3_url, run=f"s3://{bucket}/{number}/run") as running:
            assert running.wait()[0] == 0, code
