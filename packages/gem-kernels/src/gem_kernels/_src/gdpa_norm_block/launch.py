"""The block on CUDA: row kernels around an attention, or kernels of its own where sequences have few keys.

The attention is GDPA's. On Hopper it is one that adds the query rows to its output; where the keys of a sequence fit in
one tile, one kernel makes the forward from q to the output, and one all gradients of the attention.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.gdpa.backward import launch_backward as launch_gdpa_backward
from gem_kernels._src.gdpa.forward import launch_forward as launch_gdpa_forward
from gem_kernels._src.gdpa_norm_block.arguments import Gradients, Kept, Options, Parameters, Statistics
from gem_kernels._src.gdpa_norm_block.few_keys import launch_few_keys_backward, launch_few_keys_forward
from gem_kernels._src.gdpa_norm_block.hopper_launch import (
    attends,
    is_one_kernel,
    launch_attend,
    launch_attend_backward,
    launch_block,
    makes_gradients,
)
from gem_kernels._src.gdpa_norm_block.rows import (
    add_rms_norm_bwd_kernel,
    add_rms_norm_kernel,
    layer_norm_bwd_kernel,
    layer_norm_kernel,
)
from gem_kernels._src.gdpa_norm_block.selection import has_few_keys
from gem_kernels._src.norm_linear.configs import RowConfig, select_backward_rows, select_rows
from gem_kernels._src.norm_linear.rows import backward_programs, row_major


def _meta(parameters: Parameters, features: int, config: RowConfig) -> dict[str, Any]:
    return {
        "N": features,
        "HAS_WEIGHT": parameters.norm_weight is not None,
        "HAS_BIAS": parameters.norm_bias is not None,
        "ROWS": config.rows,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
    }


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not read."""
    return other if x is None else x


def _layer_norm(q: Tensor, parameters: Parameters, mean: Tensor, rstd: Tensor, eps: float) -> Tensor:
    """Rows (T_q, N) after the layer norm, what the attention reads; writes the statistics."""
    num_rows, features = q.shape
    out = torch.empty(num_rows, features, dtype=q.dtype, device=q.device)
    meta = _meta(parameters, features, select_rows(features))
    if num_rows > 0:
        layer_norm_kernel[(triton.cdiv(num_rows, meta["ROWS"]),)](
            q,
            _or(parameters.norm_weight, q),
            _or(parameters.norm_bias, q),
            out,
            mean,
            rstd,
            q.stride(0),
            num_rows,
            eps,
            **meta,
        )
    return out


