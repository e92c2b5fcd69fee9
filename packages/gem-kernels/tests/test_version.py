"""One version: of the module, of the distribution, and at the head of the changelog."""

import importlib.metadata
import re
from pathlib import Path

import gem_kernels

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_distribution_has_the_version_of_the_module():
    assert importlib.metadata.version("gem-kernels") == gem_kernels.__version__


def test_changelog_starts_with_the_version():
    heads = re.findall(r"^## (\S+)", CHANGELOG.read_text(), flags=re.MULTILINE)
    assert heads
    assert heads[0] == gem_kernels.__version__
