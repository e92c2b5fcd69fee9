"""block_attention against its float64 reference: CPU kernel, interpreted Triton kernels, CUDA."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import block_attention, jagged_attention
from gem_kernels._src.block_attention.blocks import block_offsets, num_pairs, num_slots
from gem_kernels._src.block_attention.op import block_attention_backward_op, block_attention_op
from gem_kernels.modules import BlockAttention
from gem_kernels.reference import block_attention as reference
from gem_kernels.reference import block_attention_backward as reference_backward
from gem_kernels.testing import (
    DEGENERATE_LENGTHS,
    assert_matches_oracle,
    assert_rms,
    attention_inputs,
    make_offsets,
    random_lengths,
)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    lengths: tuple[int, ...]
    block_size: int = 64
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    scale: float | None = None
    contiguous: bool = True
    offsets_dtype: torch.dtype = torch.int64

    def inputs(self, dtype, device="cpu"):
        return attention_inputs(
            self.lengths,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=dtype,
            offsets_dtype=self.offsets_dtype,
            device=device,
            contiguous=self.contiguous,
        )


CASES = [
    Case(id="edges", lengths=DEGENERATE_LENGTHS),
    Case(id="edges-32", lengths=(0, 1, 31, 32, 33, 64, 65), block_size=32),
    Case(id="edges-128", lengths=(127, 0, 128, 129, 1), block_size=128),
    Case(id="all-empty", lengths=(0, 0, 0)),
    Case(id="no-sequences", lengths=()),
    Case(id="one-token", lengths=(1,)),
    Case(id="outlier", lengths=(2, 0, 330, 0, 0, 5)),
    Case(id="empty-ends", lengths=(0, 0, 64, 0, 64, 0)),
    Case(id="scale", lengths=(70, 3), scale=0.7),
    Case(id="grouped", lengths=(65, 0, 20), num_heads=6, num_heads_kv=2),
    Case(id="one-key-head", lengths=(65, 0, 20), num_heads=4, num_heads_kv=1, head_dim=32, head_dim_v=16),
    Case(id="odd-dims", lengths=(65, 20), head_dim=24, head_dim_v=40),
    Case(id="strided", lengths=(65, 0, 20), contiguous=False, num_heads=4),
    Case(id="int32", lengths=(65, 0, 20), offsets_dtype=torch.int32),
    Case(id="wide", lengths=(40, 33), head_dim=256, head_dim_v=256, block_size=32, num_heads=1, num_heads_kv=1),
]
ids = [case.id for case in CASES]


def oracle(inputs, case, dtype=torch.float64):
    """(out, dq, dk, dv) of the reference in ``dtype`` on the CPU."""
    x = inputs.to("cpu", dtype)
    options = {"offsets": x.offsets_q, "block_size": case.block_size, "scale": case.scale}
    return (reference(x.q, x.k, x.v, **options), *reference_backward(x.do, x.q, x.k, x.v, **options))


# float32 on CUDA takes its probabilities in the backward from a stored log-sum-exp, whose rounding error grows with the
# scores, and subtracts sums of products that were rounded one by one: a block of one token has a gradient of a few
# units of rounding where the exact one is 0.
FLOAT32_ROUTE = {"factor": 3.0, "floor": 16 * torch.finfo(torch.float32).eps}


def run_op(inputs, case, function=block_attention):
    """(out, dq, dk, dv) through autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = function(
        q,
        k,
        v,
        offsets=inputs.offsets_q,
        max_seqlen=inputs.max_seqlen_q,
        block_size=case.block_size,
        scale=case.scale,
    )
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.do))


def run_kernels(inputs, case, forward, backward):
    """(out, dq, dk, dv) of the launchers, on whatever device the tensors are."""
    scale = inputs.q.shape[2] ** -0.5 if case.scale is None else case.scale
    args = (inputs.q, inputs.k, inputs.v, inputs.offsets_q, case.block_size, scale)
    return forward(*args), *backward(inputs.do, *args)


