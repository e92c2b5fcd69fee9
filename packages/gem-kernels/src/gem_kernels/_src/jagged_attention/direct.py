"""jagged attention of plain CUDA tensors without a bias, past torch.library, whose way costs the host two launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels._src.attention.reuse import reusing
from gem_kernels._src.attention.schedule import find_store
from gem_kernels._src.validate import check_batch, reads_values

_NAME = "jagged_attention"


class DirectAttention(torch.autograd.Function):
    """The kernels of the op. Where k and v are one tensor, one gradient is that of both."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets_q: Tensor | None,
        offsets_k: Tensor,
        sizes: tuple[int, int, float, int, int],
        validate: bool,
        request_index: Tensor | None,
        schedule: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from gem_kernels._src.jagged_attention.forward import launch_forward

        lengths = (offsets_q, offsets_k, *sizes[:2])
        check_batch(_NAME, q, k, *lengths, request_index=request_index, read_offsets=reads_values(validate))
        with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
            out, lse = launch_forward(q, k, v, *lengths, *sizes[2:], None, request_index)
        ctx.sizes, ctx.keys_are_values = sizes, k is v
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, offsets_q, offsets_k, request_index, schedule)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        from gem_kernels._src.jagged_attention.backward import launch_backward, launch_backward_of_one

        if do is None and dlse is None:
            return (None,) * 9
        q, k, v, out, lse, offsets_q, offsets_k, request_index, schedule = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        max_seqlen_q, max_seqlen_k, scale, left, right = ctx.sizes
        lengths = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
        mask = (scale, left, right)
        dv: Tensor | None = None
        with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
            if ctx.keys_are_values:
                dq, dk = launch_backward_of_one(do, dlse, q, k, out, lse, *lengths, *mask, request_index)
            else:
                dq, dk, dv = launch_backward(do, dlse, q, k, v, out, lse, *lengths, *mask, None, request_index)
        return dq, dk, dv, *(None,) * 6
