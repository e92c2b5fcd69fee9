"""The block on CUDA: row kernels around an attention, or kernels of its own where sequences have few keys.

The attention is GDPA's. On Hopper it is one that normalises the query rows it reads and adds them to its output, and
where the keys of a sequence fit in one tile, all gradients are made by one kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.gdpa.backward import launch_backward as launch_gdpa_backward
from gem_kernels._src.gdpa.forward import launch_forward as launch_gdpa_forward
from gem_kernels._src.gdpa_norm_block.arguments import Gradients, Options, Parameters, Statistics
from gem_kernels._src.gdpa_norm_block.few_keys import launch_few_keys_backward, launch_few_keys_forward
from gem_kernels._src.gdpa_norm_block.hopper_launch import (
    attends,
    launch_attend,
    launch_attend_backward,
    makes_gradients,
    readable,
)
from gem_kernels._src.gdpa_norm_block.rows import (
    BLOCK,
    add_rms_norm_bwd_kernel,
    add_rms_norm_kernel,
    along_kernel,
    layer_norm_bwd_end_kernel,
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


def _layer_norm(
    q: Tensor, parameters: Parameters, mean: Tensor, rstd: Tensor, eps: float, *, statistics_only: bool = False
) -> Tensor:
    """Rows (T_q, N) after the layer norm, and their statistics; with ``statistics_only`` these, and q itself."""
    num_rows, features = q.shape
    out = q if statistics_only else torch.empty(num_rows, features, dtype=q.dtype, device=q.device)
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
            WRITE=not statistics_only,
            **meta,
        )
    return out


class _Attended(NamedTuple):
    """What the attention of rows (T_q, N) of q makes."""

    total: Tensor
    """Its output, likewise and contiguous."""
    is_sum: bool
    """Whether the query residual is in it."""
    normed: Tensor | None = None
    """The rows after the layer norm, where they are written."""
    products: Tensor | None = None
    """Of the output with the gradient that was given, (H, T_q) float32, where the attention makes them."""


def _attend(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    mean: Tensor,
    rstd: Tensor,
    options: Options,
    *,
    again: bool = False,
    dout: Tensor | None = None,
) -> _Attended:
    """The attention of rows (T_q, N) of q after the layer norm.

    Writes the statistics of the rows, or finds them there if ``again``; the same kernels write the same bits.
    """
    x = rows.unflatten(1, (-1, k.shape[2]))
    if attends(x, k, v, offsets_q, offsets_k, options):
        if not again:
            _layer_norm(rows, parameters, mean, rstd, options.eps, statistics_only=True)
        sides = (k, v, offsets_q, offsets_k)
        total, products = launch_attend(x, *sides, parameters, mean, rstd, options, dout)
        return _Attended(total.view(rows.shape), True, products=products)
    if again:
        mean, rstd = torch.empty_like(mean), torch.empty_like(rstd)
    normed = _layer_norm(rows, parameters, mean, rstd, options.eps)
    out = launch_gdpa_forward(normed.view(x.shape), k, v, offsets_q, offsets_k, *options[:5], -1, -1)
    return _Attended(out.view(rows.shape), False, normed)


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
) -> tuple[Tensor, Statistics, Tensor | None]:
    """Output (T_q, H, D), contiguous, in the dtype of q; statistics; rows before the RMS norm if ``keep``."""
    if has_few_keys(q, k, parameters, options, offsets_q.shape[0] - 1):
        return *launch_few_keys_forward(q, k, v, offsets_q, offsets_k, options), None
    rows = row_major(q.flatten(1))
    num_rows, features = rows.shape
    mean, rstd, rrms = (torch.empty(num_rows, dtype=torch.float32, device=q.device) for _ in range(3))
    with device_guard(q):
        attended = _attend(rows, k, v, offsets_q, offsets_k, parameters, mean, rstd, options)
        total, is_sum = attended.total, attended.is_sum
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
    return out.view(q.shape), Statistics(mean, rstd, rrms), total.view(q.shape) if keep else None


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
    kept: Tensor | None = None,
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
    x = rows.unflatten(1, q.shape[1:])
    with device_guard(q):
        is_one_kernel = makes_gradients(x, k, v, offsets_q, options)
        if is_one_kernel:
            dout = readable(dout.view(q.shape)).view(num_rows, features)
        if kept is None:
            # Products of whole rows give what the RMS norm's backward asks, but not the gradient of its weight.
            given = dout.view(q.shape) if is_one_kernel and rms_weight is None else None
            attended = _attend(
                rows, k, v, offsets_q, offsets_k, parameters, mean, rstd, options, again=True, dout=given
            )
        else:
            attended = _Attended(kept.view(num_rows, features), True)
        total, is_sum, normed, products = attended
        along = torch.empty_like(rrms) if is_one_kernel else rrms
        dtotal = total if is_one_kernel or kept is None else torch.empty_like(total)
        if products is not None:
            along_kernel[(triton.cdiv(num_rows, BLOCK),)](
                products, rrms, along, num_rows, N=features, HEADS=q.shape[1], BLOCK=BLOCK
            )
        elif num_rows > 0:
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
                along,
                sums[2],
                dout.stride(0),
                rows.stride(0),
                num_rows,
                HAS_RMS_WEIGHT=rms_weight is not None,
                QUERY_RESIDUAL=options.query_residual and not is_sum,
                WRITE=not is_one_kernel,
                **meta,
            )
        if is_one_kernel:
            dx, dk, dv, head_sums = launch_attend_backward(
                dout.view(q.shape),
                total.view(q.shape),
                x,
                k,
                v,
                offsets_q,
                offsets_k,
                parameters,
                statistics,
                along,
                options,
            )
        else:
            head_sums = None
            if normed is None:
                normed = _layer_norm(rows, parameters, torch.empty_like(mean), torch.empty_like(rstd), options.eps)
            do = dtotal.view(q.shape)
            dx, dk, dv = launch_gdpa_backward(
                do, normed.view(q.shape), k, v, offsets_q, offsets_k, *options[:5], -1, -1
            )
        dq = dx.view(num_rows, features)
        del meta["HAS_BIAS"]
        if head_sums is not None:
            del meta["HAS_WEIGHT"]
            layer_norm_bwd_end_kernel[(triton.cdiv(num_rows, meta["ROWS"]),)](
                dq, rows, mean, rstd, head_sums, rows.stride(0), num_rows, HEADS=q.shape[1], **meta
            )
        elif num_rows > 0:
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
                QUERY_RESIDUAL=options.query_residual and not is_one_kernel,
                RESIDUAL=options.residual,
                SUMS=norm_weight is not None or norm_bias is not None,
                **meta,
            )
    totals = (
        q.new_empty(0) if parameter is None else partial.sum(0).to(q.dtype)
        for parameter, partial in zip((norm_weight, norm_bias, rms_weight), sums, strict=True)
    )
    return Gradients(dq.view(q.shape), dk, dv, *totals)
