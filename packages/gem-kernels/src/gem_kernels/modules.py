"""nn.Module forms of the attention ops, without parameters.

A model that calls attention through a module lets a caller replace that module from outside, for example by a
low-precision one; the functions underneath are the same. What is fixed for a layer goes to the constructor; what
belongs to a batch, or is a parameter that the model owns, goes to the call, under the names of the function.
"""

from __future__ import annotations

from torch import Tensor, nn

from gem_kernels._src.attention.schedule import AttentionSchedule
from gem_kernels._src.block_attention.check import check_block_size
from gem_kernels._src.gdpa.activation import Activation, activation_name
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.jagged_attention.bias import check_buckets_per_octave
from gem_kernels._src.validate import check_bool, check_scalar, check_scale, check_window
from gem_kernels.block_attention import block_attention
from gem_kernels.gdpa import gdpa
from gem_kernels.gdpa_norm_block import gdpa_norm_block
from gem_kernels.jagged_attention import jagged_attention

__all__ = ["GDPA", "BlockAttention", "JaggedAttention"]


class JaggedAttention(nn.Module):
    """:func:`gem_kernels.jagged_attention` with its options fixed.

    Args:
        scale: Factor on the scores, > 0; default ``D ** -0.5``.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens, -1 = unbounded.
        time_buckets_per_octave: Buckets each time the gap doubles, 1, 2, 4 or 8, of the ``time_bias`` that each call
            then must give, if it is not 1.
    """

    def __init__(
        self,
        scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        time_buckets_per_octave: int = 1,
    ) -> None:
        super().__init__()
        if scale is not None:
            check_scale("JaggedAttention", scale)
        check_bool("JaggedAttention", causal=causal)
        check_window("JaggedAttention", window_size)
        check_buckets_per_octave("JaggedAttention", time_buckets_per_octave)
        self.scale = scale
        self.causal = causal
        self.window_size = window_size
        self.time_buckets_per_octave = time_buckets_per_octave

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        offsets_q: Tensor | None,
        offsets_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        position_bias: Tensor | None = None,
        time_bias: Tensor | None = None,
        times_q: Tensor | None = None,
        times_k: Tensor | None = None,
        request_index: Tensor | None = None,
        schedule: AttentionSchedule | None = None,
    ) -> Tensor:
        """Map q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v) to (T_q, H, D_v).

        Arguments, shapes and errors are those of :func:`gem_kernels.jagged_attention`: ``offsets_q=None`` makes q
        (S, H, D) seeds of every sequence, the bias tables are learned parameters of the caller.
        """
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
            position_bias=position_bias,
            time_bias=time_bias,
            times_q=times_q,
            times_k=times_k,
            time_buckets_per_octave=self.time_buckets_per_octave,
            request_index=request_index,
            schedule=schedule,
        )
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        return (
            f"scale={self.scale}, causal={self.causal}, window_size={self.window_size}, "
            f"time_buckets_per_octave={self.time_buckets_per_octave}"
        )


