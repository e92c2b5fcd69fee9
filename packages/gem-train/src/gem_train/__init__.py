"""Trainer, reader, checkpoints, metrics and the command line for ranking models."""

from gem_train import data, protocols
from gem_train._version import __version__
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
