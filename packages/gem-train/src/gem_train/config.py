"""Settings of the training loop."""

from dataclasses import dataclass
from typing import Literal

from gem_train.checks import check_fields, default_of
from gem_train.errors import ConfigError

__all__ = ["PRECISIONS", "TrainerConfig"]

PRECISIONS = ("fp32", "bf16", "bf16_activations", "mxfp8")
"""Names of gem_precision's recipes, said again here because fp32 does without that package."""

MAX_SECONDS = 1e9
"""Of a limit that threads wait for, far below where their timers overflow."""

LearningRateDecay = Literal["cosine", "linear", "constant"]
CaptureMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """How long to train, how to step, and when to look.

    The learning rate of the sparse tables follows the same multiplier as the dense one, from its own base.
    """

    learning_rate: float = 1e-3
    """Peak learning rate of the dense AdamW."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.99
    """Decay of AdamW's second moment; lower than in language models because one pass over the data is short."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of dense weights with two or more dims; biases and norms are never decayed."""
    max_grad_norm: float = 1.0
    """Bound on the global norm of the dense gradients; 0 switches clipping off."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    decay: LearningRateDecay = "cosine"
    """Form of the fall from the peak to `final_learning_rate_ratio` at the last planned step."""
    final_learning_rate_ratio: float = 0.0
    """Learning rate at the last planned step, as a fraction of the peak."""
    max_steps: int | None = None
    """Stop after this many steps; none trains to the end of the data."""
    max_seconds: float | None = None
    """Stop early after this many seconds; the schedule does not follow it, so that results differ by machine."""
    step_timeout_s: float = 300.0
    """Seconds that a step of several processes may take, reading and compiling included; a longer one ends the run and
    names the ranks that the others wait for. Evaluations and checkpoints do not count; 0 sets no limit."""
    capture: CaptureMode = "auto"
    """CUDA graphs for the parts of the model that run over samples, which spare the host most of a step's launches and
    change no result: auto uses them where they can be and says why where they cannot, on refuses a run without."""
    log_interval: int = 20
    """Steps between log records; the metrics of a record cover the steps since the last one."""
    eval_interval: int = 0
    """Steps between evaluations of the validation split; 0 evaluates at the end only."""
    checkpoint_interval: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 2
    """Published checkpoints kept, beside the best one."""
    select_best: bool = False
    """Score the test split with the weights of the lowest validation NE instead of the last ones."""
    seed: int = 0
    """Of weights, data order and dropout."""

    def __post_init__(self) -> None:
        check_fields(self)
        rules = (
            ("learning_rate", self.learning_rate > 0, "be > 0"),
            ("beta1", 0 <= self.beta1 < 1, "lie in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "lie in [0, 1)"),
            ("eps", self.eps > 0, "be > 0"),
            ("weight_decay", self.weight_decay >= 0, "be >= 0"),
            ("max_grad_norm", self.max_grad_norm >= 0, "be >= 0 (0 switches clipping off)"),
            ("warmup_steps", self.warmup_steps >= 0, "be >= 0"),
            ("final_learning_rate_ratio", 0 <= self.final_learning_rate_ratio <= 1, "lie in [0, 1]"),
            ("max_steps", self.max_steps is None or self.max_steps >= 1, "be >= 1, or none for all the data"),
            ("max_seconds", self.max_seconds is None or self.max_seconds > 0, "be > 0, or none for no limit"),
            ("step_timeout_s", 0 <= self.step_timeout_s <= MAX_SECONDS, "lie in [0, 1e9] (0 sets no limit)"),
            ("log_interval", self.log_interval >= 1, "be >= 1"),
            ("eval_interval", self.eval_interval >= 0, "be >= 0 (0 evaluates at the end only)"),
            ("checkpoint_interval", self.checkpoint_interval >= 0, "be >= 0 (0 saves at the end only)"),
            ("keep_last", self.keep_last >= 1, "be >= 1"),
            ("seed", self.seed >= 0, "be >= 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                value = getattr(self, name)
                raise ConfigError(f"TrainerConfig: `{name}` must {rule}, got {value!r}; {default_of(self, name)}")
