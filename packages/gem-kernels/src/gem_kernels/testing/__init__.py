"""What tests and benchmarks of packed-sequence ops share: case lists, random jagged inputs, error measures."""

from gem_kernels.testing.cases import DEGENERATE_LENGTHS, LENGTH_CASES, MASK_CASES, LengthCase, MaskCase
from gem_kernels.testing.inputs import (
    AttentionInputs,
    attention_inputs,
    make_offsets,
    random_lengths,
    sequence_of_row,
    zipf_lengths,
)
from gem_kernels.testing.numerics import assert_matches_oracle, assert_rms, max_error, rounding_floor, summation_floor

__all__ = [
    "DEGENERATE_LENGTHS",
    "LENGTH_CASES",
    "MASK_CASES",
    "AttentionInputs",
    "LengthCase",
    "MaskCase",
    "assert_matches_oracle",
    "assert_rms",
    "attention_inputs",
    "make_offsets",
    "max_error",
    "random_lengths",
    "rounding_floor",
    "sequence_of_row",
    "summation_floor",
    "zipf_lengths",
]
