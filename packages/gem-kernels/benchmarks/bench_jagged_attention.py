"""Jagged attention against torch's attention, as ratios to the library's matmul in the same rounds.

python bench_jagged_attention.py                 # all shapes; needs a CUDA device
python bench_jagged_attention.py --quick         # the first two shapes, few repeats
python bench_jagged_attention.py --tune dkdv     # time every candidate tile configuration of one portable kernel

"portable" are the kernels that all other GPUs take; "schedule reused" is a call that is given an ``AttentionSchedule``
which an earlier call on the batch has filled, as in all layers of a model but the first.
"""

from __future__ import annotations

from attention_bench import HEAD_DIM, Op, Shape, main
from torch import Tensor

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention.hopper.launch import portable_only

SHAPES = [
    Shape(id="B576-q1024-k1024", num_sequences=576, max_seqlen_q=1024, max_seqlen_k=1024),
    Shape(id="B288-q2048-k2048", num_sequences=288, max_seqlen_q=2048, max_seqlen_k=2048),
    Shape(id="B72-q4096-k4096", num_sequences=72, max_seqlen_q=4096, max_seqlen_k=4096),
    Shape(id="B4-q8192-k8192", num_sequences=4, max_seqlen_q=8192, max_seqlen_k=8192),
    Shape(id="B1152-uniform1024", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=1024, sparsity=0.5),
    Shape(id="B1152-zipf4096", num_sequences=1152, max_seqlen_q=4096, max_seqlen_k=4096, zipf=True),
    Shape(id="B1152-q256-k256", num_sequences=1152, max_seqlen_q=256, max_seqlen_k=256),
    Shape(id="B1152-q1024-k256", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=256),
    Shape(id="B1152-q8-k1024", num_sequences=1152, max_seqlen_q=8, max_seqlen_k=1024),
]


def reference_output(q: Tensor, k: Tensor, v: Tensor, *, offsets_q: Tensor, offsets_k: Tensor) -> Tensor:
    """The loop without its log-sum-exp."""
    out, _ = reference.jagged_attention(q, k, v, offsets_q=offsets_q, offsets_k=offsets_k)
    return out


def single_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of (B, H, S, D), in bfloat16 between the ops."""
    return (q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v


OP = Op(
    name="jagged_attention",
    attend=jagged_attention,
    reference=reference_output,
    dense=single_ops,
    ignores_zeros=False,
    variants={"portable": portable_only},
)


if __name__ == "__main__":
    main(OP, SHAPES, __doc__)
