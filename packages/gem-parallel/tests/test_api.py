import gem_parallel


def test_public_names():
    assert sorted(gem_parallel.__all__) == [
        "FeatureConfig",
        "FeatureStatus",
        "Pending",
        "ShardedEmbeddings",
        "SparseOptimizerConfig",
        "TableConfig",
        "__version__",
        "engine_report",
    ]
    assert all(hasattr(gem_parallel, name) for name in gem_parallel.__all__)
