"""Error measures against a float64 oracle.

The tolerance is derived, never chosen: a kernel may be at most ``factor`` times as far from the float64 oracle as the
plain eager computation in the same dtype is, plus a floor for results that eager happens to round exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels.testing.inputs import sequence_of_row


def max_error(actual: Tensor, oracle: Tensor) -> float:
    """Largest absolute difference, in float64; NaN anywhere gives inf, and equal infinities differ by 0."""
    if actual.numel() == 0:
        return 0.0
    a, o = actual.detach().double().cpu(), oracle.detach().double().cpu()
    diff = torch.where(a == o, torch.zeros_like(a), (a - o).abs())
    return float(diff.nan_to_num(nan=float("inf")).max())


def rounding_floor(oracle: Tensor, dtype: torch.dtype) -> float:
    """Largest change of ``oracle`` when 0.3 is added and taken away again in ``dtype``: a few units of rounding."""
    x = oracle.detach().cpu().to(dtype)
    x = x[torch.isfinite(x)]
    if x.numel() == 0:
        return torch.finfo(dtype).eps
    return float(((x + 0.3) - 0.3 - x).double().abs().max()) + torch.finfo(dtype).eps


def summation_floor(oracle: Tensor, dtype: torch.dtype, *, units: float = 16.0) -> float:
    """Floor for results that sum many terms in another order than the eager computation.

    ``units`` roundings of the largest result in the accumulation dtype (float32 for half precision), on top of
    ``rounding_floor``. A term such as dP - rowsum(dO * O) may cancel exactly in one order and to a few roundings in
    another.
    """
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    x = oracle.detach().double()
    x = x[torch.isfinite(x)]
    largest = float(x.abs().max()) if x.numel() else 0.0
    return rounding_floor(oracle, dtype) + units * torch.finfo(accumulation).eps * max(largest, 1.0)


def assert_matches_oracle(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    eager: Tensor,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    offsets: Tensor | None = None,
) -> None:
    """Assert error(actual) <= factor * error(eager) + floor, both against ``oracle``.

    Args:
        name: What is compared, for the message.
        actual: Result under test, any dtype or device.
        oracle: The same quantity in float64.
        eager: The same quantity by the plain computation in the dtype of ``actual``.
        factor: Allowed multiple of the eager error.
        floor: Absolute floor; default ``rounding_floor(oracle, actual.dtype)``.
        offsets: (B + 1,) of the packed dim 0, to name the sequence of the worst entry.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}")
    floor = rounding_floor(oracle, actual.dtype) if floor is None else floor
    error, eager_error = max_error(actual, oracle), max_error(eager, oracle)
    bound = factor * eager_error + floor
    if error <= bound:
        return
    a, o = actual.detach().double().cpu(), oracle.detach().double().cpu()
    diff = torch.where(a == o, torch.zeros_like(a), (a - o).abs()).nan_to_num(nan=float("inf"))
    worst = tuple(int(i) for i in torch.unravel_index(diff.argmax(), diff.shape))
    where = f" (sequence {sequence_of_row(offsets, worst[0])})" if offsets is not None else ""
    raise AssertionError(
        f"{name}: error {error:.3e} > {factor} * eager error {eager_error:.3e} + floor {floor:.3e}; "
        f"worst at {worst}{where}: got {float(a[worst])!r}, oracle {float(o[worst])!r}"
    )


def assert_rms(name: str, actual: Tensor, oracle: Tensor, *, ratio: float) -> None:
    """Assert RMS(actual - oracle) <= ratio * RMS(oracle)."""
    if oracle.numel() == 0:
        return
    a, o = actual.detach().double().cpu(), oracle.detach().double().cpu()
    error = float((a - o).square().mean().sqrt())
    scale = float(o.square().mean().sqrt())
    if not error <= ratio * scale:
        raise AssertionError(f"{name}: RMS error {error:.3e} > {ratio:.1e} * RMS of the oracle {scale:.3e}")
