"""Sizes that are known to work. A preset is a plain config: change fields with `dataclasses.replace`."""

from __future__ import annotations

from gem_model.config import RankingConfig, SequenceTowerConfig

__all__ = ["large", "small", "tiny"]


def tiny(
    *,
    context_features: tuple[str, ...],
    num_dense: int,
    event_features: tuple[str, ...],
    num_event_dense: int,
    tasks: tuple[str, ...],
    embedding_dim: int = 32,
    sequence: str = "history",
    priors: tuple[float, ...] = (),
) -> RankingConfig:
    """A model that trains on two CPU cores: two layers of width 64, one sequence.

    With 8 context features, 8 dense, 3 event features, 2 event dense, one task and `embedding_dim` 32 the forward pass
    of one sample costs 14 MFLOPs at a history of 128 events and 45 MFLOPs at 512; 0.74 million parameters.

    Args:
        context_features: Names of the context embeddings.
        num_dense: Numbers per sample.
        event_features: Names of the event embeddings, `<sequence>.<column>`.
        num_event_dense: Numbers per event.
        tasks: Task names.
        embedding_dim: Width of every embedding.
        sequence: Name of the sequence.
        priors: Base rate of each task.
    """
    return RankingConfig(
        context_features=context_features,
        num_dense=num_dense,
        sequences=(
            SequenceTowerConfig(
                name=sequence,
                event_features=event_features,
                num_event_dense=num_event_dense,
                dim=64,
                num_heads=2,
                self_attention=("block", "none"),
                block_size=32,
                num_context_tokens=8,
                num_seeds=8,
                num_seed_tokens=4,
                kron_rank=2,
                project_pooling=False,
                num_recent=4,
                event_hidden=64,
            ),
        ),
        tasks=tasks,
        embedding_dim=embedding_dim,
        dim=64,
        num_layers=2,
        num_fm_tokens=8,
        num_linear_tokens=8,
        fm_rank=8,
        fm_hidden=128,
        head_hidden=(128,),
        priors=priors,
    )


def small(
    *,
    context_features: tuple[str, ...],
    num_dense: int,
    event_features: tuple[str, ...],
    num_event_dense: int,
    tasks: tuple[str, ...],
    embedding_dim: int = 64,
    sequence: str = "history",
    priors: tuple[float, ...] = (),
) -> RankingConfig:
    """A model for one GPU: three layers of width 256, one sequence.

    With 8 context features, 8 dense, 3 event features, 2 event dense, one task and `embedding_dim` 64 the forward pass
    of one sample costs 1.06 GFLOPs at a history of 512 events; 25 million parameters.

    Args:
        context_features: Names of the context embeddings.
        num_dense: Numbers per sample.
        event_features: Names of the event embeddings, `<sequence>.<column>`.
        num_event_dense: Numbers per event.
        tasks: Task names.
        embedding_dim: Width of every embedding.
        sequence: Name of the sequence.
        priors: Base rate of each task.
    """
    return RankingConfig(
        context_features=context_features,
        num_dense=num_dense,
        sequences=(
            SequenceTowerConfig(
                name=sequence,
                event_features=event_features,
                num_event_dense=num_event_dense,
                dim=256,
                num_heads=4,
                self_attention=("window", "none", "window"),
                window=64,
                num_context_tokens=16,
                num_seeds=32,
                num_seed_tokens=8,
                kron_rank=4,
                project_pooling=False,
                num_recent=8,
                event_hidden=256,
            ),
        ),
        tasks=tasks,
        embedding_dim=embedding_dim,
        dim=256,
        num_layers=3,
        num_dense_tokens=4,
        dense_hidden=256,
        num_fm_tokens=16,
        num_linear_tokens=16,
        fm_rank=16,
        fm_compressed_tokens=8,
        fm_hidden=512,
        head_hidden=(512, 256),
        priors=priors,
    )


def large(
    *,
    context_features: tuple[str, ...],
    num_dense: int,
    event_features: tuple[str, ...],
    num_event_dense: int,
    tasks: tuple[str, ...],
    embedding_dim: int = 128,
    sequence: str = "history",
    priors: tuple[float, ...] = (),
) -> RankingConfig:
    """A model that fills one large GPU: four layers of width 1,024, one sequence.

    With 8 context features, 8 dense, 3 event features, 2 event dense, one task and `embedding_dim` 128 the forward pass
    of one sample costs 34 GFLOPs at a history of 512 events; 264 million parameters.

    Args:
        context_features: Names of the context embeddings.
        num_dense: Numbers per sample.
        event_features: Names of the event embeddings, `<sequence>.<column>`.
        num_event_dense: Numbers per event.
        tasks: Task names.
        embedding_dim: Width of every embedding.
        sequence: Name of the sequence.
        priors: Base rate of each task.
    """
    return RankingConfig(
        context_features=context_features,
        num_dense=num_dense,
        sequences=(
            SequenceTowerConfig(
                name=sequence,
                event_features=event_features,
                num_event_dense=num_event_dense,
                dim=1024,
                num_heads=8,
                self_attention=("window", "window", "window", "window"),
                window=128,
                num_context_tokens=16,
                num_seeds=32,
                num_seed_tokens=8,
                kron_rank=4,
                num_recent=8,
                event_hidden=1024,
            ),
        ),
        tasks=tasks,
        embedding_dim=embedding_dim,
        dim=1024,
        num_layers=4,
        num_dense_tokens=4,
        dense_hidden=512,
        num_fm_tokens=16,
        num_linear_tokens=16,
        fm_rank=16,
        fm_compressed_tokens=8,
        fm_hidden=1024,
        head_hidden=(1024, 512),
        priors=priors,
    )
