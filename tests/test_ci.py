"""What CI runs is what a developer runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKFLOWS = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def _targets(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z][\w-]*", text) if word in _of_make()}


def _of_make() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def test_the_workflow_and_the_script_of_ci_make_the_same():
    commands = re.findall(r"\bmake (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    script = {target for command in commands for target in _targets(command)}
    matrix = re.search(r"target:\n((?: +- .+\n)+)", WORKFLOWS)
    assert matrix is not None
    words = re.findall(r"[\w-]+", matrix[1].replace(" - ", " "))
    assert {word for word in words if word not in _of_make()} == set()
    assert set(words) == script


def test_every_target_is_phony_or_a_file():
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == _of_make()
