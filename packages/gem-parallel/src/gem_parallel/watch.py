"""Ranks that die, end early or lag are named within a bound."""

from gem_parallel._src.watch import HANG_EXIT_CODE, HangReport, MissingRank, RankState, RankWatch, find_missing

__all__ = ["HANG_EXIT_CODE", "HangReport", "MissingRank", "RankState", "RankWatch", "find_missing"]
