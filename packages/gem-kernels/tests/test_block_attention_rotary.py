"""The rotary encoding inside block_attention against the float64 loop: CPU kernel, interpreted kernels, CUDA."""

import os
from dataclasses import dataclass

import pytest
import torch

from gem_kernels import block_attention
from gem_kernels._src.block_attention.op import block_attention_backward_op, block_attention_op
from gem_kernels._src.block_attention.rotary import rotate
from gem_kernels.reference import block_attention as reference
from gem_kernels.reference import block_attention_backward as reference_backward
from gem_kernels.testing import DEGENERATE_LENGTHS, assert_matches_oracle, assert_rms, attention_inputs

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
NAMES = ("out", "dq", "dk", "dv")


def make_table(total, dim, dtype=torch.float32, seed=0):
    """Angles of time gaps: irregular, growing from row to row, another rate for every pair of channels."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(total, generator=generator, dtype=torch.float64).cumsum(0)
    angles = times[:, None] * torch.logspace(0, -2, dim // 2, dtype=torch.float64)
    return torch.cat([angles.sin(), angles.cos()], 1).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    lengths: tuple[int, ...]
    block_size: int = 64
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 16
    contiguous: bool = True
    table_dtype: torch.dtype | None = torch.float32
    """None: that of the inputs."""

    def inputs(self, dtype, device="cpu"):
        x = attention_inputs(
            self.lengths,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            contiguous=self.contiguous,
        )
        return x, make_table(x.q.shape[0], self.head_dim, self.table_dtype or dtype).to(device)


CASES = [
    Case(id="edges", lengths=DEGENERATE_LENGTHS),
    Case(id="edges-32", lengths=(0, 1, 31, 32, 33, 65), block_size=32),
    Case(id="edges-128", lengths=(127, 0, 129, 1), block_size=128),
    Case(id="empty", lengths=(0, 0)),
    Case(id="grouped", lengths=(65, 0, 20), num_heads=6, num_heads_kv=2),
    Case(id="odd-dim", lengths=(65, 20), head_dim=24),
    Case(id="one-pair", lengths=(65, 20), head_dim=2),
    Case(id="strided", lengths=(65, 0, 20), contiguous=False),
    Case(id="own-dtype", lengths=(65, 0, 20), table_dtype=None),
    Case(id="chunks", lengths=(40, 33), block_size=32, head_dim=256, num_heads=1, num_heads_kv=1),
]
ids = [case.id for case in CASES]


def oracle(case, inputs, dtype=torch.float64):
    x, table = inputs
    x, table = x.to("cpu", dtype), table.cpu()
    options = {"offsets": x.offsets_q, "block_size": case.block_size, "rotary": table}
    return reference(x.q, x.k, x.v, **options), *reference_backward(x.do, x.q, x.k, x.v, **options)


def run_op(case, inputs, function=block_attention):
    x, table = inputs
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = function(*leaves, offsets=x.offsets_q, max_seqlen=x.max_seqlen_q, block_size=case.block_size, rotary=table)
    return (out.detach(), *torch.autograd.grad(out, leaves, x.do))


def run_kernels(case, inputs, forward, backward):
    x, table = inputs
    arguments = (x.q, x.k, x.v, x.offsets_q, case.block_size, x.q.shape[2] ** -0.5, table)
    return forward(*arguments), *backward(x.do, *arguments)


def assert_all_match(results, case, inputs, *, factor=2.0, floor=None):
    dtype = inputs[0].q.dtype
    for name, actual, exact, eager in zip(
        NAMES, results, oracle(case, inputs), oracle(case, inputs, dtype), strict=True
    ):
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        if dtype == torch.float64:
            torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
        else:
            assert_matches_oracle(name, actual, exact, eager, factor=factor, floor=floor, offsets=inputs[0].offsets_q)
        if dtype == torch.bfloat16:
            # Rotated inputs are rounded once more than inputs that stay as they are.
            assert_rms(name, actual, exact, ratio=8e-3)


# As in test_block_attention: this route subtracts a stored log-sum-exp.
FLOAT32_ROUTE = {"factor": 3.0, "floor": 16 * torch.finfo(torch.float32).eps}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_matches_reference(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_op(case, inputs), case, inputs)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_tile_kernels_match_reference(case, dtype):
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    inputs = case.inputs(dtype)
    assert_all_match(run_kernels(case, inputs, launch_tile_forward, launch_tile_backward), case, inputs)


@interpreted
@pytest.mark.parametrize("case", CASES[:5], ids=ids[:5])
def test_interpreted_float32_route_matches_reference(case):
    from gem_kernels._src.block_attention.backward import launch_backward
    from gem_kernels._src.block_attention.forward import launch_forward

    inputs = case.inputs(torch.float32)
    assert_all_match(run_kernels(case, inputs, launch_forward, launch_backward), case, inputs, **FLOAT32_ROUTE)


def test_reference_backward_is_the_gradient_of_the_reference():
    case = CASES[0]
    x, table = inputs = case.inputs(torch.float64)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    expected = torch.autograd.grad(reference(*leaves, offsets=x.offsets_q, rotary=table), leaves, x.do)
    for actual, wanted in zip(oracle(case, inputs)[1:], expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    x, table = Case(id="", lengths=(0, 1, 33, 5), head_dim=4).inputs(torch.float64)
    torch.autograd.gradcheck(
        lambda q, k, v: block_attention(q, k, v, offsets=x.offsets_q, max_seqlen=33, block_size=32, rotary=table),
        [t.requires_grad_() for t in (x.q, x.k, x.v)],
    )


def test_rotation_turns_pairs_and_turns_back():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    table = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)  # a quarter turn, then none
    assert rotate(x, table).tolist() == [[[0.0, 1.0, 0.0, 2.0]]]
    x, table = torch.randn(7, 3, 8, dtype=torch.float64), make_table(7, 8, torch.float64)
    torch.testing.assert_close(rotate(rotate(x, table), table, inverse=True), x, rtol=1e-14, atol=1e-14)


def test_scores_depend_on_differences_of_angles_only():
    case = Case(id="", lengths=(50,))
    x, _ = case.inputs(torch.float64)
    angles = torch.rand(50, 8, dtype=torch.float64).cumsum(0)
    shifted = angles + torch.rand(8, dtype=torch.float64)
    # The values turn by the shift too: the outputs agree once that is undone.
    first, second = (
        block_attention(x.q, x.k, x.v, offsets=x.offsets_q, max_seqlen=50, rotary=torch.cat([a.sin(), a.cos()], 1))
        for a in (angles, shifted)
    )
    delta = (shifted - angles).contiguous()
    second = rotate(second, torch.cat([delta.sin(), delta.cos()], 1), inverse=True)
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)


def test_table_of_no_turn_changes_nothing():
    case = CASES[0]
    x, table = case.inputs(torch.float32)
    table[:, :8], table[:, 8:] = 0.0, 1.0
    plain = block_attention(x.q, x.k, x.v, offsets=x.offsets_q, max_seqlen=65)
    assert torch.equal(plain, block_attention(x.q, x.k, x.v, offsets=x.offsets_q, max_seqlen=65, rotary=table))


def assert_no_leak(run, inputs, value):
    """Write ``value`` into the angles of the first block of sequence 1; nothing outside it may change by a bit."""
    x, table = inputs
    before = run(inputs)
    start = int(x.offsets_q[1])
    table[start : start + 64] = value
    after = run(inputs)
    outside = torch.ones(x.q.shape[0], dtype=torch.bool)
    outside[start : start + 64] = False
    for name, a, b in zip(NAMES, before, after, strict=True):
        assert torch.equal(a[outside], b[outside]), name
        assert not torch.equal(a[~outside], b[~outside]), name


LEAK = Case(id="leak", lengths=(70, 130, 0, 5))


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_angle_reaches_another_block(value):
    assert_no_leak(lambda inputs: run_op(LEAK, inputs), LEAK.inputs(torch.float32), value)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_angle_reaches_another_block_in_the_kernels(value):
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    assert_no_leak(
        lambda inputs: run_kernels(LEAK, inputs, launch_tile_forward, launch_tile_backward),
        LEAK.inputs(torch.float32),
        value,
    )


# ---------------------------------------------------------------- as an op


@pytest.mark.parametrize("lengths", [(0, 1, 65), (0, 0)], ids=["edges", "empty"])
def test_opcheck(lengths):
    x, table = Case(id="", lengths=lengths).inputs(torch.float32)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    torch.library.opcheck(block_attention_op, (q, k, v, x.offsets_q, 65, 64, 0.25, False, table))
    tensors = [t.detach() for t in (x.do, q, k, v)]
    torch.library.opcheck(block_attention_backward_op, (*tensors, x.offsets_q, 64, 0.25, table))


X = torch.zeros(6, 2, 16)
BAD = [
    ({"rotary": [1.0]}, TypeError, "`rotary` must be a Tensor or None, got list"),
    ({"rotary": torch.zeros(6, 8)}, ValueError, r"`rotary` must have shape \(T, D\) = \(6, 16\), .* got \(6, 8\)"),
    ({"rotary": torch.zeros(5, 16)}, ValueError, r"`rotary` must have shape \(T, D\) = \(6, 16\), .* got \(5, 16\)"),
    ({"rotary": torch.zeros(6, 16).half()}, TypeError, "`rotary` must be float32 or have the dtype of `q`"),
    ({"rotary": torch.zeros(6, 16, requires_grad=True)}, ValueError, r"`rotary` gets no gradient.*rotary\.detach\(\)"),
    ({"v": torch.zeros(6, 2, 8)}, ValueError, "`rotary` rotates `v` too: its head dim must be that of `q`, 16, got 8"),
    ({"q": X[..., :15], "k": X[..., :15]}, ValueError, "the head dim of `q` must be even, got 15"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_bad_input_is_named(change, error, message):
    good = {"q": X, "k": X, "v": X, "rotary": torch.zeros(6, 16)}
    with pytest.raises(error, match=f"block_attention: .*{message}"):
        block_attention(**(good | change), offsets=torch.tensor([0, 2, 6]), max_seqlen=4)


# ---------------------------------------------------------------- CUDA

GPU_CASES = [
    *CASES,
    *(
        Case(id=f"block{block_size}-D{dim}", lengths=(0, 1, 63, 64, 65, 129, 300), block_size=block_size, head_dim=dim)
        for block_size in (32, 64, 128)
        for dim in (32, 64, 96, 128, 256)
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=[case.id for case in GPU_CASES])
def test_cuda_matches_reference(case, dtype):
    tolerance = FLOAT32_ROUTE if dtype == torch.float32 else {}
    assert_all_match(run_op(case, case.inputs(dtype, "cuda")), case, case.inputs(dtype), **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_repeats_compiles_and_does_not_wait(dtype):
    case = Case(id="", lengths=(0, 70, 3, 500), head_dim=64)
    inputs = case.inputs(dtype, "cuda")
    expected = run_op(case, inputs)
    compiled = torch.compile(block_attention, fullgraph=True)
    for function in (block_attention, compiled):
        for actual, wanted in zip(run_op(case, inputs, function), expected, strict=True):
            assert torch.equal(actual, wanted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_op(case, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
