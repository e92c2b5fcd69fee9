"""Errors of a run that its user can act on; the command line prints them as one line."""

__all__ = ["CheckpointError", "ConfigError", "NonFiniteError"]


class ConfigError(ValueError):
    """A setting, a recipe name or a run directory is not usable as given."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or belongs to another model or configuration."""


class NonFiniteError(RuntimeError):
    """A loss or gradient became NaN or infinite; nothing of that step was kept."""
