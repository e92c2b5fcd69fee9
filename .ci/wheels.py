"""Checks of the built distributions.

`contents DIST` looks into the archives. `imports DIST` imports every module, in an environment where the wheels are
installed and from a directory outside the checkout. `alone DIST` does that for gem-train and gem-parallel where nothing
but their required dependencies is installed: all but the recipes must import without the extras.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ALLOWED_SUFFIXES = (".py", "py.typed")
PACKAGE_DATA = ("gem_parallel/_src/planner/nvidia-h200.json",)
"""Files beside the sources that a wheel must hold."""


def wheel_breaches(wheel: Path) -> Iterator[str]:
    package = wheel.name.partition("-")[0]
    names = zipfile.ZipFile(wheel).namelist()
    data = tuple(name for name in PACKAGE_DATA if name.startswith(f"{package}/"))
    for required in (f"{package}/py.typed", f"{package}/__init__.py", f"{package}/_version.py", *data):
        if required not in names:
            yield f"{wheel.name}: lacks {required}"
    if not any(name.endswith("licenses/LICENSE") for name in names):
        yield f"{wheel.name}: lacks the licence text"
    for name in names:
        top = name.partition("/")[0]
        if top != package and not top.endswith(".dist-info"):
            yield f"{wheel.name}: holds {name} outside {package}/"
        if top == package and not name.endswith(ALLOWED_SUFFIXES) and name not in data:
            yield f"{wheel.name}: holds {name}, which is no source file"
        if "tests" in Path(name).parts:
            yield f"{wheel.name}: holds the test {name}"


def sdist_breaches(sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as archive:
        names = [Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()]
    for required in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"):
        if required not in names:
            yield f"{sdist.name}: lacks {required}"
    for name in names:
        if name.endswith((".parquet", ".npz", ".pt")):
            yield f"{sdist.name}: holds data: {name}"


def contents(dist: Path) -> int:
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    found = [line for wheel in wheels for line in wheel_breaches(wheel)]
    found += [line for sdist in sdists for line in sdist_breaches(sdist)]
    if not wheels or len(wheels) != len(sdists):
        found.append(f"{len(wheels)} wheels and {len(sdists)} sdists: one of each per package expected")
    print("\n".join(found) if found else f"{len(wheels)} wheels and {len(sdists)} sdists: contents as they should be")
    return 1 if found else 0


def imports(dist: Path, packages: tuple[str, ...] = ("*",), without: str = "/") -> int:
    count = 0
    for wheel in sorted(wheel for package in packages for wheel in dist.glob(f"{package}-*.whl")):
        for name in sorted(zipfile.ZipFile(wheel).namelist()):
            if not name.endswith(".py") or name.endswith("__main__.py") or name.startswith(without):
                continue
            module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            assert module.__file__ is not None
            if dist.parent in Path(module.__file__).resolve().parents:
                print(f"{module.__name__} was imported from the checkout: {module.__file__}")
                return 1
            count += 1
    print(f"imported {count} modules")
    return 0


def alone(dist: Path) -> int:
    for module in ("gem_kernels", "gem_model", "gem_precision", "fbgemm_gpu"):
        if importlib.util.find_spec(module) is not None:
            print(f"{module} is installed: this check is about life without it")
            return 1
    return imports(dist, ("gem_parallel", "gem_train"), without="gem_train/recipes/")


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    sys.exit({"contents": contents, "imports": imports, "alone": alone}[command](Path(folder).resolve()))
