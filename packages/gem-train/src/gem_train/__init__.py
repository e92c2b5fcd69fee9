"""Trainer, reader, checkpoints, metrics and the command line for ranking models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_train._version import __version__

if TYPE_CHECKING:
    from gem_train import data, protocols
    from gem_train.balance import SampleBalancer
    from gem_train.checkpoint import Checkpointer
    from gem_train.config import TrainerConfig
    from gem_train.errors import CheckpointError, ConfigError, NonFiniteError
    from gem_train.evaluation import Evaluation, evaluate
    from gem_train.metrics import BinaryMetrics
    from gem_train.report import write_report
    from gem_train.run_log import RunLog
    from gem_train.trainer import Trainer, TrainResult
    from gem_train.world import World

__all__ = [
    "BinaryMetrics",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "Evaluation",
    "NonFiniteError",
    "RunLog",
    "SampleBalancer",
    "TrainResult",
    "Trainer",
    "TrainerConfig",
    "World",
    "__version__",
    "data",
    "evaluate",
    "protocols",
    "write_report",
]

_MODULES = {
    "balance": ("SampleBalancer",),
    "checkpoint": ("Checkpointer",),
    "config": ("TrainerConfig",),
    "errors": ("CheckpointError", "ConfigError", "NonFiniteError"),
    "evaluation": ("Evaluation", "evaluate"),
    "metrics": ("BinaryMetrics",),
    "report": ("write_report",),
    "run_log": ("RunLog",),
    "trainer": ("Trainer", "TrainResult"),
    "world": ("World",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562): the command line answers Ctrl-C before torch is there, seconds later."""
    if name in ("data", "protocols"):
        return import_module(f"gem_train.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gem_train' has no attribute {name!r}")
    return getattr(import_module(f"gem_train.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
