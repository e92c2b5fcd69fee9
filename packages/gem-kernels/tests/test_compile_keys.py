"""What every kernel keeps to, read from its source: what selects a compiled variant, who tunes it, how it is launched.

Triton compiles anew for an integer argument that is 1 or becomes a multiple of 16, unless the kernel says that it must
not. A size of the batch among such arguments stalls a training step every time it happens to be one of those.
"""

import ast
import importlib
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import gem_kernels

SOURCE = Path(gem_kernels.__file__).parent

FIXED_BY_THE_MODEL = {"num_heads", "num_heads_kv", "K"}
FLOATS = {"scale", "scale_log2", "pre_scale", "post_scale", "dv_scale", "ds_scale", "out_scale", "eps"}
"""Triton does not specialise them."""
CONSTANT = {"one"}
"""The launcher always passes 1, as an argument so that the compiler does not see it."""


class KernelSource(NamedTuple):
    """A kernel as its file has it."""

    module: str
    function: ast.FunctionDef
    unspecialised: set[str]

    @property
    def runtime_arguments(self):
        """Names of the arguments that are no compile-time constants, pointers, descriptors or strides."""
        names = [
            argument.arg
            for argument in [*self.function.args.args, *self.function.args.kwonlyargs]
            if argument.annotation is None or not ast.unparse(argument.annotation).endswith("constexpr")
        ]
        return [name for name in names if not (name.endswith(("_ptr", "_desc")) or name.startswith("stride_"))]


def kernels():
    """Every function that a launcher starts: decorated by a jit, and named a kernel."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "jit" not in text:
            continue
        module = ".".join([SOURCE.name, *path.relative_to(SOURCE).with_suffix("").parts])
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_kernel"):
                continue
            for decorator in function.decorator_list:
                name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if name in ("triton.jit", "gluon.jit"):
                    options = decorator.keywords if isinstance(decorator, ast.Call) else []
                    lists = [option.value for option in options if option.arg == "do_not_specialize"]
                    namespace = vars(importlib.import_module(module))
                    unspecialised = {each for item in lists for each in eval(ast.unparse(item), namespace)}
                    yield KernelSource(module, function, unspecialised)


def test_no_size_of_a_batch_is_a_compile_key():
    found = list(kernels())
    assert {kernel.module.split(".")[2] for kernel in found} >= {
        "block_attention", "gdpa", "gdpa_norm_block", "jagged_attention", "mx", "norm_linear"
    }  # fmt: skip
    keys = {
        f"{kernel.module}.{kernel.function.name}: {name}"
        for kernel in found
        for name in kernel.runtime_arguments
        if name not in kernel.unspecialised | FIXED_BY_THE_MODEL | FLOATS | CONSTANT
    }
    assert not keys, f"name them in do_not_specialize, or in this test as what a model fixes: {sorted(keys)}"


def test_no_kernel_is_tuned_where_it_runs():
    """Ranks that time candidates by themselves choose other ones, whose results differ; here a table chooses."""
    for path in sorted(SOURCE.rglob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"autotune", "heuristics", "Autotuner"}, f"{path.name} tunes a kernel"


def test_programs_lie_along_the_one_axis_that_is_long_enough():
    """Axes y and z of a launch hold 65,535 programs; batches have more sequences, and some versions do not say so."""
    found = 0
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.program_id", "gl.program_id"):
                found += 1
                assert ast.unparse(call.args[0]) == "0", f"{path.name}, line {call.lineno}"
    assert found >= 10


class Recorder:
    """Takes the place of a kernel, launches nothing, and writes down what would select a compiled variant."""

    def __init__(self, source, keys):
        self.source, self.keys = source, keys
        self.names = [argument.arg for argument in source.function.args.args]

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **constants):
        given = zip(self.names, arguments, strict=False)
        kinds = tuple(self.kind(name, value) for name, value in given)
        # Activations are jit functions, which interpreted ones do not compare as.
        values = tuple((name, getattr(value, "__name__", value)) for name, value in constants.items())
        self.keys.add((self.source.function.name, kinds, values))

    def kind(self, name, value):
        """What Triton looks at: of a pointer its type and whether it is aligned, of an integer its width and value."""
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if not isinstance(value, int) or isinstance(value, bool):
            return None if value is None else type(value).__name__
        wide = value >= 2**31
        return (wide,) if name in self.source.unspecialised else (wide, value == 1, value % 16 == 0)


@pytest.fixture
def record(monkeypatch):
    """Puts recorders in the place of an op's kernels; returns the set of keys that they see."""

    def start(op):
        keys = set()
        for source in kernels():
            if source.module.split(".")[2] == op and source.function.args.args[0].arg.endswith("_ptr"):
                monkeypatch.setattr(f"{source.module}.{source.function.name}", Recorder(source, keys))
        return keys

    return start


def random_batch(draw):
    """(q, k, v, offsets and bounds of both sides) of 1 to 300 sequences of up to 4,096 rows, nothing filled in."""
    num_sequences = draw.randint(1, 300)
    sides = []
    for _ in range(2):
        longest = int(2 ** draw.uniform(0, 12))
        lengths = torch.tensor([draw.randint(0, longest) for _ in range(num_sequences)])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        sides.append((offsets, int(lengths.max())))
    (offsets_q, max_q), (offsets_k, max_k) = sides
    q = torch.empty(int(offsets_q[-1]), 4, 128, dtype=torch.bfloat16)
    k, v = (torch.empty(int(offsets_k[-1]), 4, 128, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, (offsets_q, offsets_k, max_q, max_k)


VARIANTS = {"gdpa": 48, "jagged_attention": 48}
"""What 200 random batches of one model may compile at most, forward and backward; the README says so."""


@pytest.mark.parametrize("op", VARIANTS)
def test_200_random_batches_compile_at_most_a_stated_number_of_variants(op, record, interpreter):
    forward, backward = (importlib.import_module(f"gem_kernels._src.{op}.{name}") for name in ("forward", "backward"))
    keys = record(op)
    draw = random.Random(0)
    for _ in range(200):
        q, k, v, sizes = random_batch(draw)
        if op == "gdpa":
            options = (*sizes, "silu", 1.0, 1.0, -1, -1)
            saved = (forward.launch_forward(q, k, v, *options), q, k, v)
        else:
            options = (*sizes, 1.0, -1, -1)
            out, lse = forward.launch_forward(q, k, v, *options)
            saved = (out, None, q, k, v, out, lse)
        backward.launch_backward(*saved, *options)
    kernels_seen = {name for name, *_ in keys}
    assert len(kernels_seen) >= 3
    assert len(keys) <= VARIANTS[op]
