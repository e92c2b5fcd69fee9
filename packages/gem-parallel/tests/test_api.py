import gem_parallel


def test_public_names():
    assert sorted(gem_parallel.__all__) == [
        "ExpertParallel",
        "FeatureConfig",
        "FeatureStatus",
        "KeyedJaggedIds",
        "LengthCost",
        "Link",
        "ParallelDims",
        "ParallelMesh",
        "ParallelPlan",
        "ParamWire",
        "Pending",
        "ShardedEmbeddings",
        "SparseOptimizerConfig",
        "TableConfig",
        "Topology",
        "__version__",
        "balance_samples",
        "choose_collectives",
        "clip_grad_norm_",
        "defer_all_reduce",
        "engine_report",
        "grad_norm",
        "parallelize",
    ]
    assert all(hasattr(gem_parallel, name) for name in gem_parallel.__all__)
