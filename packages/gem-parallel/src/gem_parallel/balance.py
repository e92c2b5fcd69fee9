"""Samples of a batch spread over ranks by what they cost."""

from gem_parallel._src.balance.cost import LengthCost
from gem_parallel._src.balance.move import Samples
from gem_parallel._src.balance.samples import Assignment, BalanceReport, SampleShare, balance_samples

__all__ = ["Assignment", "BalanceReport", "LengthCost", "SampleShare", "Samples", "balance_samples"]
