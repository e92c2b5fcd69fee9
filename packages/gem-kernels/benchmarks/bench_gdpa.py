"""GDPA against the attention a user would pick instead, as ratios to the library's matmul in the same run.

python bench_gdpa.py                 # all shapes; needs a CUDA device
python bench_gdpa.py --quick         # the first two shapes, few repeats
python bench_gdpa.py --tune dkdv     # time every candidate tile configuration of one kernel

The other providers compute softmax attention: the same matmuls, another function between them. On Hopper the forward
is timed twice, with its own kernel and with the portable one.
"""

from __future__ import annotations

import functools

from attention_bench import HEAD_DIM, Op, Shape, main

from gem_kernels import gdpa, reference
from gem_kernels._src.attention.hopper.launch import portable_only

SHAPES = [
    Shape(id="B1152-q256-k256", num_sequences=1152, max_seqlen_q=256, max_seqlen_k=256),
    Shape(id="B1152-q1024-k256", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=256),
    Shape(id="B1152-q1024-k128", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=128),
    Shape(id="B1152-q1024-k1024", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=1024),
    Shape(id="B1152-uniform1024", num_sequences=1152, max_seqlen_q=1024, max_seqlen_k=1024, sparsity=0.5),
    Shape(id="B1152-zipf4096", num_sequences=1152, max_seqlen_q=4096, max_seqlen_k=4096, zipf=True),
    Shape(id="B576-q2048-k2048", num_sequences=576, max_seqlen_q=2048, max_seqlen_k=2048),
]

OPTIONS = {"activation": "fast_gelu", "pre_scale": HEAD_DIM**-0.5}
OP = Op(
    name="gdpa",
    attend=functools.partial(gdpa, **OPTIONS),
    reference=functools.partial(reference.gdpa, **OPTIONS),
    variants={"portable": portable_only},
)


if __name__ == "__main__":
    main(OP, SHAPES, __doc__)
