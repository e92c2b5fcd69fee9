"""The names of gem_train.data."""

from __future__ import annotations

import gem_train.data as data


def test_all_is_pinned() -> None:
    assert data.__all__ == [
        "MOVIELENS", "ONLINE_RETAIL", "SCOREBOARD", "SYNTHETIC", "Batch", "BucketFeature", "CategoricalFeature",
        "Column", "DataError", "DatasetSchema", "DenseColumn", "EventLog", "EventSource", "FeatureSpec", "Label",
        "Score", "Scoreboard", "Sequence", "TableSpec", "TimeSplit", "base_rate", "build_event_log",
        "click_through_rate", "generate", "load_events", "load_movielens", "load_online_retail",
    ]  # fmt: skip
    assert all(hasattr(data, name) for name in data.__all__)
