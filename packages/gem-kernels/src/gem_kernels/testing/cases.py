"""Sequence lengths that break tile code: empty, one token, one off the tile on both sides, one long outlier."""

from __future__ import annotations

from dataclasses import dataclass

DEGENERATE_LENGTHS = (0, 1, 63, 64, 65)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCase:
    """Query and key lengths of one batch."""

    id: str
    lengths_q: tuple[int, ...]
    """Tokens per query sequence."""
    lengths_k: tuple[int, ...]
    """Tokens per key sequence; as many as ``lengths_q``."""

    def __post_init__(self) -> None:
        if len(self.lengths_q) != len(self.lengths_k):
            raise ValueError(
                f"LengthCase: `lengths_k` must have {len(self.lengths_q)} entries like `lengths_q`, got "
                f"{len(self.lengths_k)}; give both sides the same sequences."
            )

    @property
    def max_seqlen_q(self) -> int:
        """Longest query sequence, in tokens."""
        return max(self.lengths_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Longest key sequence, in tokens."""
        return max(self.lengths_k, default=0)


LENGTH_CASES: list[LengthCase] = [
    LengthCase(id="tile-edges", lengths_q=DEGENERATE_LENGTHS, lengths_k=DEGENERATE_LENGTHS),
    LengthCase(id="differing", lengths_q=(1, 65, 63, 0, 64, 7), lengths_k=(64, 1, 65, 63, 0, 30)),
    LengthCase(id="zero-q", lengths_q=(0, 0, 0), lengths_k=(3, 64, 1)),
    LengthCase(id="zero-kv", lengths_q=(3, 64, 1), lengths_k=(0, 0, 0)),
    LengthCase(id="all-empty", lengths_q=(0, 0), lengths_k=(0, 0)),
    LengthCase(id="no-sequences", lengths_q=(), lengths_k=()),
    LengthCase(id="one-sequence", lengths_q=(37,), lengths_k=(37,)),
    LengthCase(id="one-token", lengths_q=(1, 1), lengths_k=(1, 1)),
    LengthCase(id="outlier", lengths_q=(2, 0, 210, 5), lengths_k=(3, 1, 210, 0)),
    LengthCase(id="pooling", lengths_q=(4, 4, 4, 4), lengths_k=(0, 1, 65, 130)),
    LengthCase(id="short-kv", lengths_q=(0, 1, 65, 130), lengths_k=(8, 8, 16, 9)),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskCase:
    """Which pairs of a sequence may meet."""

    id: str
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)


MASK_CASES: list[MaskCase] = [
    MaskCase(id="full"),
    MaskCase(id="causal", causal=True),
    MaskCase(id="window", window_size=(5, 3)),
    MaskCase(id="causal-window", causal=True, window_size=(70, -1)),
    MaskCase(id="right-only", window_size=(-1, 4)),
    MaskCase(id="left-only", window_size=(9, -1)),
    MaskCase(id="diagonal", window_size=(0, 0)),
    MaskCase(id="wide-window", window_size=((1 << 62) - 1, (1 << 62) - 1)),
]
