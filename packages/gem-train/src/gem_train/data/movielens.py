"""MovieLens: two tasks, like (rating >= 4) and favourite (rating == 5), from the files of data/ml-latest-small.

F. M. Harper, J. A. Konstan, "The MovieLens Datasets", ACM TiiS 5(4), 2015, doi 10.1145/2827872.
"""

from __future__ import annotations

import os
from pathlib import Path

from gem_train.data.arguments import check_directory
from gem_train.data.log import EventLog, load_events
from gem_train.data.schema import BucketFeature, CategoricalFeature, Column, DatasetSchema, Label

RATINGS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)

MOVIELENS = DatasetSchema(
    name="movielens",
    event_columns=(
        Column(name="user_id", kind="int", minimum=0, maximum=2**31 - 1),
        Column(name="item_id", kind="int", minimum=0, maximum=2**31 - 1),
        Column(name="timestamp", kind="int", minimum=0),
        Column(name="rating", kind="float", minimum=0.5, maximum=5.0),
    ),
    item_columns=(
        Column(name="item_id", kind="int", minimum=0, maximum=2**31 - 1),
        Column(name="genres", kind="strings"),
        Column(name="release_year", kind="int", minimum=0, maximum=2200),
    ),
    labels=(
        Label(task="like", column="rating", op="ge", value=4.0),
        Label(task="favourite", column="rating", op="eq", value=5.0),
    ),
    features=(
        CategoricalFeature(name="item", column="item_id", min_count=2),
        CategoricalFeature(name="genres", column="genres", source="items"),
        BucketFeature(name="year", column="release_year", source="items", num_buckets=20),
        CategoricalFeature(name="rating", column="rating", values=RATINGS),
    ),
    candidate_features=("item", "genres", "year"),
    history_features=("item", "genres", "year", "rating"),
)
"""Events user_id, item_id, rating, timestamp; items item_id, genres, release_year. Users are not a feature: four of
five test samples are of users who do not occur before, and a user is what the history says."""


def load_movielens(directory: str | os.PathLike[str], schema: DatasetSchema = MOVIELENS) -> EventLog:
    """Reads events.parquet and items.parquet of a MovieLens directory.

    Args:
        directory: The directory.
        schema: The schema, or a variant of it.

    Returns:
        The log.

    Raises:
        DataError: if a file breaks a rule of the schema.
        TypeError: if an argument has another type.
    """
    check_directory("load_movielens", directory)
    return load_events(Path(directory) / "events.parquet", schema, items=Path(directory) / "items.parquet")
