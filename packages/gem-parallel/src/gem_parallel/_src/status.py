"""One line of a report on what can be used."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FeatureStatus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureStatus:
    """One line of the report."""

    feature: str
    available: bool
    reason: str
    """What was found, or why the feature is not available."""
    remedy: str = ""
    """What to install or change; empty when available."""
