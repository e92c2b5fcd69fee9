"""Links between the documents lead somewhere, and the sessions they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])
NOXFILE = (ROOT / "noxfile.py").read_text()

pytestmark = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(document: Path) -> set[str]:
    """The anchors that the document's headings get on a forge."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_resolve(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{target} does not exist"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}: no such heading"


def test_named_sessions_exist(document: Path) -> None:
    for name in re.findall(r'nox -s "?([a-z_]+)', document.read_text()):
        assert f"def {name}(" in NOXFILE, f"nox has no session {name}"
