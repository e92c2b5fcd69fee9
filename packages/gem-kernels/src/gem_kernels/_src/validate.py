"""Checks shared by the packed-sequence ops: shapes, dtypes and devices; offset values where reading them is free."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FLOAT_DTYPES_CUDA = (torch.float16, torch.bfloat16, torch.float32)
_FLOAT_DTYPES = (*_FLOAT_DTYPES_CUDA, torch.float64)
_OFFSET_DTYPES = (torch.int32, torch.int64)
_MAX_FLOAT32 = torch.finfo(torch.float32).max


class DtypeError(TypeError, ValueError):
    """A tensor has a dtype that an op does not take: caught as either, as it is both a wrong type and a bad input."""


def check_bool(op: str, **flags: Any) -> None:
    """Raise unless every flag is a bool: of other values the truth is easily not the one that was meant."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: `{name}` must be a bool, got {type(value).__name__}; pass True or False.")


def reads_values(validate: bool) -> bool:
    """Whether an op on CUDA waits for the values of offsets and indices: when told to, or always while debugging."""
    return validate or os.environ.get("GEM_KERNELS_DEBUG", "0") not in ("", "0")


def check_dense(op: str, name: str, x: Any) -> None:
    """Raise unless ``x`` is a tensor with rows in memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: `{name}` must be a Tensor, got {type(x).__name__}; convert it with torch.as_tensor.")
    # A traced backward may not ask for the layout.
    if x.is_nested or (not torch.compiler.is_compiling() and x.layout != torch.strided):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(
            f"{op}: `{name}` must be a dense Tensor, got a {kind} one; pass its packed rows, `values()` of a nested "
            "tensor in the jagged layout, and its offsets."
        )


def check_tensor(op: str, name: str, x: Any) -> None:
    """Raise unless ``x`` is dense and nothing follows it that an op has no formula for.

    That is a tangent of forward-mode AD, which an op would take for zero, and torch.func.grad, whose own error names
    neither the op nor a way.
    """
    check_dense(op, name, x)
    # Nearly always outside of forward-mode AD; this one number says so without an op for every tensor.
    if getattr(forward_ad, "_current_level", 0) >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"{op}: `{name}` must have no tangent of forward-mode AD (torch.func.jvp, jacfwd, forward_ad), as {op} has "
            "a backward formula only, got one; use torch.autograd.grad, or detach the tensor."
        )
    if x.requires_grad and not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(x):
        raise NotImplementedError(
            f"{op}: `{name}` must be no tensor of torch.func (grad, vjp, jacrev), which knows no backward of a custom "
            "op, got one; use torch.autograd.grad."
        )


def check_float(op: str, name: str, x: Tensor) -> None:
    """Raise unless ``x`` has a floating point dtype that the kernels of its device read."""
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{op}: `{name}` must be a floating point tensor, got {x.dtype}; cast it first.")
    if x.device.type == "cuda" and x.dtype not in _FLOAT_DTYPES_CUDA:
        raise DtypeError(
            f"{op}: `{name}` must be float16, bfloat16 or float32 on CUDA, got {x.dtype}; "
            "cast it or move it to the CPU."
        )
    if x.dtype not in _FLOAT_DTYPES:
        raise DtypeError(f"{op}: `{name}` must be float16, bfloat16, float32 or float64, got {x.dtype}; cast it first.")


def check_values(op: str, name: str, x: Tensor) -> None:
    """Raise unless ``x`` is a packed (T, H, D) float tensor that the kernels of its device can read."""
    check_tensor(op, name, x)
    if x.dim() != 3:
        raise ValueError(
            f"{op}: `{name}` must have shape (T, H, D), got {tuple(x.shape)}; pack the sequences along dim 0 first."
        )
    check_float(op, name, x)
    if x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(
            f"{op}: `{name}` must have at least one head and one channel, got {tuple(x.shape)}; "
            "reshape it to (T, H, D)."
        )


def check_offsets(op: str, name: str, offsets: Tensor, like: Tensor) -> None:
    """Raise unless ``offsets`` is a (B + 1,) integer tensor on the device of ``like``."""
    if not isinstance(offsets, Tensor):
        raise TypeError(
            f"{op}: `{name}` must be a Tensor of shape (B + 1,), got {type(offsets).__name__}; "
            "make it with lengths_to_offsets of the lengths."
        )
    check_tensor(op, name, offsets)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(
            f"{op}: `{name}` must have shape (B + 1,) with B >= 0, got {tuple(offsets.shape)}; "
            "make it with lengths_to_offsets of the lengths."
        )
    if offsets.dtype not in _OFFSET_DTYPES:
        raise DtypeError(
            f"{op}: `{name}` must be int32 or int64, got {offsets.dtype}; cast it with `.to(torch.int64)`."
        )
    if offsets.device != like.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of the values, {like.device}, got {offsets.device}; move it there."
        )


def check_same(op: str, tensors: dict[str, Tensor]) -> None:
    """Raise unless all named tensors share one dtype and one device."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.dtype != first.dtype:
            raise DtypeError(
                f"{op}: `{name}` must have the dtype of `{first_name}`, {first.dtype}, got {x.dtype}; cast one of them."
            )
        check_device(op, name, x, first_name, first)


