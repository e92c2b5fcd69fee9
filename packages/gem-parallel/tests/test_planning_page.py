"""The planning page's Python runs as written."""

import re
import subprocess
import sys
from pathlib import Path

PLANNING = Path(__file__).parents[3] / "docs" / "planning.md"


def test_the_planning_example_runs(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", PLANNING.read_text(), flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sparse_shard 64" in done.stdout
    assert "E2E MFU" in done.stdout
