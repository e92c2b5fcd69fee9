"""Reading ranking data: validated Parquet, point-in-time histories, resumable batches."""

from gem_train.data.batch import Batch, Sequence
from gem_train.data.errors import DataError
from gem_train.data.log import EventLog, FeatureSpec, TableSpec, build_event_log, load_events
from gem_train.data.movielens import MOVIELENS, load_movielens
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

__all__ = [
    "MOVIELENS",
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
    "Sequence",
    "TableSpec",
    "TimeSplit",
    "build_event_log",
    "load_events",
    "load_movielens",
]
