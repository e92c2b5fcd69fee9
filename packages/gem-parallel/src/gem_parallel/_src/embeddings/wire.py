"""Rows between ranks, in the precision asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_parallel._src.embeddings.link import Link

__all__ = ["WIRE_DTYPES", "RowTransfer", "bytes_per_row", "pack_rows", "unpack_rows"]

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

# Scaled rows stay below these powers of two: under 65504 and under 448.
_SCALED_EXPONENT = {torch.float16: 15, torch.float8_e4m3fn: 8}
_SCALE_BYTES = 4


def bytes_per_row(dim: int, wire_dtype: torch.dtype) -> int:
    """Bytes of one row on the wire."""
    return dim * wire_dtype.itemsize + (_SCALE_BYTES if wire_dtype in _SCALED_EXPONENT else 0)


def _power_of_two(exponent: Tensor) -> Tensor:
    """float32 2 ** exponent of int32 exponents in [-126, 127], exact on every device, as ``pow`` need not be."""
    return ((exponent + 127) << 23).view(torch.float32)


def pack_rows(rows: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """float32 rows (N, dim) as bytes, (N, bytes_per_row) uint8.

    float16 and float8_e4m3fn rows carry a float32 scale, the power of two that brings the row's largest magnitude to
    the top of the format: small gradients keep their bits and none overflows. A row with a NaN arrives with it.
    """
    rows = rows.contiguous()
    if wire_dtype not in _SCALED_EXPONENT:
        return rows.to(wire_dtype).view(torch.uint8)
    num_rows, dim = rows.shape
    exponent = torch.frexp(rows.abs().amax(1, keepdim=True)).exponent - _SCALED_EXPONENT[wire_dtype]
    exponent = exponent.clamp(-126, 126)
    packed = torch.empty(num_rows, bytes_per_row(dim, wire_dtype), dtype=torch.uint8, device=rows.device)
    packed[:, :-_SCALE_BYTES] = (rows * _power_of_two(-exponent)).to(wire_dtype).view(torch.uint8)
    packed[:, -_SCALE_BYTES:] = _power_of_two(exponent).view(torch.uint8)
    return packed


def unpack_rows(packed: Tensor, wire_dtype: torch.dtype, out: Tensor) -> None:
    """Undo ``pack_rows`` into ``out`` (N, dim) float32."""
    if wire_dtype not in _SCALED_EXPONENT:
        out.copy_(packed.view(wire_dtype))
        return
    scale = packed[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    torch.mul(packed[:, :-_SCALE_BYTES].contiguous().view(wire_dtype).float(), scale, out=out)


class RowTransfer:
    """An all-to-all of float32 rows (sum(send_splits), dim) under way.

    ``wait`` gives (sum(receive_splits) + extra, dim) float32, the extra rows at its end zero.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        send_splits: list[int],
        receive_splits: list[int],
        link: Link,
        wire_dtype: torch.dtype,
        what: str,
        extra: int = 0,
    ) -> None:
        total = sum(receive_splits)
        self._wire_dtype = wire_dtype
        self._out = rows.new_empty(total + extra, rows.shape[1], dtype=torch.float32)
        if extra:
            self._out[total:].zero_()
        self._arriving = self._out[:total]
        # Held until the transfer is done.
        self._sent = rows.contiguous()
        if wire_dtype != torch.float32:
            self._sent = pack_rows(rows, wire_dtype)
            self._arriving = self._sent.new_empty(total, self._sent.shape[1])
        self._work = link.all_to_all(self._arriving, self._sent, receive_splits, send_splits, what=what)

    def wait(self) -> Tensor:
        """The rows that arrived; on CUDA the current stream waits, not the host."""
        self._work.wait()
        if self._wire_dtype != torch.float32:
            unpack_rows(self._arriving, self._wire_dtype, self._out[: self._arriving.shape[0]])
        return self._out
