"""Input checks of the linear layers with a norm."""

from __future__ import annotations

from torch import Tensor

from gem_kernels._src.validate import check_float, check_same, check_scalar, check_tensor


def check_linear(
    op: str,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    per_output: dict[str, Tensor | None],
    per_input: dict[str, Tensor | None] | None = None,
) -> None:
    """Raise on any shape, dtype or device mismatch; the optional parameters have one number per output or input."""
    per_input = per_input or {}
    given = {"x": x, "weight": weight} | {name: v for name, v in (per_output | per_input).items() if v is not None}
    for name, tensor in given.items():
        check_tensor(op, name, tensor)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: `x` must have shape (..., K) with K >= 1, got {tuple(x.shape)}; give it a last dim of features."
        )
    check_float(op, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: `weight` must have shape (N, K) = (N, {x.shape[-1]}) with N >= 1, got {tuple(weight.shape)}; give "
            "it the features of `x` as columns."
        )
    for vectors, length in ((per_output, weight.shape[0]), (per_input, x.shape[-1])):
        for name, vector in vectors.items():
            if vector is not None and (vector.dim() != 1 or vector.shape[0] != length):
                raise ValueError(
                    f"{op}: `{name}` must have shape ({length},), got {tuple(vector.shape)}; give one number per "
                    "feature."
                )
    check_same(op, given)
    check_scalar(op, "eps", eps)
    if eps < 0:
        raise ValueError(f"{op}: `eps` must be >= 0, got {eps}; pass a small number such as 1e-5.")