def check_device(op: str, name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    """Raise unless ``x`` is on the device of ``first``."""
    if x.device != first.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of `{first_name}`, {first.device}, got {x.device}; move one."
        )


def check_constant(op: str, name: str, x: Tensor) -> None:
    """Raise if autograd would follow ``x``, to which the op gives no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: `{name}` gets no gradient, got a tensor that requires one; pass `{name}.detach()`.")


def check_int(op: str, name: str, value: Any, remedy: str = "pass int(x)") -> None:
    """Raise unless ``value`` is a Python int; numpy's are not, a tensor would need a device sync."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: `{name}` must be a Python int, got {type(value).__name__}; {remedy}.")
    check_magnitude(op, name, value)


def check_magnitude(op: str, name: str, value: Any) -> None:
    """Raise on an int that does not fit in 64 bits with any position added to it."""
    # Not asked of traced sizes, which would have to be guarded, and which are ints to a trace.
    if isinstance(value, int) and not torch.compiler.is_compiling() and abs(value) >= 2**62:
        raise ValueError(f"{op}: `{name}` must be below 2**62, got {value}; no sequence is as long.")


def check_max_seqlen(op: str, name: str, max_seqlen: int) -> None:
    """Raise unless ``max_seqlen`` is a non-negative int (a Python int: a tensor would need a device sync)."""
    check_int(op, name, max_seqlen, "keep the longest length on the host, or an upper bound of it, and pass int(x)")
    if max_seqlen < 0:
        raise ValueError(f"{op}: `{name}` must be >= 0 tokens, got {max_seqlen}; pass the longest length or more.")


def check_offset_values(op: str, name: str, offsets: Tensor, total: int, max_name: str, max_seqlen: int) -> None:
    """Raise unless ``offsets`` rise from 0 to ``total`` in steps of at most ``max_seqlen``.

    Reads the offsets, which waits for the device when they are not on the CPU.
    """
    lengths = torch.diff(offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{op}: `{name}` must start at 0, got {first}; rebase the offsets to the packed tensor.")
    if last != total:
        raise ValueError(
            f"{op}: `{name}` must end at the number of packed rows, {total}, got {last}; "
            "make them with lengths_to_offsets of the lengths, and pass all rows or the right number of them."
        )
    if lengths.numel() == 0:
        return
    shortest, longest = (int(x) for x in torch.aminmax(lengths))
    if shortest < 0:
        b = int(torch.argmin(lengths))
        raise ValueError(
            f"{op}: `{name}` must not decrease, got {int(offsets[b])} then {int(offsets[b + 1])} at sequence {b}; "
            "make them with lengths_to_offsets of the lengths."
        )
    if longest > max_seqlen:
        b = int(torch.argmax(lengths))
        raise ValueError(
            f"{op}: `{max_name}` must be at least the longest sequence, {longest} tokens (sequence {b}), "
            f"got {max_seqlen}; pass the longest length or more."
        )


def check_capacity(op: str, name: str, max_name: str, max_seqlen: int, num_sequences: int, total: int) -> None:
    """Raise when ``total`` rows cannot fit in ``num_sequences`` of ``max_seqlen`` tokens; needs no device read."""
    if total > num_sequences * max_seqlen:
        raise ValueError(
            f"{op}: `{max_name}` must be at least the longest sequence, got {max_seqlen} tokens, "
            f"but `{name}` spreads {total} rows over {num_sequences} sequences; pass the longest length or more."
        )


def check_index(op: str, name: str, index: Tensor, shape: str, count: int | None, like: Tensor) -> None:
    """Raise unless ``index`` is a 1-D integer tensor of ``count`` entries (any, if None) on the device of ``like``."""
    if not isinstance(index, Tensor):
        raise TypeError(
            f"{op}: `{name}` must be a Tensor of shape {shape}, got {type(index).__name__}; "
            "convert it with torch.as_tensor."
        )
    check_tensor(op, name, index)
    if index.dim() != 1 or (count is not None and index.shape[0] != count):
        expected = shape if count is None else f"{shape} = ({count},)"
        raise ValueError(
            f"{op}: `{name}` must have shape {expected}, one entry per query sequence, got {tuple(index.shape)}; "
            "drop or add entries so that it does."
        )
    if index.dtype not in _OFFSET_DTYPES:
        raise DtypeError(f"{op}: `{name}` must be int32 or int64, got {index.dtype}; cast it with `.to(torch.int64)`.")
    if index.device != like.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of the values, {like.device}, got {index.device}; move it there."
        )


