"""The documentation says what the code does."""

import re
import runpy
from pathlib import Path

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
