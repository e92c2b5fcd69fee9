"""The public names; anything else may change without notice."""

import gem_model


def test_all_is_pinned():
    assert gem_model.__all__ == [
        "FlopCount",
        "Loss",
        "RankingConfig",
        "RankingModel",
        "SequenceTowerConfig",
        "__version__",
        "capture_segments",
        "presets",
        "protocols",
        "random_batch",
    ]


def test_presets_and_protocols_are_pinned():
    assert gem_model.presets.__all__ == ["large", "small", "tiny"]
    assert gem_model.protocols.__all__ == ["RankingBatch", "SequenceView"]
