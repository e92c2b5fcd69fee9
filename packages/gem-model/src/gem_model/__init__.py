"""The hybrid ranking model: sequence towers and non-sequence towers that learn from each other."""

from gem_model import presets, protocols
from gem_model._version import __version__
from gem_model.capturing import capture_segments
from gem_model.config import RankingConfig, SequenceTowerConfig
from gem_model.flops import FlopCount
from gem_model.model import Loss, RankingModel
from gem_model.random_batch import random_batch

__all__ = [
    "FlopCount",
    "Loss",
    "RankingConfig",
    "RankingModel",
    "SequenceTowerConfig",
    "__version__",
    "capture_segments",
    "presets",
    "protocols",
    "random_batch",
]
