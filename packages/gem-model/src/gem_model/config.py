"""What a ranking model reads and how large its parts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from gem_kernels.gdpa import ACTIVATIONS

__all__ = ["Activation", "RankingConfig", "SelfAttention", "SequenceTowerConfig"]

SelfAttention = Literal["window", "block", "none"]
"""Self-attention of one sequence layer: sliding window, diagonal blocks, or skipped."""
Activation = Literal["relu", "gelu", "silu"]
"""Activation of the MLPs."""


def _at_least(owner: str, minimum: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{owner}: `{name}` must be an int, got {value!r}; give a whole number.")
        if value < minimum:
            raise ValueError(f"{owner}: `{name}` must be >= {minimum}, got {value}; raise it.")


def _one_of(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}: `{name}` must be one of {', '.join(choices)}, got {value!r}; choose one.")


def _names(owner: str, argument: str, names: tuple[str, ...]) -> None:
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{owner}: `{argument}` must be a tuple of str, got {names!r}; wrap the names in a tuple.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{owner}: `{argument}` must not repeat a name, got {repeated} twice; give each once.")


def _module_names(owner: str, argument: str, names: tuple[str, ...]) -> None:
    """Names that become part of parameter names."""
    _names(owner, argument, names)
    for name in names:
        if not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise ValueError(
                f"{owner}: `{argument}` must be identifiers that are no attribute of nn.ModuleDict, "
                f"got {name!r}; rename it."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTowerConfig:
    """One kind of history and the budget of its tower.

    Histories of different kinds may have different budgets (event-level personalization, Kunlun): width, heads, tokens
    and attention belong to the tower.
    """

    name: str
    """Name of the sequence in the batch."""
    event_features: tuple[str, ...]
    """Names of the event embeddings, `<name>.<column>`; each is (T, embedding_dim)."""
    num_event_dense: int = 0
    """Numbers carried by each event."""
    dim: int = 64
    """Width of an event token; a multiple of `num_heads`."""
    num_heads: int = 4
    self_attention: tuple[SelfAttention, ...] = ("window", "window")
    """Self-attention of each layer, as many entries as the model has layers. `none` skips it, as CompSkip does."""
    window: int = 32
    """Events seen on either side by `window` attention."""
    block_size: int = 64
    """Events of one block of `block` attention: 32, 64 or 128."""
    num_context_tokens: int = 8
    """Tokens that summarise the context for this tower: the pooling queries and the weights of the PFFN."""
    num_seeds: int = 16
    """Learned seed queries of hierarchical seed pooling; 0 leaves it out."""
    num_seed_tokens: int = 4
    """Tokens that the seeds are compressed to; unused when `num_seeds` is 0."""
    kron_rank: int = 4
    """Terms of the sum of Kronecker products that compresses the seeds."""
    project_pooling: bool = True
    """Whether the pooling's keys and values are projections of the events, or the events themselves, which costs two
    matrix products per event less."""
    num_recent: int = 4
    """Latest events handed on uncompressed; 0 leaves them out."""
    event_hidden: int = 128
    """Hidden width of the MLP that makes an event token."""
    num_age_buckets: int = 16
    """Knots of the encoding of log(1 + age in seconds)."""
    num_recency_buckets: int = 12
    """Knots of the encoding of log(1 + number of later events)."""
    pffn_activation: str = "gelu"
    """Activation of the GDPA-PFFN, one that gem_kernels.gdpa knows."""
    dropout: float = 0.0
    """Dropout of each residual branch on the sequence."""

    def __post_init__(self) -> None:
        owner = "SequenceTowerConfig"
        _module_names(owner, "name", (self.name,))
        _names(owner, "event_features", self.event_features)
        for feature in self.event_features:
            if not feature.startswith(f"{self.name}."):
                raise ValueError(
                    f"{owner}: `event_features` of sequence {self.name!r} must start with '{self.name}.', "
                    f"got {feature!r}; give the name under which its embedding arrives."
                )
        _at_least(owner, 0, num_event_dense=self.num_event_dense, num_seeds=self.num_seeds, num_recent=self.num_recent)
        _at_least(
            owner,
            1,
            dim=self.dim,
            num_heads=self.num_heads,
            num_context_tokens=self.num_context_tokens,
            num_seed_tokens=self.num_seed_tokens,
            kron_rank=self.kron_rank,
            event_hidden=self.event_hidden,
        )
        _at_least(owner, 0, window=self.window)
        _at_least(owner, 2, num_age_buckets=self.num_age_buckets, num_recency_buckets=self.num_recency_buckets)
        if self.dim % self.num_heads:
            raise ValueError(
                f"{owner}: `dim` must be a multiple of `num_heads` = {self.num_heads}, got {self.dim}; change either."
            )
        if not isinstance(self.self_attention, tuple):
            raise TypeError(
                f"{owner}: `self_attention` must be a tuple with one entry per layer, got {self.self_attention!r}; "
                "wrap the kinds in a tuple."
            )
        for kind in self.self_attention:
            _one_of(owner, "self_attention", kind, ("window", "block", "none"))
        if not isinstance(self.project_pooling, bool):
            raise TypeError(
                f"{owner}: `project_pooling` must be a bool, got {self.project_pooling!r}; pass True or False."
            )
        # A float may equal one of them, and the kernel would not take it.
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128):
            raise ValueError(f"{owner}: `block_size` must be 32, 64 or 128, got {self.block_size}; choose one.")
        _one_of(owner, "pffn_activation", self.pffn_activation, ACTIVATIONS)
        _check_dropout(owner, self.dropout)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def num_pooled_tokens(self) -> int:
        """Tokens that one layer's summary of the sequence consists of."""
        return self.num_context_tokens + (self.num_seed_tokens if self.num_seeds else 0) + self.num_recent


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingConfig:
    """Features, tasks and sizes of a `RankingModel`."""

    context_features: tuple[str, ...]
    """Names of the context embeddings (candidate, user, request), each (B, embedding_dim)."""
    num_dense: int
    """Numbers carried by each sample."""
    sequences: tuple[SequenceTowerConfig, ...]
    """The histories; may be empty."""
    tasks: tuple[str, ...]
    """Binary tasks, each with a label and a logit."""
    embedding_dim: int
    """Width of every embedding, context and event."""
    dim: int = 64
    """Width of a context token."""
    num_layers: int = 2
    num_dense_tokens: int = 2
    """Context tokens made from the dense features; unused when `num_dense` is 0."""
    dense_hidden: int = 64
    """Hidden width of the MLP over the dense features."""
    num_fm_tokens: int = 8
    """Tokens from a Wukong layer's factorization machine block."""
    num_linear_tokens: int = 8
    """Tokens from a Wukong layer's linear compression block."""
    fm_rank: int = 8
    """Columns k of the projection Y in X (Xᵀ Y)."""
    fm_compressed_tokens: int = 4
    """Tokens that the attentive projection Y is computed from."""
    fm_hidden: int = 128
    """Hidden width of the MLPs of the factorization machine block."""
    num_experts: int = 1
    """Wukong experts of each layer's interaction; each sees every sample, and their gated outputs are summed. 1 is one
    plain Wukong layer without a gate."""
    head_hidden: tuple[int, ...] = (128,)
    """Hidden widths of each task's MLP; may be empty."""
    activation: Activation = "relu"
    """Activation of the MLPs."""
    dropout: float = 0.0
    """Dropout of the hidden layers of the factorization machine block and the heads."""
    task_weights: tuple[float, ...] = ()
    """Weight of each task in the total loss; empty means 1 for all."""
    priors: tuple[float, ...] = ()
    """Base rate of each task, the prediction before any training; empty means 0.5 for all."""

    def __post_init__(self) -> None:
        owner = "RankingConfig"
        _names(owner, "context_features", self.context_features)
        _module_names(owner, "tasks", self.tasks)
        if not self.tasks:
            raise ValueError(f"{owner}: `tasks` must name at least one task, got none; add one.")
        _at_least(owner, 0, num_dense=self.num_dense)
        if not self.context_features and not self.num_dense:
            raise ValueError(
                f"{owner}: `context_features` or `num_dense` must give the sample a feature, got neither; add one."
            )
        _at_least(
            owner,
            1,
            embedding_dim=self.embedding_dim,
            dim=self.dim,
            num_layers=self.num_layers,
            num_dense_tokens=self.num_dense_tokens,
            dense_hidden=self.dense_hidden,
            num_fm_tokens=self.num_fm_tokens,
            num_linear_tokens=self.num_linear_tokens,
            fm_rank=self.fm_rank,
            fm_compressed_tokens=self.fm_compressed_tokens,
            fm_hidden=self.fm_hidden,
            num_experts=self.num_experts,
        )
        if not isinstance(self.head_hidden, tuple):
            raise TypeError(f"{owner}: `head_hidden` must be a tuple of int, got {self.head_hidden!r}; use (128,).")
        for width in self.head_hidden:
            _at_least(owner, 1, head_hidden=width)
        _one_of(owner, "activation", self.activation, ("relu", "gelu", "silu"))
        _check_dropout(owner, self.dropout)
        self._check_sequences()
        for name, values in (("task_weights", self.task_weights), ("priors", self.priors)):
            if values and len(values) != len(self.tasks):
                raise ValueError(
                    f"{owner}: `{name}` must have one entry for each of the {len(self.tasks)} tasks or be empty, "
                    f"got {len(values)}; list them in the order of `tasks`."
                )
        for weight in self.task_weights:
            if not weight > 0.0:
                raise ValueError(f"{owner}: `task_weights` must be positive, got {weight}; drop the task instead.")
        for prior in self.priors:
            if not 0.0 < prior < 1.0:
                raise ValueError(f"{owner}: `priors` must lie between 0 and 1, got {prior}; give the base rate.")

    def _check_sequences(self) -> None:
        owner = "RankingConfig"
        if not isinstance(self.sequences, tuple) or not all(
            isinstance(tower, SequenceTowerConfig) for tower in self.sequences
        ):
            raise TypeError(
                f"{owner}: `sequences` must be a tuple of SequenceTowerConfig, got {self.sequences!r}; wrap the "
                "configs in a tuple."
            )
        _names(owner, "sequences", tuple(tower.name for tower in self.sequences))
        for tower in self.sequences:
            if len(tower.self_attention) != self.num_layers:
                raise ValueError(
                    f"{owner}: `self_attention` of sequence {tower.name!r} must have `num_layers` = {self.num_layers} "
                    f"entries, got {len(tower.self_attention)}; give one kind per layer."
                )

    @property
    def num_input_tokens(self) -> int:
        """Context tokens that the first layer reads."""
        return len(self.context_features) + (self.num_dense_tokens if self.num_dense else 0)

    @property
    def num_tokens(self) -> int:
        """Context tokens that each layer writes."""
        return self.num_fm_tokens + self.num_linear_tokens

    @property
    def num_pooled_tokens(self) -> int:
        """Tokens that one layer's summaries of all sequences consist of."""
        return sum(tower.num_pooled_tokens for tower in self.sequences)


def _check_dropout(owner: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: `dropout` must be a number, got {value!r}; pass float(x).")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{owner}: `dropout` must lie in [0, 1), got {value}; 0 leaves it out.")
