"""Print, one per line, the pip arguments that install a package from the checkout with its lowest declared versions.

torch and what is compiled against one torch (fbgemm-gpu, triton) keep their place in the tested matrix: an older build
of those beside the current torch is a combination that cannot exist.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("cpu", "recipes")
TIED_TO_TORCH = ("torch", "fbgemm-gpu-cpu", "triton")


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
        name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
        if (ROOT / "packages" / name).is_dir():
            found |= siblings(name)
    return found | {package: None}


def floor(requirement: str) -> str | None:
    """`numpy>=1.26` -> `numpy==1.26.*`; None for what has no floor or is tied to torch."""
    match = re.match(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=(?P<version>[0-9.]+)", requirement)
    if match is None or match["name"] in TIED_TO_TORCH or (ROOT / "packages" / match["name"]).is_dir():
        return None
    return f"{match['name']}=={match['version']}.*"


def main(package: str) -> None:
    needed = siblings(package)
    arguments = []
    for name in needed:
        extras = [extra for extra in EXTRAS if extra in project(name).get("optional-dependencies", {})]
        arguments += ["-e", f"{ROOT / 'packages' / name}" + (f"[{','.join(extras)}]" if extras else "")]
    pins = {pin for name in needed for requirement in declared(name) if (pin := floor(requirement)) is not None}
    print("\n".join([*arguments, *sorted(pins)]))


if __name__ == "__main__":
    main(sys.argv[1])
