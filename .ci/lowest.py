"""Print, one per line, the pip arguments that install a package from the checkout with its lowest declared versions.

torch, and fbgemm-gpu which is compiled against one torch, are those of the CPU lane instead: an older build of one
beside the current other is a pair that cannot work.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("cpu", "recipes")
TIED_TO_TORCH = ("torch", "fbgemm-gpu-cpu")


def project(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def declared(package: str) -> Iterator[str]:
    """The package's requirements and those of the extras its tests on the CPU need."""
    table = project(package)
    yield from table["dependencies"]
    for extra in EXTRAS:
        yield from table.get("optional-dependencies", {}).get(extra, [])


def siblings(package: str) -> dict[str, None]:
    """The packages of this checkout that `package` needs, those first that others need, itself last."""
    found: dict[str, None] = {}
    for requirement in declared(package):
        name = name_of(requirement)
        if (ROOT / "packages" / name).is_dir():
            found |= siblings(name)
    return found | {package: None}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


def pin(requirement: str) -> str | None:
    """`numpy>=1.26` -> `numpy==1.26.*`; the CPU lane's pin for what is tied to torch; None for a sibling."""
    name = name_of(requirement)
    if name in TIED_TO_TORCH:
        lane = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["cpu"]
        return next(pin for pin in lane if name_of(pin) == name)
    match = re.search(r">=\s*(?P<version>[0-9.]+)", requirement)
    if match is None or (ROOT / "packages" / name).is_dir():
        return None
    return f"{name}=={match['version']}.*"


def main(package: str) -> None:
    needed = siblings(package)
    arguments = []
    for name in needed:
        extras = [extra for extra in EXTRAS if extra in project(name).get("optional-dependencies", {})]
        arguments += ["-e", f"{ROOT / 'packages' / name}" + (f"[{','.join(extras)}]" if extras else "")]
    pins = {pinned for name in needed for requirement in declared(name) if (pinned := pin(requirement)) is not None}
    print("\n".join([*arguments, *sorted(pins)]))


if __name__ == "__main__":
    main(sys.argv[1])
