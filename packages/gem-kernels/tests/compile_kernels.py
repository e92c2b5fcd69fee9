"""Compile every kernel variant that the ops name, for GPUs that need not be here; one JSON line per variant on stdout.

Arguments, if any, are the ops to compile: ``python tests/compile_kernels.py block_attention``.
Run in a process of its own: once triton is imported for its interpreter, it compiles nothing.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import sass
from assembler_faults import stray_descriptors, undefined_reads

MAX_WORKERS = 8


def modules_with_specs() -> Iterator[tuple[str, object]]:
    """(op, module) of every ``gem_kernels._src.<op>`` module that offers ``compile_specs``."""
    import gem_kernels._src as root

    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if info.ispkg:
            continue
        module = importlib.import_module(info.name)
        function = getattr(module, "compile_specs", None)
        if function is not None and function.__module__ == info.name:
            yield info.name.removeprefix(f"{root.__name__}.").split(".")[0], module


def resources(cubin: bytes, cuobjdump: str) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([cuobjdump, "-res-usage", str(path)], check=True, capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout + text.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text.stdout}{text.stderr}")
    return int(found[1]), int(found[2])


def machine_code(cubin: bytes, nvdisasm: str) -> list[sass.Instruction]:
    """The instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([nvdisasm, "-c", file.name], check=True, capture_output=True, text=True).stdout
    return sass.instructions(listing)


def compile_spec(module_name: str, index: int) -> list[dict[str, object]]:
    """One row per target of a module's ``index``-th variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.import_module(module_name).compile_specs()[index]
    names = spec.kernel.arg_names
    source_type = ASTSource
    if spec.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(
        spec.kernel,
        {name: spec.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    # Triton puts more into the descriptors of these than the check knows, for head dims above 128.
    is_portable_attention = any(f".{op}." in module_name for op in ("gdpa", "jagged_attention"))
    rows = []
    for target in spec.targets:
        row: dict[str, object] = {"id": spec.id, "target": target, "max_spill_bytes": spec.max_spill_bytes}
        start = time.perf_counter()
        try:
            kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
            row["shared_bytes"] = kernel.metadata.shared
            cubin = kernel.asm["cubin"]
            row["registers"], row["spill_bytes"] = resources(cubin, triton.knobs.nvidia.cuobjdump.path)
            if target == 90 and (spec.kernel.is_gluon() or not is_portable_attention):
                code = machine_code(cubin, triton.knobs.nvidia.nvdisasm.path)
                row["undefined_reads"] = undefined_reads(code)
                row["stray_descriptors"] = stray_descriptors(code)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        row["seconds"] = round(time.perf_counter() - start, 3)
        rows.append(row)
    return rows


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    # What Triton 3.9 does when it is unset, without its warning.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    chosen = sys.argv[1:]
    modules = [(op, module) for op, module in modules_with_specs() if not chosen or op in chosen]
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    # Not forked: the parent has imported torch, whose threads do not survive one.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [
            (op, pool.submit(compile_spec, module.__name__, index))
            for op, module in modules
            for index in range(len(module.compile_specs()))
        ]
        for op, future in work:
            for row in future.result():
                sys.stdout.write(json.dumps({"op": op, **row}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
