"""No tile of the matmuls with a norm is read by Hopper's matrix unit and by registers from one place in shared memory.

The compiler (Triton 3.6 to 3.9) gives such a tile one buffer too few: the copy of a later tile overwrites it while the
matrix unit, which works asynchronously, still reads. The results are wrong now and then, so only the code can tell.
"""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.compile

PROGRAM = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from gem_kernels._src.norm_linear.specs import compile_specs

for spec in compile_specs():
    if spec.targets != (90,) or "K512-N512" not in spec.id:
        continue
    names = spec.kernel.arg_names
    source = ASTSource(
        fn=spec.kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs=dict(spec.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sys.stdout.write(json.dumps({"id": spec.id, "code": kernel.asm["ttgir"]}) + chr(10))
"""
VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
DOT = re.compile(r"ttng\.warp_group_dot (%\w+), (%\w+),")
LOAD = re.compile(r"ttg\.local_load (%\w+)")


def readers(code):
    """Buffers in shared memory that products read, and those that registers are loaded from."""
    base, by_dot, by_registers = {}, set(), set()
    for line in code.splitlines():
        if view := VIEW.search(line):
            base[view[1]] = base.get(view[2], view[2])
        if dot := DOT.search(line):
            by_dot |= {base[operand] for operand in dot.groups() if operand in base}
        if load := LOAD.search(line):
            by_registers.add(base.get(load[1], load[1]))
    return by_dot, by_registers


@pytest.fixture(scope="module")
def kernels():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_products_share_no_buffer_with_registers(kernels):
    assert {kernel["id"].split("-")[0] for kernel in kernels} == {"rmsnorm_linear", "linear_norm"}
    for kernel in kernels:
        by_dot, by_registers = readers(kernel["code"])
        assert by_dot, kernel["id"]
        assert not by_dot & by_registers, kernel["id"]