def check_targets(
    op: str,
    num_targets: Tensor,
    q: Tensor,
    k: Tensor,
    offsets_q: Tensor | None,
    request_index: Tensor | None,
) -> None:
    """Raise unless ``num_targets`` is a (B,) integer tensor and the inputs look like self-attention."""
    if offsets_q is None:
        raise ValueError(
            f"{op}: `num_targets` must be None when `offsets_q` is None, got a tensor; "
            "targets are rows of self-attention, seeds are not."
        )
    if request_index is not None:
        raise ValueError(
            f"{op}: `num_targets` must be None when `request_index` is given, got both; "
            "use targets at the end of each user's sequence, or query sequences of their own."
        )
    check_index(op, "num_targets", num_targets, "(B,)", offsets_q.shape[0] - 1, q)
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{op}: `num_targets` needs self-attention, `k` with the rows of `q`, {q.shape[0]}, got {k.shape[0]}; "
            "pass the same tokens on both sides, or no `num_targets`."
        )


def check_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    request_index: Tensor | None = None,
) -> None:
    """Raise on any shape, dtype or device mismatch of packed attention inputs; never reads tensor data.

    ``offsets_q=None`` means that q holds the seeds that every sequence shares.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_values(op, name, x)
    check_same(op, {"q": q, "k": k, "v": v})
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{op}: `v` must have as many rows as `k`, {k.shape[0]}, got {v.shape[0]}; "
            "make both from the same packed tokens."
        )
    if k.shape[1] != v.shape[1]:
        raise ValueError(
            f"{op}: `v` must have as many heads as `k`, {k.shape[1]}, got {v.shape[1]}; "
            "give both the same number of heads."
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"{op}: `k` must have the head dim of `q`, {q.shape[2]}, got {k.shape[2]}; project both to one width."
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{op}: the heads of `k` must divide the heads of `q`, got {k.shape[1]} and {q.shape[1]}; "
            "repeat or drop heads so that they do."
        )
    if offsets_q is not None:
        check_offsets(op, "offsets_q", offsets_q, q)
    check_offsets(op, "offsets_k", offsets_k, k)
    check_pairing(op, offsets_q, offsets_k, request_index, q)
    check_max_seqlen(op, "max_seqlen_q", max_seqlen_q)
    check_max_seqlen(op, "max_seqlen_k", max_seqlen_k)


def check_pairing(
    op: str, offsets_q: Tensor | None, offsets_k: Tensor, request_index: Tensor | None, values: Tensor
) -> None:
    """Raise unless every query sequence has its key sequence: as many of both, or an index of as many as queries."""
    if request_index is not None:
        count = None if offsets_q is None else offsets_q.shape[0] - 1
        check_index(op, "request_index", request_index, "(B,)", count, values)
    elif offsets_q is not None and offsets_q.shape[0] != offsets_k.shape[0]:
        raise ValueError(
            f"{op}: `offsets_k` must have shape (B + 1,) = ({offsets_q.shape[0]},) like `offsets_q`, "
            f"got ({offsets_k.shape[0]},); give both sides the same sequences, with length 0 where one is empty."
        )


def check_window(op: str, window_size: tuple[int, int]) -> None:
    """Raise unless ``window_size`` is a pair of ints >= -1."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(
            f"{op}: `window_size` must be a pair (left, right) of ints, got {window_size!r}; use -1 for unbounded."
        )
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(
                f"{op}: `window_size` must be a pair (left, right) of ints, got {window_size!r}; use -1 for unbounded."
            )
        check_magnitude(op, "window_size", side)
        if side < -1:
            raise ValueError(
                f"{op}: `window_size` must hold tokens >= 0, or -1 for unbounded, got {tuple(window_size)}; "
                "use -1 for no bound on that side."
            )


