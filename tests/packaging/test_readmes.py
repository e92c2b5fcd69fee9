"""Every Python block of every README runs as written, each in a process of its own, outside the checkout."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
LIMIT_S = 120  # far above the 20 s a block should take: other work may share the machine


@dataclass(frozen=True)
class Block:
    id: str
    code: str


def blocks(readme: Path) -> list[Block]:
    found = re.findall(r"^```python\n(.*?)^```", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Block(id=f"{readme.parent.name}-{index}", code=code) for index, code in enumerate(found)]


BLOCKS = [block for readme in READMES for block in blocks(readme)]


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_readme_shows_code(readme: Path) -> None:
    assert blocks(readme), f"{readme} has no python block"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
    assert "Warning" not in done.stderr, done.stderr
