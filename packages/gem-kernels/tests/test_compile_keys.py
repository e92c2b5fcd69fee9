"""What every kernel keeps to, read from its source: what selects a compiled variant, who tunes it, how it is launched.

Triton compiles anew for an integer argument that is 1 or becomes a multiple of 16, unless the kernel says that it must
not. A size of the batch among such arguments stalls a training step every time it happens to be one of those.
"""

import ast
import importlib
from pathlib import Path
from typing import NamedTuple

import gem_kernels

SOURCE = Path(gem_kernels.__file__).parent

FIXED_BY_THE_MODEL = {"num_heads", "num_heads_kv", "K"}
FLOATS = {"scale", "scale_log2", "pre_scale", "post_scale", "dv_scale", "ds_scale", "eps"}
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
