"""Reading ranking data: validated Parquet, point-in-time histories, resumable batches."""

from gem_train.data.batch import Batch, Sequence
from gem_train.data.errors import DataError
from gem_train.data.log import EventLog, FeatureSpec, TableSpec, build_event_log, load_events
from gem_train.data.movielens import MOVIELENS, load_movielens
from gem_train.data.online_retail import ONLINE_RETAIL, load_online_retail
from gem_train.data.predictors import SCOREBOARD, Score, Scoreboard, base_rate, click_through_rate
from gem_train.data.schema import (
    BucketFeature,
    CategoricalFeature,
    Column,
    DatasetSchema,
    DenseColumn,
    Label,
    TimeSplit,
)
from gem_train.data.source import EventSource
from gem_train.data.synthetic import SYNTHETIC, generate

__all__ = [
    "MOVIELENS",
    "ONLINE_RETAIL",
    "SCOREBOARD",
    "SYNTHETIC",
    "Batch",
    "BucketFeature",
    "CategoricalFeature",
    "Column",
    "DataError",
    "DatasetSchema",
    "DenseColumn",
    "EventLog",
    "EventSource",
    "FeatureSpec",
    "Label",
    "Score",
    "Scoreboard",
    "Sequence",
    "TableSpec",
    "TimeSplit",
    "base_rate",
    "build_event_log",
    "click_through_rate",
    "generate",
    "load_events",
    "load_movielens",
    "load_online_retail",
]