def assert_all_match(results, inputs, case, *, factor=2.0, floor=None):
    dtype = inputs.q.dtype
    offsets = inputs.offsets_q.cpu()
    for name, result, exact, eager in zip(
        NAMES, results, oracle(inputs, case), oracle(inputs, case, dtype), strict=True
    ):
        assert result.dtype == dtype, name
        assert result.is_contiguous(), name
        if dtype == torch.float64:
            # The reference in its own dtype has no error to compare with.
            torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)
        else:
            assert_matches_oracle(name, result, exact, eager, factor=factor, floor=floor, offsets=offsets)
        if dtype == torch.bfloat16:
            assert_rms(name, result, exact, ratio=5e-3)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_matches_reference(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_op(inputs, case), inputs, case)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_tile_kernels_match_reference(case, dtype):
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    inputs = case.inputs(dtype)
    assert_all_match(run_kernels(inputs, case, launch_tile_forward, launch_tile_backward), inputs, case)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_float32_route_matches_reference(case):
    from gem_kernels._src.block_attention.backward import launch_backward
    from gem_kernels._src.block_attention.forward import launch_forward

    inputs = case.inputs(torch.float32)
    assert_all_match(run_kernels(inputs, case, launch_forward, launch_backward), inputs, case, **FLOAT32_ROUTE)


@interpreted
@pytest.mark.parametrize("head_dim", [128, 96])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_interpreted_kernels_in_several_chunks(block_size, head_dim):
    """float16 at these sizes splits the head into chunks in the backward of 128-token blocks, and masks D = 96."""
    from gem_kernels._src.block_attention.backward import launch_backward
    from gem_kernels._src.block_attention.forward import launch_forward

    case = Case(id="", lengths=(block_size + 3,), block_size=block_size, head_dim=head_dim, head_dim_v=head_dim)
    inputs = case.inputs(torch.float16)
    assert_all_match(run_kernels(inputs, case, launch_forward, launch_backward), inputs, case)


