"""The five pyproject files, changelogs and version files agree with one another."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
CHANGELOG_HEADINGS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Numerics", "Performance"}

pytestmark = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def import_name(package: Path) -> str:
    return package.name.replace("-", "_")


def declared_version(package: Path) -> str:
    text = (package / "src" / import_name(package) / "_version.py").read_text()
    match = re.fullmatch(r'__version__ = "([^"]+)"\n', text)
    assert match is not None, text
    return match[1]


def requirements(package: Path) -> list[Requirement]:
    table = project(package)
    extras = table.get("optional-dependencies", {}).values()
    return [Requirement(text) for text in [*table["dependencies"], *(text for extra in extras for text in extra)]]


def test_project_table(package: Path) -> None:
    table = project(package)
    assert table["name"] == package.name
    assert table["dynamic"] == ["version"]
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    assert table["readme"] == "README.md"
    assert table["description"].endswith(".")


def test_files_of_a_distribution(package: Path) -> None:
    assert (package / "src" / import_name(package) / "py.typed").read_text() == ""
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert list((package / "tests").glob("test_*.py")), "a package without tests"


def test_version_is_the_head_of_the_changelog(package: Path) -> None:
    heads = re.findall(r"^## \[?([0-9][^\]\s]*)\]?", (package / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heads, "the changelog names no version"
    assert heads[0] == declared_version(package)
    assert importlib.import_module(import_name(package)).__version__ == heads[0]
    assert [Version(head) for head in heads] == sorted(map(Version, heads), reverse=True)


def test_changelog_uses_known_headings(package: Path) -> None:
    used = set(re.findall(r"^### (.+)$", (package / "CHANGELOG.md").read_text(), flags=re.MULTILINE))
    assert used, "the changelog says nothing"
    assert used <= CHANGELOG_HEADINGS


def test_sibling_pins_admit_the_checkout_and_stop_at_the_next_breaking_version(package: Path) -> None:
    for requirement in requirements(package):
        sibling = ROOT / "packages" / requirement.name
        if not sibling.is_dir():
            continue
        version = Version(declared_version(sibling))
        assert requirement.specifier.contains(version, prereleases=True), requirement
        breaking = f"0.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}.0"
        assert not requirement.specifier.contains(breaking), requirement


def test_every_requirement_has_a_floor(package: Path) -> None:
    for requirement in requirements(package):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {">=", "==", "~="} or not operators, requirement
        assert requirement.specifier, f"{requirement} has no lower bound, so `nox -s lowest` cannot test it"
