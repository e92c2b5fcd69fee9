"""GDPA against the attention a user would pick instead, as ratios to the library's matmul in the same rounds.

python bench_gdpa.py                 # all shapes; needs a CUDA device
python bench_gdpa.py --quick         # the first two shapes, few repeats
python bench_gdpa.py --tune dkdv     # time every candidate tile configuration of one portable kernel

The other providers but the compiled one compute softmax attention: the same matmuls, another function between them.
"portable" are the kernels that all other GPUs take; "schedule reused" is a call that is given an ``AttentionSchedule``
which an earlier call on the batch has filled, as in all layers of a model but the first.
"""

from __future__ import annotations

import functools

import torch
from attention_bench import HEAD_DIM, Op, Shape, main
from torch import Tensor

from gem_kernels import gdpa, reference
from gem_kernels._src.attention.hopper.launch import portable_only

SHAPES = [
    Shape(id="B1152-q256-k256", num_sequences=1152, max_seqlen_q=256, max_seqlen_k=256),
    Shape(id="B1152-q1024-k256", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=256),
    Shape(id="B576-q2048-k256", num_sequences=576, max_seqlen_q=2048, max_seqlen_k=256),
    Shape(id="B576-q1024-k1024", num_sequences=576, max_seqlen_q=1024, max_seqlen_k=1024),
    Shape(id="B288-q2048-k2048", num_sequences=288, max_seqlen_q=2048, max_seqlen_k=2048),
    Shape(id="B1152-uniform1024", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=1024, sparsity=0.5),
    Shape(id="B1152-zipf4096", num_sequences=1152, max_seqlen_q=4096, max_seqlen_k=4096, zipf=True),
]
PRE_SCALE = HEAD_DIM**-0.5


def single_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of (B, H, S, D), in bfloat16 between the ops."""
    return torch.nn.functional.gelu(q @ k.mT * PRE_SCALE, approximate="tanh") @ v


OPTIONS = {"activation": "fast_gelu", "pre_scale": PRE_SCALE}
OP = Op(
    name="gdpa",
    attend=functools.partial(gdpa, **OPTIONS),
    reference=functools.partial(reference.gdpa, **OPTIONS),
    dense=single_ops,
    ignores_zeros=True,
    variants={"portable": portable_only},
)


if __name__ == "__main__":
    main(OP, SHAPES, __doc__)
