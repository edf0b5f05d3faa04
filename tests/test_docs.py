"""The documentation says what the code does."""

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
