"""Rules of the source trees that no linter knows; prints each breach as `path:line: text` and exits 1 if there is one.

1. A package imports only its siblings and the distributions its pyproject.toml declares (extras included).
2. A distribution that only an extra declares is never imported at a module's top level outside a try.
3. Host functions are annotated in full. Functions compiled by Triton are not: their annotations mean something else.
4. No Python file is longer than 600 lines.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
# Distribution -> the modules it provides, where the two names differ.
PROVIDES = {
    "fbgemm_gpu_cpu": "fbgemm_gpu",
    "transformer_engine": "transformer_engine",
}
DEVICE_DECORATORS = {"jit", "heuristics", "autotune", "constexpr_function"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    directory: Path
    import_name: str
    required: frozenset[str]
    optional: frozenset[str]


def module_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    name = match.group().lower().replace("-", "_").replace(".", "_")
    return PROVIDES.get(name, name)


def load(directory: Path) -> Package:
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = frozenset(module_name(requirement) for requirement in project["dependencies"])
    return Package(
        directory=directory,
        import_name=project["name"].replace("-", "_"),
        required=required,
        optional=frozenset(module_name(requirement) for extra in extras for requirement in extra) - required,
    )


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        return [node.module.partition(".")[0]]
    return []


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_time_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported and whose ImportError nobody catches."""
    for node in body:
        if isinstance(node, ast.If) and not is_type_checking(node.test):
            yield from import_time_statements(node.body)
            yield from import_time_statements(node.orelse)
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from import_time_statements(node.body)
        else:
            yield node


def dependency_breaches(package: Package, path: Path, tree: ast.Module) -> Iterator[str]:
    own = {package.import_name}
    for node in ast.walk(tree):
        for name in imported(node):
            if name not in own | package.required | package.optional | sys.stdlib_module_names:
                yield f"{path}:{node.lineno}: imports {name}, which {package.import_name} does not declare"
    # The recipes and the command line are what the extra `recipes` exists for.
    relative = path.relative_to(package.directory / "src" / package.import_name)
    if relative.parts[0].removesuffix(".py") in ("recipes", "cli"):
        return
    for node in import_time_statements(tree.body):
        for name in imported(node):
            if name in package.optional:
                yield f"{path}:{node.lineno}: imports {name} on import, but only an extra declares it"


def is_device_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and target.attr in DEVICE_DECORATORS:
            return True
        if isinstance(target, ast.Name) and target.id in DEVICE_DECORATORS:
            return True
    return False


def annotation_breaches(path: Path, tree: ast.Module) -> Iterator[str]:
    methods = {
        id(node)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_device_function(node):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args]
        if id(node) in methods:
            arguments = arguments[1:]
        arguments += [*node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
        bare = [argument.arg for argument in arguments if argument.annotation is None]
        if node.returns is None and node.name != "__init__":
            bare.append("its result")
        if bare:
            yield f"{path}:{node.lineno}: {node.name} lacks annotations: {', '.join(bare)}"


def breaches() -> Iterator[str]:
    for directory in sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")):
        package = load(directory)
        for path in sorted((directory / "src").rglob("*.py")):
            tree = ast.parse(path.read_text(), filename=str(path))
            yield from dependency_breaches(package, path, tree)
            yield from annotation_breaches(path, tree)
    for pattern in ("noxfile.py", ".ci/*.py", "tests/**/*.py", "packages/**/*.py", "docs/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            length = len(path.read_text().splitlines())
            if length > MAX_LINES:
                yield f"{path}:{length}: longer than {MAX_LINES} lines; split it by subject"


def main() -> int:
    found = [line.replace(f"{ROOT}/", "") for line in breaches()]
    print("\n".join(found) if found else "source rules: kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
