"""Every kernel variant that an op names compiles for sm_90 and sm_100 and fits shared memory and registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
OPS = {
    "block_attention",
    "column_sums",
    "gate",
    "gdpa",
    "gdpa_norm_block",
    "hat_columns",
    "jagged_attention",
    "join_columns",
    "layer_norm_rows",
    "mx",
    "norm_linear",
    "token_linear",
    "token_products",
    "transpose_tokens",
}


@pytest.fixture(scope="module")
def rows():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def describe(rows, *keys):
    return "\n".join(f"{r['op']} {r['id']} sm_{r['target']}: " + ", ".join(f"{k} {r[k]}" for k in keys) for r in rows)


def test_every_op_names_its_variants(rows):
    assert {row["op"] for row in rows} == OPS
    for op in OPS:
        for target in (90, 100):
            ids = [row["id"] for row in rows if row["op"] == op and row["target"] == target]
            assert ids, f"{op} names no variant for sm_{target}"
            assert len(ids) == len(set(ids)), f"{op} names a variant twice"


def test_variants_compile(rows):
    failed = [row for row in rows if "error" in row]
    assert not failed, describe(failed, "error")


def test_shared_memory_fits(rows):
    built = [row for row in rows if "error" not in row]
    too_large = [row for row in built if row["shared_bytes"] > SHARED_LIMIT[row["target"]]]
    assert not too_large, describe(too_large, "shared_bytes")


def test_registers_do_not_spill(rows):
    built = [row for row in rows if "error" not in row]
    spilling = [row for row in built if row["spill_bytes"] > row["max_spill_bytes"]]
    assert not spilling, describe(spilling, "spill_bytes", "max_spill_bytes", "registers")


def test_no_undefined_read(rows):
    built = [row for row in rows if "error" not in row and row["target"] == 90]
    faulty = [row for row in built if row.get("undefined_reads")]
    assert not faulty, describe(faulty, "undefined_reads")


def test_no_stray_descriptor(rows):
    built = [row for row in rows if "error" not in row and row["target"] == 90]
    faulty = [row for row in built if row.get("stray_descriptors")]
    assert not faulty, describe(faulty, "stray_descriptors")


def test_compile_time(rows):
    # Rows of a warm cache are near 0. A variant that takes longer than this has unrolled into registers it lacks.
    slow = [row for row in rows if row["seconds"] > 120]
    assert not slow, describe(slow, "seconds")
