"""What is jagged_attention's own: its log-sum-exp and scale, large scores, its ops, and the grids and tiles of all.

What it shares with gdpa: test_packed_attention.
"""

import dataclasses

import pytest
import torch
from packed_ops import FULL, MIXED, JaggedAttention, inputs

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention import launch
from gem_kernels._src.attention.configs import TileConfig, fit_lengths
from gem_kernels._src.jagged_attention.op import jagged_attention_backward_op, jagged_attention_op
from gem_kernels.testing import (
    MASK_CASES,
    LengthCase,
    assert_matches_oracle,
    attention_inputs,
    make_offsets,
    random_lengths,
)

OP = JaggedAttention()


def test_interpreted_backward_without_gradient_of_lse(interpreter, poisoned_empty):
    x = inputs(MIXED)
    zero = torch.zeros(x.q.shape[:2])
    for with_none, with_zero in zip(OP.launch(x, FULL, None), OP.launch(x, FULL, zero), strict=True):
        assert torch.equal(with_none, with_zero)


class LargeScores(JaggedAttention):
    """Where rounding a score s, and the log-sum-exp beside it, changes a probability by up to eps |s| of itself."""

    def floor(self, name, x, oracle, dtype):
        scores = x.q.norm(dim=-1).max() * x.k.norm(dim=-1).max() * x.q.shape[2] ** -0.5
        relative = torch.finfo(torch.float32).eps * float(scores)
        return super().floor(name, x, oracle, dtype) + relative * float(oracle[oracle.isfinite()].abs().max())


def test_very_negative_and_very_large_scores():
    x = inputs(MIXED)
    op = LargeScores()
    op.check(op.by_op, x._replace(q=x.q * 200))


# Padded keys of the dK/dV kernel may overflow; they reach only rows that are not stored.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_very_large_scores_interpreted(interpreter, poisoned_empty):
    x = inputs(MIXED)
    op = LargeScores()
    op.check(op.by_launch, x._replace(q=x.q * 200))


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
def test_gradcheck_with_the_log_sum_exp(mask):
    # Only rows with a key: the log-sum-exp of the others is -inf, of which no difference can be taken.
    x = inputs(LengthCase(id="g", lengths_q=(1, 4), lengths_k=(3, 5)), dtype=torch.float64, head_dim=3)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    options = OP.keywords(x, mask) | {"return_lse": True}
    assert torch.autograd.gradcheck(lambda *qkv: jagged_attention(*qkv, **options), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cpu_op_with_a_scale(dtype):
    op = JaggedAttention(scale=0.7)
    op.check(op.by_op, inputs(MIXED, dtype=dtype, num_heads=2), MASK_CASES[1])


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (3, 0, 65)])
def test_opcheck(lengths):
    x = attention_inputs(lengths)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    scalars = (x.max_seqlen_q, x.max_seqlen_k, 0.25, -1, 3)
    torch.library.opcheck(jagged_attention_op, (q, k, v, x.offsets_q, x.offsets_k, *scalars, False))
    out, lse = jagged_attention_op(q, k, v, x.offsets_q, x.offsets_k, *scalars, False)
    saved = [t.detach() for t in (q, k, v, out, lse)]
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(jagged_attention_backward_op, (x.do, dlse, *saved, x.offsets_q, x.offsets_k, *scalars))


def test_gradient_of_lse_alone_and_of_expanded_output():
    x = inputs(MIXED)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    out, lse = jagged_attention(q, k, v, return_lse=True, **OP.keywords(x))
    (dq,) = torch.autograd.grad(lse[torch.isfinite(lse)].sum(), q, retain_graph=True)
    finite = torch.isfinite(lse).to(lse.dtype)
    options = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k}
    expected = reference.jagged_attention_backward(torch.zeros_like(x.do), q, k, v, dlse=finite, **options)[0]
    assert torch.allclose(dq, expected, atol=1e-6)
    (dv,) = torch.autograd.grad(out.sum(), v)
    ones = reference.jagged_attention_backward(torch.ones_like(x.do), q, k, v, **options)[2]
    assert torch.allclose(dv, ones, atol=1e-6)


BASE = attention_inputs((3, 2), (4, 1), num_heads=4, num_heads_kv=2)
BAD = [
    ("tensor", torch.tensor(0.5), TypeError, ["scale", "Python float", "Tensor"]),
    ("zero", 0.0, ValueError, ["scale", "> 0", "0.0"]),
    ("nan", float("nan"), ValueError, ["scale", "finite", "nan"]),
]


@pytest.mark.parametrize(("scale", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_scale_is_named(scale, error, words):
    with pytest.raises(error, match=r"^jagged_attention: ") as raised:
        jagged_attention(BASE.q, BASE.k, BASE.v, **(OP.keywords(BASE) | {"scale": scale}))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "; " in str(raised.value).partition("got ")[2], f"no remedy: {raised.value}"


def test_grid_holds_every_tile_and_refuses_what_cuda_cannot_launch():
    offsets = make_offsets([0, 1, 130, 64])
    padded = launch.make_grid("op", offsets, 195, 130, 64, 2)
    assert (padded.size, padded.num_tiles, padded.search) == (3 * 4 * 2, 3, False)
    outlier = make_offsets([5000] + [1] * 400)
    searched = launch.make_grid("op", outlier, 5400, 5000, 64, 2)
    assert searched.search
    assert searched.size >= 2 * int(searched.tile_offsets[-1])
    assert searched.tile_offsets[:3].tolist() == [0, 79, 80]
    with pytest.raises(ValueError, match="split the batch"):
        launch.make_grid("op", offsets, 195, 2**40, 64, 2, padded=True)


def test_tiles_shrink_to_few_sizes():
    config = TileConfig(block_m=128, block_n=128, num_warps=8, num_stages=2)
    sizes = {fit_lengths(config, m, n) for m in range(1, 3000, 7) for n in range(1, 3000, 7)}
    assert len(sizes) <= 16
    assert fit_lengths(config, 8, 4096) == TileConfig(block_m=16, block_n=128, num_warps=4, num_stages=2)
    assert fit_lengths(config, 4096, 4096) == config
    with pytest.raises(ValueError, match="block_m"):
        dataclasses.replace(config, block_m=48)
    with pytest.raises(ValueError, match="num_warps"):
        dataclasses.replace(config, num_warps=3)
    with pytest.raises(ValueError, match="num_stages"):
        dataclasses.replace(config, num_stages=0)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("outlier", [0, 3000])
def test_gpu_80000_sequences(outlier):
    lengths = random_lengths(80_000, 8, sparsity=0.5, seed=0) - 1
    lengths[40_000] = max(outlier, int(lengths[40_000]))
    x = attention_inputs(lengths, num_heads=2, head_dim=16, device="cuda")
    cpu = x.to("cpu", torch.float64)
    for name, a, o in zip(OP.names, OP.by_op(x, FULL), OP.by_op(cpu, FULL), strict=True):
        assert_matches_oracle(name, a, o, o.float(), floor=1e-4)