class GDPA(nn.Module):
    """:func:`gem_kernels.gdpa` with its options fixed.

    Args:
        activation: Name of the activation or an :class:`gem_kernels.Activation`, see :func:`gem_kernels.gdpa`; kept
            as the name.
        pre_scale: Factor on the scores, inside the activation.
        post_scale: Factor on the activated scores.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens, -1 = unbounded.
        recompute: Of calls with ``norm_block=True``, see :func:`gem_kernels.gdpa_norm_block`: ``False`` keeps two rows
            more for the backward in place of making them again, and is refused in calls without.

    Raises:
        ValueError: if an option does not fit, or ``recompute=False`` a layer that takes no ``norm_block``.
    """

    def __init__(
        self,
        activation: str | Activation = "gelu",
        pre_scale: float = 1.0,
        post_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        recompute: bool = True,
    ) -> None:
        super().__init__()
        check_scalar("GDPA", "pre_scale", pre_scale)
        check_scalar("GDPA", "post_scale", post_scale)
        check_bool("GDPA", causal=causal, recompute=recompute)
        check_window("GDPA", window_size)
        self.activation = activation_name("GDPA", activation)
        self.pre_scale = pre_scale
        self.post_scale = post_scale
        self.causal = causal
        self.window_size = window_size
        self.recompute = recompute
        if not recompute and not self.has_norm_block:
            raise ValueError(
                f"{type(self).__name__}: `recompute` must be True with {self._obstacle()}, as it is of calls with "
                "norm_block=True, which that rules out, got False; leave it out."
            )

    @property
    def has_norm_block(self) -> bool:
        """Whether ``forward`` takes ``norm_block=True`` and computes it in the dtype of its inputs, as it does without.

        What replaces the module may say no: its caller then computes the norms and sums around it.
        """
        return self._own_obstacle() is None

    def _obstacle(self) -> str | None:
        """Why ``has_norm_block`` is False, also where what replaces the module says so."""
        if self.has_norm_block:
            return None
        return self._own_obstacle() or f"`has_norm_block` False, as it is of this {type(self).__name__}"

    def _own_obstacle(self) -> str | None:
        """The setting that rules ``norm_block`` out."""
        if self.causal:
            return "`causal` True"
        if tuple(self.window_size) != (-1, -1):
            return f"`window_size` {tuple(self.window_size)}"
        if self.activation not in ACTIVATION_NAMES:
            return "an `activation` of your own"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        offsets_q: Tensor | None,
        offsets_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_targets: Tensor | None = None,
        request_index: Tensor | None = None,
        schedule: AttentionSchedule | None = None,
        norm_block: bool = False,
    ) -> Tensor:
        """Map q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v) to (T_q, H, D_v).

        Arguments, shapes and errors are those of :func:`gem_kernels.gdpa`: ``offsets_q=None`` makes q (S, H, D) seeds
        of every sequence. ``norm_block=True`` is :func:`gem_kernels.gdpa_norm_block` without weights: q is what comes
        before the layer norm, and the result is ``rms_norm(gdpa(n, k, v) + n) + q`` with ``n = layer_norm(q)``.

        Raises:
            ValueError: if ``norm_block`` is asked for with a mask, seeds, targets or requests, if it is not where
                ``recompute`` is False, or as the function.
        """
        check_bool(type(self).__name__, norm_block=norm_block)
        if norm_block:
            in_call = {
                "`offsets_q` None": offsets_q is None,
                "`num_targets`": num_targets is not None,
                "`request_index`": request_index is not None,
            }
            obstacle = self._obstacle() or next((what for what, given in in_call.items() if given), None)
            if obstacle is not None:
                raise ValueError(
                    f"{type(self).__name__}: `norm_block` must be False with {obstacle}, got True; compute the norms "
                    "and sums around the layer."
                )
            assert offsets_q is not None
            return gdpa_norm_block(
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
                recompute=self.recompute,
                schedule=schedule,
            )
        # Of a layer that a recipe has replaced, the caller could do nothing else.
        if not self.recompute and self.has_norm_block:
            raise ValueError(
                f"{type(self).__name__}: `recompute` must be True in a call without `norm_block`, as it is of the "
                "others, got False; pass norm_block=True, or make the layer without `recompute`."
            )
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
            num_targets=num_targets,
            request_index=request_index,
            schedule=schedule,
        )

    def extra_repr(self) -> str:
        return (
            f"activation={self.activation!r}, pre_scale={self.pre_scale}, post_scale={self.post_scale}, "
            f"causal={self.causal}, window_size={self.window_size}, recompute={self.recompute}"
        )


class BlockAttention(nn.Module):
    """:func:`gem_kernels.block_attention` with its options fixed.

    Args:
        block_size: Tokens of a block: 32, 64 or 128.
        scale: Factor on the scores, > 0; default ``D ** -0.5``.
    """

    def __init__(self, block_size: int = 64, scale: float | None = None) -> None:
        super().__init__()
        check_block_size("BlockAttention", block_size)
        if scale is not None:
            check_scale("BlockAttention", scale)
        self.block_size = block_size
        self.scale = scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor, max_seqlen: int, rotary: Tensor | None = None
    ) -> Tensor:
        """Map q (T, H, D), k (T, H_kv, D), v (T, H_kv, D_v) to (T, H, D_v).

        Arguments, shapes and errors are those of :func:`gem_kernels.block_attention`.
        """
        return block_attention(
            q,
            k,
            v,
            offsets=offsets,
            max_seqlen=max_seqlen,
            block_size=self.block_size,
            scale=self.scale,
            rotary=rotary,
        )

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, scale={self.scale}"
