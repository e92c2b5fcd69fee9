"""Learning rate over the steps of a run."""

import math
from dataclasses import dataclass

from gem_train.config import LearningRateDecay, TrainerConfig

__all__ = ["LearningRateSchedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
    """A multiplier in (0, 1]: linear warm-up, then a fall from 1 to `final_ratio`.

    It is a function of the step alone, so that it needs no state in a checkpoint.
    """

    warmup_steps: int
    """Steps of the rise; step 0 already moves, with 1 / warmup_steps."""
    total_steps: int
    """Steps of the whole run; later steps keep the final value."""
    decay: LearningRateDecay
    """Form of the fall."""
    final_ratio: float
    """Multiplier at the end of the fall."""

    @classmethod
    def from_config(cls, config: TrainerConfig, total_steps: int) -> "LearningRateSchedule":
        """The schedule of a run of `total_steps` steps."""
        return cls(
            warmup_steps=config.warmup_steps,
            total_steps=total_steps,
            decay=config.decay,
            final_ratio=config.final_learning_rate_ratio,
        )

    def __call__(self, step: int) -> float:
        """Multiplier for the step with this index, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = progress if self.decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
        return 1.0 - (1.0 - self.final_ratio) * fall
