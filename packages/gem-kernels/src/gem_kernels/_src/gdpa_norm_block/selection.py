"""Which calls of the block take the kernels for few keys: from sizes alone, without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.gdpa_norm_block.arguments import Options, Parameters

MAX_KEYS = 32
"""Keys of a sequence: with more, making the attention again costs more than the rows it saves."""
MAX_FEATURES = 256
"""Numbers of a row, of which a program holds 64."""
MAX_HEAD_DIM = 64
"""Wider tiles spill registers."""
MIN_PROGRAMS = 128
"""Sequences times heads, each one program of the keys' gradients: about the multiprocessors of a large GPU."""


def has_few_keys(q: Tensor, k: Tensor, parameters: Parameters, options: Options, num_sequences: int) -> bool:
    """Whether those kernels compute the block on CUDA, so that all ranks of a job and both directions agree."""
    num_heads = q.shape[1]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and all(parameter is None for parameter in parameters)
        and k.shape[1] == num_heads
        and 0 < options.max_seqlen_k <= MAX_KEYS
        and q.shape[2] <= MAX_HEAD_DIM
        and num_heads * q.shape[2] <= MAX_FEATURES
        and num_sequences * num_heads >= MIN_PROGRAMS
    )


def keeps_rows(
    recompute: bool, q: Tensor, k: Tensor, parameters: Parameters, options: Options, num_sequences: int
) -> bool:
    """Whether the forward returns ``Kept``. The kernels for few keys have no use for it."""
    return not recompute and not has_few_keys(q, k, parameters, options, num_sequences)