def check_scalar(op: str, name: str, value: float) -> None:
    """Raise unless ``value`` is a Python number that float32, in which kernels compute, holds; a tensor would need a
    device sync.
    """
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"{op}: `{name}` must be a Python float, got {type(value).__name__}; keep it on the host and pass float(x)."
        )
    # Not math.isfinite, which torch.compile cannot trace. An int may be beyond every float.
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
        raise ValueError(f"{op}: `{name}` must be finite, got {value}; pass a number that float32 holds, below 3.4e38.")


def check_scale(op: str, scale: float) -> None:
    """Raise unless ``scale`` is a finite Python number > 0."""
    check_scalar(op, "scale", scale)
    if not scale > 0:
        remedy = "negate q for a negative one" if scale < 0 else "multiply the output by 0 for it"
        raise ValueError(f"{op}: `scale` must be > 0, got {scale}; {remedy}.")


def check_request_values(op: str, request_index: Tensor, num_requests: int) -> None:
    """Raise unless ``request_index`` does not decrease and stays in [0, num_requests); reads it."""
    if request_index.numel() == 0:
        return
    steps = torch.diff(request_index)
    if bool((steps < 0).any()):
        i = int(torch.argmin(steps))
        raise ValueError(
            f"{op}: `request_index` must not decrease, got {int(request_index[i])} then {int(request_index[i + 1])} "
            f"at query sequence {i}; sort the query sequences by request."
        )
    first, last = int(request_index[0]), int(request_index[-1])
    if first < 0 or last >= num_requests:
        raise ValueError(
            f"{op}: `request_index` must name one of the {num_requests} key sequences of `offsets_k`, "
            f"got {first if first < 0 else last}; count the key sequences from 0."
        )


def check_target_values(op: str, num_targets: Tensor, offsets_q: Tensor, offsets_k: Tensor) -> None:
    """Raise unless 0 <= ``num_targets`` <= length, and both sides have the same lengths; reads all three."""
    if not torch.equal(offsets_q.long(), offsets_k.long()):
        b = int((offsets_q.long() != offsets_k.long()).nonzero()[0])
        raise ValueError(
            f"{op}: `num_targets` needs self-attention, equal `offsets_q` and `offsets_k`, "
            f"got {int(offsets_q[b])} and {int(offsets_k[b])} at entry {b}; "
            "pass the same offsets on both sides, or no `num_targets`."
        )
    lengths = torch.diff(offsets_q)
    outside = (num_targets < 0) | (num_targets > lengths)
    if bool(outside.any()):
        b = int(outside.nonzero()[0])
        raise ValueError(
            f"{op}: `num_targets` must be between 0 and the length of its sequence, {int(lengths[b])} tokens "
            f"(sequence {b}), got {int(num_targets[b])}; count the last rows of the sequence that are targets."
        )


def check_batch(
    op: str,
    q: Tensor,
    k: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    request_index: Tensor | None = None,
    num_targets: Tensor | None = None,
    read_offsets: bool,
) -> None:
    """Raise when the lengths do not fit the packed rows; reads the offsets and indices only if ``read_offsets``."""
    num_requests = offsets_k.shape[0] - 1
    if offsets_q is None and q.shape[0] > max_seqlen_q:
        raise ValueError(
            f"{op}: `max_seqlen_q` must be at least the rows of `q` when `offsets_q` is None, {q.shape[0]}, "
            f"got {max_seqlen_q}; pass the number of rows."
        )
    if request_index is not None and request_index.shape[0] > 0 and num_requests == 0:
        raise ValueError(
            f"{op}: `request_index` must be empty when `offsets_k` holds no key sequence, "
            f"got {request_index.shape[0]} entries; pass the key sequences that they name."
        )
    for name, offsets, x, max_seqlen in (
        ("q", offsets_q, q, max_seqlen_q),
        ("k", offsets_k, k, max_seqlen_k),
    ):
        if offsets is None:
            continue
        check_capacity(op, f"offsets_{name}", f"max_seqlen_{name}", max_seqlen, offsets.shape[0] - 1, x.shape[0])
        if read_offsets:
            check_offset_values(op, f"offsets_{name}", offsets, x.shape[0], f"max_seqlen_{name}", max_seqlen)
    if read_offsets and request_index is not None:
        check_request_values(op, request_index, num_requests)
    if read_offsets and num_targets is not None:
        assert offsets_q is not None  # by check_targets
        check_target_values(op, num_targets, offsets_q, offsets_k)