def test_gradcheck():
    inputs = attention_inputs((0, 1, 33, 5), num_heads=2, num_heads_kv=1, head_dim=3, head_dim_v=2, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    torch.autograd.gradcheck(
        lambda q, k, v: block_attention(q, k, v, offsets=inputs.offsets_q, max_seqlen=33, block_size=32), tensors
    )


def test_reference_backward_is_the_gradient_of_the_reference():
    case = Case(id="", lengths=(0, 70, 5), num_heads=4)
    inputs = case.inputs(torch.float64)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = reference(*tensors, offsets=inputs.offsets_q)
    expected = torch.autograd.grad(out, tensors, inputs.do)
    for actual, wanted in zip(oracle(inputs, case)[1:], expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_is_jagged_attention_over_the_blocks(block_size):
    inputs = attention_inputs((0, 1, 63, 200, 65, 128), dtype=torch.float64)
    offsets = block_offsets(inputs.offsets_q, inputs.q.shape[0], block_size)
    expected = jagged_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        offsets_q=offsets,
        offsets_k=offsets,
        max_seqlen_q=block_size,
        max_seqlen_k=block_size,
    )
    actual = block_attention(
        inputs.q, inputs.k, inputs.v, offsets=inputs.offsets_q, max_seqlen=200, block_size=block_size
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("seed", range(5))
def test_block_offsets_cut_every_sequence_from_its_own_start(block_size, seed):
    lengths = random_lengths(40, 300, sparsity=0.3, seed=seed) * (torch.arange(40) % 3 != seed % 3)
    offsets = make_offsets(lengths)
    total = int(offsets[-1])
    expected = [0]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        expected += [min(row + block_size, stop) for row in range(start, stop, block_size)]
    actual = block_offsets(offsets, total, block_size)
    assert actual.shape == (num_slots(total, 40, block_size) + 1,)
    assert torch.unique_consecutive(actual).tolist() == expected
    assert torch.diff(actual).max() <= block_size
    assert num_pairs(offsets, total, block_size) == int(torch.diff(actual).square().sum())


# ---------------------------------------------------------------- safety


@pytest.fixture
def nan_in_new_memory():
    """Fills what ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_reads_nothing_it_did_not_write():
    case = next(case for case in CASES if case.id == "strided")
    inputs = case.inputs(torch.float32)
    assert_all_match(run_op(inputs, case), inputs, case)


@interpreted
@pytest.mark.usefixtures("nan_in_new_memory")
def test_interpreted_kernels_read_nothing_they_did_not_write():
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    case = next(case for case in CASES if case.id == "strided")
    inputs = case.inputs(torch.float32)
    assert_all_match(run_kernels(inputs, case, launch_tile_forward, launch_tile_backward), inputs, case)


def assert_no_leak(run, inputs, value):
    """Write ``value`` into the first block of sequence 1; nothing outside that block may change by a bit."""
    before = run(inputs)
    start = int(inputs.offsets_q[1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x[start : start + 64] = value
    after = run(inputs)
    outside = torch.ones(inputs.q.shape[0], dtype=torch.bool)
    outside[start : start + 64] = False
    for name, x, y in zip(NAMES, before, after, strict=True):
        assert torch.equal(x[outside], y[outside]), name
        assert not torch.equal(x[~outside], y[~outside]), name


LEAK = Case(id="leak", lengths=(70, 130, 0, 5, 64))


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
def test_no_value_reaches_another_block(value):
    assert_no_leak(lambda x: run_op(x, LEAK), LEAK.inputs(torch.float32), value)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_value_reaches_another_block_in_the_kernels(value):
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    assert_no_leak(
        lambda x: run_kernels(x, LEAK, launch_tile_forward, launch_tile_backward), LEAK.inputs(torch.float32), value
    )


def test_large_scores_do_not_overflow():
    case = Case(id="", lengths=(70,), scale=1.0)
    inputs = case.inputs(torch.float32)
    inputs.q.mul_(100)
    inputs.k.mul_(100)
    assert_all_match(run_op(inputs, case), inputs, case)


# ---------------------------------------------------------------- as an op


@pytest.mark.parametrize("lengths", [(0, 1, 63, 64, 65), (0, 0)], ids=["edges", "empty"])
def test_opcheck(lengths):
    inputs = attention_inputs(lengths, num_heads=4, num_heads_kv=2, head_dim_v=8)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    torch.library.opcheck(block_attention_op, (q, k, v, inputs.offsets_q, 65, 64, 0.25, False))
    tensors = [x.detach() for x in (inputs.do, q, k, v)]
    torch.library.opcheck(block_attention_backward_op, (*tensors, inputs.offsets_q, 64, 0.25))


def test_compiles_as_one_graph_and_for_all_batch_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block_attention, fullgraph=True, backend=counter)
    for seed in range(12):
        case = Case(id="", lengths=tuple(random_lengths(3 + seed, 40 + 7 * seed, sparsity=0.4, seed=seed).tolist()))
        inputs = case.inputs(torch.float32)
        for x, y in zip(run_op(inputs, case, compiled), run_op(inputs, case), strict=True):
            assert torch.equal(x, y)
    # One graph for the first batch, one for sizes that vary.
    assert counter.frame_count <= 2


def test_flops_count_true_pairs():
    case = Case(id="", lengths=(0, 1, 70, 64), num_heads=4, head_dim=8, head_dim_v=16, num_heads_kv=2)
    inputs = case.inputs(torch.float32)
    pairs = 1 + 64**2 + 6**2 + 64**2
    with FlopCounterMode(display=False) as counter:
        run_op(inputs, case)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["gem_kernels.block_attention"] == 2 * 4 * pairs * (8 + 16)
    assert counts["gem_kernels.block_attention_backward"] == 2 * 4 * pairs * (3 * 8 + 2 * 16)


def test_flops_of_tensors_without_data_assume_equal_lengths():
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x = torch.empty(200, 2, 16)
        block_attention(x, x, x, offsets=torch.empty(3, dtype=torch.int64), max_seqlen=150)
    assert counter.get_total_flops() == 4 * 2 * 16 * 2 * (64**2 + 36**2)


def test_meta_tensors_have_shapes_gradients_and_flops():
    x = torch.empty(200, 2, 16, device="meta", requires_grad=True)
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        block_attention(x, x, x, offsets=offsets, max_seqlen=150).sum().backward()
    assert x.grad.shape == x.shape
    assert counter.get_total_flops() == 3.5 * 4 * 2 * 16 * 2 * (64**2 + 36**2)


def test_module_is_the_function():
    inputs = attention_inputs((65, 3))
    module = BlockAttention(block_size=32, scale=0.5)
    options = {"offsets": inputs.offsets_q, "max_seqlen": 65}
    actual = module(inputs.q, inputs.k, inputs.v, **options)
    assert torch.equal(actual, block_attention(inputs.q, inputs.k, inputs.v, block_size=32, scale=0.5, **options))
    assert not list(module.parameters())
    assert repr(module) == "BlockAttention(block_size=32, scale=0.5)"


# ---------------------------------------------------------------- bad input

X = torch.zeros(6, 2, 16)
GOOD = {"q": X, "k": X, "v": X, "offsets": torch.tensor([0, 2, 6]), "max_seqlen": 4}
BAD = [
    ({"q": torch.zeros(6, 32)}, ValueError, r"`q` must have shape \(T, H, D\), got \(6, 32\)"),
    ({"q": [1.0]}, TypeError, "`q` must be a Tensor, got list"),
    ({"q": X.long()}, TypeError, "`q` must be a floating point tensor, got torch.int64"),
    ({"k": X.double()}, TypeError, "`k` must have the dtype of `q`"),
    ({"k": torch.zeros(5, 2, 16)}, ValueError, "`k` must have as many rows as `q`, 6, got 5"),
    ({"v": torch.zeros(5, 2, 16)}, ValueError, "`v` must have as many rows as `q`, 6, got 5"),
    ({"k": torch.zeros(6, 2, 8)}, ValueError, "`k` must have the head dim of `q`, 16, got 8"),
    ({"v": torch.zeros(6, 1, 16)}, ValueError, "`v` must have as many heads as `k`, 2, got 1"),
    ({"q": torch.zeros(6, 3, 16)}, ValueError, "heads of `k` must divide the heads of `q`, got 2 and 3"),
    ({"offsets": torch.tensor([[0, 6]])}, ValueError, r"`offsets` must have shape \(B \+ 1,\)"),
    ({"offsets": torch.tensor([0.0, 6.0])}, TypeError, "`offsets` must be int32 or int64, got torch.float32"),
    ({"offsets": torch.tensor([1, 2, 6])}, ValueError, "`offsets` must start at 0, got 1"),
    ({"offsets": torch.tensor([0, 2, 5])}, ValueError, "`offsets` must end at the number of packed rows, 6, got 5"),
    ({"offsets": torch.tensor([0, 4, 2, 6])}, ValueError, "`offsets` must not decrease, got 4 then 2 at sequence 1"),
    ({"max_seqlen": 3}, ValueError, "`max_seqlen` must be at least the longest sequence, 4 tokens"),
    ({"max_seqlen": 2}, ValueError, "spreads 6 rows over 2 sequences"),
    ({"max_seqlen": -1}, ValueError, "`max_seqlen` must be >= 0 tokens, got -1"),
    ({"max_seqlen": torch.tensor(4)}, TypeError, "`max_seqlen` must be a Python int, got Tensor"),
    ({"block_size": 48}, ValueError, "`block_size` must be one of 32, 64, 128, got 48"),
    ({"block_size": 64.0}, TypeError, "`block_size` must be a Python int, got float"),
    ({"scale": float("nan")}, ValueError, "`scale` must be finite, got nan"),
    ({"scale": torch.tensor(1.0)}, TypeError, "`scale` must be a Python float, got Tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_bad_input_is_named(change, error, message):
    arguments = GOOD | change
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error, match=f"block_attention: .*{message}"):
        block_attention(q, k, v, **arguments)


def test_bad_module_options_are_named():
    with pytest.raises(ValueError, match="BlockAttention: `block_size` must be one of 32, 64, 128, got 16"):
        BlockAttention(block_size=16)
    with pytest.raises(TypeError, match="BlockAttention: `scale` must be a Python float"):
        BlockAttention(scale="1")


def test_more_programs_than_a_grid_holds_is_an_error():
    from gem_kernels._src.block_attention.launch import block_grid

    offsets = torch.empty(1, dtype=torch.int64).expand(2**20 + 1)
    with pytest.raises(ValueError, match=r"block_attention: one launch holds at most 2147483647 .* split the batch"):
        block_grid(offsets, 2**36, 32, 4)


# ---------------------------------------------------------------- CUDA

GPU_CASES = [
    *CASES,
    *(
        Case(
            id=f"block{block_size}-D{dim}",
            lengths=(0, 1, 63, 64, 65, 129, 300),
            block_size=block_size,
            head_dim=dim,
            head_dim_v=dim,
        )
        for block_size in (32, 64, 128)
        for dim in (16, 32, 64, 96, 128, 256)
    ),
]
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.gpu
@HALF_AND_FULL
@pytest.mark.parametrize("case", GPU_CASES, ids=[case.id for case in GPU_CASES])
def test_cuda_matches_reference(case, dtype):
    inputs = case.inputs(dtype)
    tolerance = FLOAT32_ROUTE if dtype == torch.float32 else {}
    assert_all_match(run_op(inputs.to("cuda"), case), inputs, case, **tolerance)


# Chunks of q and k and chunks of v of different widths lie in shared memory in different swizzles.
@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 64), (32, 16), (64, 16), (64, 32), (96, 40), (128, 32), (256, 32), (32, 256)])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@HALF_AND_FULL
def test_cuda_head_dims(dtype, block_size, dims):
    case = Case(id="", lengths=(65, 0, 20, 130), block_size=block_size, head_dim=dims[0], head_dim_v=dims[1])
    inputs = case.inputs(dtype)
    tolerance = FLOAT32_ROUTE if dtype == torch.float32 else {}
    assert_all_match(run_op(inputs.to("cuda"), case), inputs, case, **tolerance)


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_in_new_memory")
@HALF_AND_FULL
def test_cuda_reads_nothing_it_did_not_write(dtype):
    case = next(case for case in CASES if case.id == "strided")
    inputs = case.inputs(dtype, "cuda")
    assert torch.empty(3, device="cuda").isnan().all()
    tolerance = FLOAT32_ROUTE if dtype == torch.float32 else {}
    assert_all_match(run_op(inputs, case), inputs, case, **tolerance)


@pytest.mark.gpu
@HALF_AND_FULL
@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
def test_cuda_no_value_reaches_another_block(value, dtype):
    assert_no_leak(lambda x: [y.cpu() for y in run_op(x, LEAK)], LEAK.inputs(dtype, "cuda"), value)


@pytest.mark.gpu
@HALF_AND_FULL
def test_cuda_opcheck_and_compile(dtype):
    case = Case(id="", lengths=(0, 1, 63, 64, 65), num_heads=4, num_heads_kv=2)
    inputs = case.inputs(dtype, "cuda")
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    torch.library.opcheck(block_attention_op, (q, k, v, inputs.offsets_q, 65, 64, 0.25, True))
    compiled = torch.compile(block_attention, fullgraph=True)
    for x, y in zip(run_op(inputs, case, compiled), run_op(inputs, case), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_cuda_validate_reads_the_offsets():
    x = X.to("cuda")
    with pytest.raises(ValueError, match="block_attention: `offsets` must start at 0, got 1"):
        block_attention(x, x, x, offsets=torch.tensor([1, 2, 6], device="cuda"), max_seqlen=4, validate=True)
    wide = x.repeat(1, 1, 17)
    with pytest.raises(ValueError, match="block_attention: the head dim of `q` must be at most 256 on CUDA"):
        block_attention(wide, wide, wide, offsets=torch.tensor([0, 2, 6], device="cuda"), max_seqlen=4)


@pytest.mark.gpu
def test_cuda_hot_path_does_not_wait_for_the_device():
    case = Case(id="", lengths=(0, 70, 3))
    for dtype in (torch.bfloat16, torch.float32):
        inputs = case.inputs(dtype, "cuda")
        run_op(inputs, case)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_op(inputs, case)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_batches_of_any_size_share_a_kernel(count_variants):
    from gem_kernels._src.block_attention import backward, forward

    case = Case(id="", lengths=(5, 70))
    run_op(case.inputs(torch.bfloat16, "cuda"), case)
    before = count_variants(forward, backward)
    assert before >= 2
    for seed in range(100):
        lengths = random_lengths(1 + 3 * seed, 20 + 11 * seed, sparsity=0.4, seed=seed)
        case = Case(id="", lengths=tuple(lengths.tolist()))
        run_op(case.inputs(torch.bfloat16, "cuda"), case)
    assert count_variants(forward, backward) == before


@pytest.mark.gpu
@HALF_AND_FULL
def test_cuda_80000_sequences(dtype):
    lengths = torch.randint(0, 4, (80_000,), generator=torch.Generator().manual_seed(0))
    lengths[-1] = 65
    case = Case(id="", lengths=tuple(lengths.tolist()), num_heads=1, num_heads_kv=1)
    inputs = case.inputs(dtype)
    results = run_op(inputs.to("cuda"), case)
    # The same numbers from the CPU kernel: a Python loop over 80,000 sequences takes minutes. In half precision it
    # computes in float32, so its error is that of the last rounding alone; hence the wider bound.
    exact = run_op(inputs.to(torch.float64), case)
    eager = run_op(inputs, case)
    for name, x, y, z in zip(NAMES, results, exact, eager, strict=True):
        units = 16 if dtype == torch.float32 else 1
        floor = units * torch.finfo(dtype).eps * max(1.0, float(y.abs().max()))
        assert_matches_oracle(name, x, y, z, factor=3.0, floor=floor, offsets=inputs.offsets_q)


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_more_elements_than_int32_holds(dtype):
    rows, tail = 2**24 + 1000, 200
    case = Case(id="", lengths=(), num_heads=1, num_heads_kv=1, head_dim=128, head_dim_v=128)
    needed = 10 * rows * 128 * dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} are free")
    assert rows * 128 > 2**31
    offsets = torch.tensor([0, 0, rows - tail, rows], device="cuda")
    q = torch.zeros(rows, 1, 128, dtype=dtype, device="cuda")
    small = attention_inputs((tail,), num_heads=1, head_dim=128, dtype=dtype)
    q[-tail:] = small.q.to("cuda")
    k, v, do = q.clone(), q.clone(), torch.zeros_like(q)
    k[-tail:], v[-tail:], do[-tail:] = (x.to("cuda") for x in (small.k, small.v, small.do))
    big = small._replace(q=q, k=k, v=v, do=do, offsets_q=offsets, max_seqlen_q=rows)
    results = run_op(big, case)
    assert all(not x[: 2**20].any() for x in results)
    tolerance = FLOAT32_ROUTE if dtype == torch.float32 else {}
    assert_all_match([x[-tail:].contiguous() for x in results], small, case, **tolerance)
    del results, big, q, k, v, do
    torch.cuda.empty_cache()
