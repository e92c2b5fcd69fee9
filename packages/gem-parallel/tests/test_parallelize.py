"""Plans: unit selection, and refusals that need no process group."""

import sys

import pytest
import torch
from param_wires import ByteWire
from torch import nn

from gem_parallel import ParallelDims, ParallelPlan, parallelize
from gem_parallel._src.fsdp import defer_all_reduce, inner_first, load_wire_hooks, running_order


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)


def model():
    return nn.ModuleDict({"tower": nn.ModuleList([Block(), Block()]), "head": nn.Linear(2, 1)})


@pytest.mark.parametrize(
    ("patterns", "running", "wrapping"),
    [
        pytest.param(
            ("tower.*.inner",), ["tower.0.inner", "tower.1.inner"], ["tower.0.inner", "tower.1.inner"], id="glob"
        ),
        pytest.param(("head", "tower.0"), ["head", "tower.0"], ["tower.0", "head"], id="by pattern"),
        pytest.param(("tower.[01]", "tower.1"), ["tower.0", "tower.1"], ["tower.0", "tower.1"], id="matched twice"),
        pytest.param((), [], [], id="root only"),
        pytest.param(
            ("tower.1", "tower.1.*"),
            ["tower.1", "tower.1.inner", "tower.1.outer"],
            ["tower.1.inner", "tower.1.outer", "tower.1"],
            id="nested",
        ),
    ],
)
def test_units(patterns, running, wrapping):
    assert running_order(model(), patterns) == running
    assert inner_first(model(), running) == wrapping


def test_unmatched_pattern_is_an_error():
    with pytest.raises(ValueError, match=r"parallelize: every pattern .* got 'towr\.\*', which matches none of"):
        running_order(model(), ("tower.*", "towr.*"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"shard_units": "tower.*"}, TypeError, "must be a tuple of patterns, got str"),
        ({"shard_units": (1,)}, TypeError, "must hold str, got int"),
        ({"shard_units": ("",)}, ValueError, "must name modules below the root, got ''; it is one"),
        ({"shard_units": (), "param_dtype": torch.int8}, ValueError, "`param_dtype` must be a floating point"),
        ({"shard_units": (), "reduce_dtype": "bf16"}, ValueError, "`reduce_dtype` must be a floating point"),
        ({"shard_units": (), "forward_prefetch": -1}, ValueError, "`forward_prefetch` must be at least 0, got -1"),
        ({"shard_units": (), "backward_prefetch": True}, TypeError, "`backward_prefetch` must be an int, got bool"),
        ({"shard_units": (), "reshard_after_forward": 1}, ValueError, "must be at least 2 ranks, got 1; False keeps"),
        ({"shard_units": (), "reshard_after_forward": "no"}, TypeError, "must be a bool, an int or None, got str"),
        ({"shard_units": (), "param_wire": "mxfp8"}, TypeError, "got str without name, dtypes, rows_per_block, covers"),
        ({"shard_units": (), "param_wire": ByteWire}, TypeError, r"got the class ByteWire; pass ByteWire\(\)"),
        (
            {"shard_units": (), "param_wire": ByteWire(), "reshard_after_forward": 2},
            ValueError,
            "`reshard_after_forward` must be a bool or None with a `param_wire`, .* got 2; pass True",
        ),
    ],
)
def test_plan_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        ParallelPlan(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dp_shard": 0}, ValueError, "`dp_shard` must be at least 1, got 0"),
        ({"dp_shard": 2.0}, TypeError, "`dp_shard` must be an int, got float"),
        ({"dp_replicate": 2, "dp_shard": 3}, ValueError, r"`sparse_shard` must equal .* got 1; pass sparse_shard=6"),
    ],
)
def test_dims_refuse(arguments, error, text):
    with pytest.raises(error, match=text):
        ParallelDims(**arguments)


def test_dims_for_world():
    assert ParallelDims.for_world(8) == ParallelDims(dp_shard=8, sparse_shard=8)
    dims = ParallelDims.for_world(8, dp_replicate=2)
    assert (dims.dp_replicate, dims.dp_shard, dims.sparse_shard, dims.world_size) == (2, 4, 8, 8)
    with pytest.raises(ValueError, match=r"positive multiple of dp_replicate \(3\), got 8"):
        ParallelDims.for_world(8, dp_replicate=3)


def test_build_mesh_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"build_mesh: torch\.distributed must be initialised"):
        ParallelDims().build_mesh("cpu")
    with pytest.raises(ValueError, match="`device_type` must be 'cpu' or 'cuda', got 'tpu'"):
        ParallelDims().build_mesh("tpu")


def test_a_torch_that_the_hooks_do_not_fit_is_refused_by_its_version(monkeypatch):
    load_wire_hooks("parallelize")
    monkeypatch.setitem(sys.modules, "gem_parallel._src.wired_param", None)
    with pytest.raises(
        RuntimeError, match=r"parallelize: `plan\.param_wire` needs FSDP2 as torch 2\.11 to .* got torch"
    ):
        load_wire_hooks("parallelize")


PLAN = ParallelPlan(shard_units=())
REFUSED = {
    "module": (
        lambda: parallelize(3, PLAN, None),
        "parallelize: `module` must be an nn.Module, got int; pass the model",
    ),
    "plan": (lambda: parallelize(model(), {"shard_units": ()}, None), "`plan` must be a ParallelPlan, got dict; pass"),
    "mesh": (lambda: parallelize(model(), PLAN, 2), "`mesh` must be a ParallelMesh, got int; pass what ParallelDims"),
    "no mesh": (lambda: parallelize(model(), PLAN, None), "`mesh` must be a ParallelMesh, got NoneType"),
    "deferred": (lambda: defer_all_reduce(3).__enter__(), "defer_all_reduce: `module` must be an nn.Module, got int"),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_other_kinds(call, text):
    with pytest.raises(TypeError, match=text):
        call()
