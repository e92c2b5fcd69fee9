"""What this installation can do, and what to install for the rest."""

from gem_parallel._src.engine_report import FeatureStatus, engine_report

__all__ = ["FeatureStatus", "engine_report"]
