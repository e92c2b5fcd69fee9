"""What a person sees while a run trains."""

from __future__ import annotations

import io

from gem_train.progress import LineProgress


def test_a_line_without_values_has_no_gap() -> None:
    stream = io.StringIO()
    progress = LineProgress(4, 0, stream, seconds=0.0)
    progress.step(1)
    progress.values({"loss": 0.5, "NE": None, "samples/s": 1234.0})
    progress.step(4)
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 1/4  ETA 0:0")
    assert last == "step 4/4  loss 0.5000  samples/s 1,234  ETA 0:00"