def _attend(
    normed: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options
) -> tuple[Tensor, bool]:
    """Output of the attention as rows (T_q, N), contiguous, and whether the query residual is in it already."""
    x = normed.view(q.shape)
    if attends(x, k, v, offsets_q, offsets_k, options):
        return launch_attend(x, k, v, offsets_q, offsets_k, options).view(normed.shape), True
    out = launch_gdpa_forward(x, k, v, offsets_q, offsets_k, *options[:5], -1, -1)
    return out.view(normed.shape), False


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    options: Options,
    *,
    keep: bool = False,
) -> tuple[Tensor, Statistics, Kept | None]:
    """Output (T_q, H, D), contiguous, in the dtype of q; statistics; rows for the backward if ``keep``."""
    if has_few_keys(q, k, parameters, options, offsets_q.shape[0] - 1):
        return *launch_few_keys_forward(q, k, v, offsets_q, offsets_k, options), None
    if is_one_kernel(q, k, v, options):
        with device_guard(q):
            return launch_block(q, k, v, offsets_q, offsets_k, parameters, options, keep=keep)
    rows = row_major(q.flatten(1))
    num_rows, features = rows.shape
    mean, rstd, rrms = (torch.empty(num_rows, dtype=torch.float32, device=q.device) for _ in range(3))
    with device_guard(q):
        normed = _layer_norm(rows, parameters, mean, rstd, options.eps)
        total, is_sum = _attend(normed, q, k, v, offsets_q, offsets_k, options)
        out = torch.empty_like(total) if keep else total
        meta = _meta(parameters, features, select_rows(features))
        if num_rows > 0:
            add_rms_norm_kernel[(triton.cdiv(num_rows, meta["ROWS"]),)](
                total,
                rows,
                mean,
                rstd,
                _or(parameters.norm_weight, rows),
                _or(parameters.norm_bias, rows),
                _or(parameters.rms_weight, rows),
                out,
                rrms,
                rows.stride(0),
                num_rows,
                options.eps,
                HAS_RMS_WEIGHT=parameters.rms_weight is not None,
                QUERY_RESIDUAL=options.query_residual and not is_sum,
                RESIDUAL=options.residual,
                KEEP=keep and options.query_residual and not is_sum,
                **meta,
            )
    kept = Kept(normed.view(q.shape), total.view(q.shape)) if keep else None
    return out.view(q.shape), Statistics(mean, rstd, rrms), kept


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    statistics: Statistics,
    options: Options,
    kept: Kept | None = None,
) -> Gradients:
    """All gradients, contiguous, in the dtypes of what they belong to."""
    if has_few_keys(q, k, parameters, options, offsets_q.shape[0] - 1):
        return launch_few_keys_backward(do, q, k, v, offsets_q, offsets_k, statistics, options)
    rows, dout = row_major(q.flatten(1)), row_major(do.flatten(1))
    num_rows, features = rows.shape
    mean, rstd, rrms = statistics
    norm_weight, norm_bias, rms_weight = parameters
    meta = _meta(parameters, features, select_backward_rows(features))
    has_sums = any(parameter is not None for parameter in parameters)
    programs = backward_programs(num_rows, meta["ROWS"], has_sums)
    sums = torch.empty(3, programs if has_sums else 0, features, dtype=torch.float32, device=q.device)
    with device_guard(q):
        if kept is None and is_one_kernel(q, k, v, options):
            *_, kept = launch_block(q, k, v, offsets_q, offsets_k, parameters, options, has_out=False, keep=True)
        if kept is None:
            # The same kernels write it again, statistics included, bit by bit.
            normed = _layer_norm(rows, parameters, torch.empty_like(mean), torch.empty_like(rstd), options.eps)
            total, is_sum = _attend(normed, q, k, v, offsets_q, offsets_k, options)
            dtotal = total
        else:
            normed, total = (x.view(num_rows, features) for x in kept)
            is_sum, dtotal = True, torch.empty_like(total)
        if num_rows > 0:
            add_rms_norm_bwd_kernel[(programs,)](
                dout,
                total,
                rows,
                mean,
                rstd,
                rrms,
                _or(norm_weight, rows),
                _or(norm_bias, rows),
                _or(rms_weight, rows),
                dtotal,
                sums[2],
                dout.stride(0),
                rows.stride(0),
                num_rows,
                HAS_RMS_WEIGHT=rms_weight is not None,
                QUERY_RESIDUAL=options.query_residual and not is_sum,
                **meta,
            )
        x, dx = normed.view(q.shape), dtotal.view(q.shape)
        in_one = makes_gradients(x, k, v, offsets_q, options)
        if in_one:
            dnormed, dk, dv = launch_attend_backward(dx, x, k, v, offsets_q, offsets_k, options)
        else:
            dnormed, dk, dv = launch_gdpa_backward(dx, x, k, v, offsets_q, offsets_k, *options[:5], -1, -1)
        dq = dnormed.view(num_rows, features)
        del meta["HAS_BIAS"]
        if num_rows > 0:
            layer_norm_bwd_kernel[(programs,)](
                dq,
                dtotal,
                dout,
                rows,
                mean,
                rstd,
                _or(norm_weight, rows),
                dq,
                sums,
                dout.stride(0),
                rows.stride(0),
                num_rows,
                QUERY_RESIDUAL=options.query_residual and not in_one,
                RESIDUAL=options.residual,
                SUMS=norm_weight is not None or norm_bias is not None,
                **meta,
            )
    totals = (
        q.new_empty(0) if parameter is None else partial.sum(0).to(q.dtype)
        for parameter, partial in zip((norm_weight, norm_bias, rms_weight), sums, strict=True)
    )
    return Gradients(dq.view(q.shape), dk, dv, *totals)
