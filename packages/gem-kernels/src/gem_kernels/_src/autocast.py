"""Autocast for ops that are one custom op: torch's dispatcher does not know which dtype they want."""

from __future__ import annotations

import torch
from torch import Tensor

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def autocast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Inside ``torch.autocast`` of the tensors' device, cast them to its dtype, as torch does for matmul operands.

    float64 stays as it is, also as in torch, and so does what no matmul takes, for the checks to refuse. Operands need
    not agree in dtype before: under autocast one may come from
    a linear layer and another from a norm, so this goes before the checks, and leaves what is no tensor to them.
    """
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    device_type = tensors[0].device.type
    # torch knows no autocast for "meta" and raises when asked.
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype in _CAST else x for x in tensors)
