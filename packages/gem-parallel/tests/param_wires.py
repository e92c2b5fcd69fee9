"""A wire format for tests: a byte per element and one scale in two bytes per block of rows."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, kw_only=True)
class ByteWire:
    """round(x / scale) + 128 in a byte; scale is the power of two that a block of rows' largest magnitude needs."""

    rows_per_block: int = 1
    name: ClassVar[str] = "byte"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)

    def covers(self, shape):
        return len(shape) > 1 and shape[-1] > 2

    def row_bytes(self, num_columns):
        return num_columns + 2

    def encode(self, x):
        values = x.float()
        size = values.abs().amax(1).clamp_min(2.0**-100)
        blocks = [part.amax().expand(len(part)) for part in size.split(self.rows_per_block)]
        exponent = (torch.cat(blocks) / 127).log2().ceil()
        codes = (values / exponent.exp2()[:, None]).round() + 128
        scale = (exponent + 256)[:, None]
        return torch.cat([codes, scale // 256, scale % 256], dim=1).to(torch.uint8)

    def decode(self, rows, num_columns, dtype):
        high, low = rows[:, num_columns].float(), rows[:, num_columns + 1].float()
        exponent = high * 256 + low - 256
        return ((rows[:, :num_columns].float() - 128) * exponent.exp2()[:, None]).to(dtype)

    def round(self, x):
        return self.decode(self.encode(x), x.shape[1], x.dtype)


def rounded(wire, parameter, dtype):
    """What compute reads of a whole master weight."""
    x = parameter.detach().to(dtype)
    return wire.round(x.reshape(-1, x.shape[-1])).view(x.shape) if wire.covers(tuple(x.shape)) else x
