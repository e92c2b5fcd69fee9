"""Every test that docs/traps.md names exists, and every line of it names one. Files are read, not imported."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "traps.md"
LINES = [
    tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| what goes wrong"))
]
PACKAGES = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}


@cache
def functions(file: Path) -> dict[str, list[str]]:
    """Test -> its markers, of a file."""
    return {
        node.name: re.findall(r"pytest\.mark\.(\w+)", " ".join(ast.unparse(each) for each in node.decorator_list))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def file_of(package: str, name: str) -> Path:
    return ROOT / name if name.startswith("tests/") else ROOT / "packages" / package / "tests" / name


def test_the_page_has_a_line_for_each_kind() -> None:
    assert len(LINES) >= 70
    assert len({kind for kind, *_ in LINES}) == len(LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0][:40])
def test_guards_exist(line: tuple[str, ...]) -> None:
    kind, package, guards = line
    assert package in {*PACKAGES, "whole project"}
    entries = re.findall(r"`([^`]+)`", guards)
    assert entries, "no test guards this"
    on_any_machine = False
    for entry in entries:
        if entry.startswith("nox -s "):  # tests/packaging/test_documents.py knows whether it exists
            on_any_machine = True
            continue
        name, _, test = entry.partition("::")
        file = file_of(package, name)
        assert file.is_file(), f"{entry}: there is no {file.relative_to(ROOT)}"
        assert test.startswith("test_"), entry
        now = [other.name for other in sorted(file.parent.glob("test_*.py")) if test in functions(other)]
        assert file.name in now, f"{entry}: not in {file.relative_to(ROOT)}, but in {now or 'no file beside it'}"
        on_any_machine |= "gpu" not in functions(file)[test]
    assert on_any_machine != kind.endswith("*(GPU)*"), "say *(GPU)* where, and only where, all tests are marked gpu"
