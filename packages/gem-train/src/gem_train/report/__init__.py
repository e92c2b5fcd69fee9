"""A run's result as one HTML page that needs nothing else."""

from gem_train.report.page import write_report

__all__ = ["write_report"]
