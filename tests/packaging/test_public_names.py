"""A package's `__init__` re-exports, at once or when a name is asked for (PEP 562), and does nothing else.

Its `__all__` is true and pinned by its own tests.
"""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))

pytestmark = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def init_file(package: Path) -> Path:
    return package / "src" / package.name.replace("-", "_") / "__init__.py"


def test_init_only_reexports(package: Path) -> None:
    for node in ast.parse(init_file(package).read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert is_docstring or is_all or is_import(node) or is_lazy(node), ast.unparse(node)


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def is_lazy(node: ast.stmt) -> bool:
    """What re-exports on demand: imports for type checkers, `__getattr__`, `__dir__`, and their private tables."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(map(is_import, node.body)) and not node.orelse
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]).startswith("_")
    return isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")


def test_every_public_name_exists_and_is_documented(package: Path) -> None:
    module = importlib.import_module(package.name.replace("-", "_"))
    assert len(module.__all__) > 1
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        public = getattr(module, name)
        if callable(public):
            assert public.__doc__, f"{module.__name__}.{name} has no docstring"


def test_a_test_of_the_package_pins_all(package: Path) -> None:
    pins = [path.name for path in (package / "tests").glob("test_*.py") if "__all__" in path.read_text()]
    assert pins, f"no test of {package.name} pins __all__"
