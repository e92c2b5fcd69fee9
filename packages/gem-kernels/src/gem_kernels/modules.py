"""nn.Module forms of the attention ops, without parameters.

A model that calls attention through a module lets a caller replace that module from outside, for example by a
low-precision one; the functions underneath are the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from gem_kernels._src.block_attention.check import check_block_size
from gem_kernels._src.gdpa.activation import Activation, activation_name
from gem_kernels._src.validate import check_scalar, check_scale, check_window
from gem_kernels.block_attention import block_attention
from gem_kernels.gdpa import gdpa
from gem_kernels.jagged_attention import jagged_attention

__all__ = ["GDPA", "BlockAttention", "JaggedAttention"]


class JaggedAttention(nn.Module):
    """:func:`gem_kernels.jagged_attention` with its options fixed.

    Args:
        scale: Factor on the scores; default ``D ** -0.5``.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens, -1 = unbounded.
    """

    def __init__(
        self, scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> None:
        super().__init__()
        if scale is not None:
            check_scale("JaggedAttention", scale)
        check_window("JaggedAttention", window_size)
        self.scale = scale
        self.causal = causal
        self.window_size = window_size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        offsets_q: Tensor,
        offsets_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Tensor:
        """Map q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v) to (T_q, H, D_v)."""
        out = jagged_attention(
            q,
            k,
            v,
            offsets_q=offsets_q,
            offsets_k=offsets_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            scale=self.scale,
            causal=self.causal,
            window_size=self.window_size,
        )
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        return f"scale={self.scale}, causal={self.causal}, window_size={self.window_size}"


class GDPA(nn.Module):
    """:func:`gem_kernels.gdpa` with its options fixed.

    Args:
        activation: Name of the activation or an :class:`gem_kernels.Activation`, see :func:`gem_kernels.gdpa`; kept
            as the name.
        pre_scale: Factor on the scores, inside the activation.
        post_scale: Factor on the activated scores.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens, -1 = unbounded.
    """

    def __init__(
        self,
        activation: str | Activation = "gelu",
        pre_scale: float = 1.0,
        post_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> None:
        super().__init__()
        check_scalar("GDPA", "pre_scale", pre_scale)
        check_scalar("GDPA", "post_scale", post_scale)
        check_window("GDPA", window_size)
        self.activation = activation_name("GDPA", activation)
        self.pre_scale = pre_scale
        self.post_scale = post_scale
        self.causal = causal
        self.window_size = window_size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        offsets_q: Tensor,
        offsets_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Tensor:
        """Map q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v) to (T_q, H, D_v)."""
        return gdpa(
            q,
            k,
            v,
            offsets_q=offsets_q,
            offsets_k=offsets_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            activation=self.activation,
            pre_scale=self.pre_scale,
            post_scale=self.post_scale,
            causal=self.causal,
            window_size=self.window_size,
        )

    def extra_repr(self) -> str:
        return (
            f"activation={self.activation!r}, pre_scale={self.pre_scale}, post_scale={self.post_scale}, "
            f"causal={self.causal}, window_size={self.window_size}"
        )


class BlockAttention(nn.Module):
    """:func:`gem_kernels.block_attention` with its options fixed.

    Args:
        block_size: Tokens of a block: 32, 64 or 128.
        scale: Factor on the scores; default ``D ** -0.5``.
    """

    def __init__(self, block_size: int = 64, scale: float | None = None) -> None:
        super().__init__()
        check_block_size("BlockAttention", block_size)
        if scale is not None:
            check_scalar("BlockAttention", "scale", scale)
        self.block_size = block_size
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor, max_seqlen: int) -> Tensor:
        """Map q (T, H, D), k (T, H_kv, D), v (T, H_kv, D_v) to (T, H, D_v)."""
        return block_attention(
            q, k, v, offsets=offsets, max_seqlen=max_seqlen, block_size=self.block_size, scale=self.scale
        )

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, scale={self.scale}"
