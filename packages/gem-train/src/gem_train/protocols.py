"""What the trainer asks of the parts it is given.

Nothing here is inherited from: a model, a table collection or a reader satisfies these protocols by having the
methods. That keeps gem-train free of any import of gem-model, gem-precision or gem-kernels.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

__all__ = [
    "Batch",
    "BatchSource",
    "EmbeddingModule",
    "FlopCount",
    "Loss",
    "ModuleFlops",
    "Pending",
    "SequenceView",
    "StepWatch",
    "TrainableModel",
]


class SequenceView(Protocol):
    """One jagged history of every sample of a batch."""

    @property
    def offsets(self) -> Tensor:
        """(B + 1,) int64: sample b owns events ``offsets[b]:offsets[b + 1]``."""

    @property
    def max_seqlen(self) -> int:
        """Longest history of the batch, in events; an upper bound is allowed."""

    @property
    def dense(self) -> Tensor:
        """(T, num_event_dense) float32 numbers carried by each event."""

    @property
    def age(self) -> Tensor:
        """(T,) float32 seconds between an event and its sample's own time, always positive."""


class Batch(Protocol):
    """One rank's samples of one step; ``num_samples`` may be zero."""

    @property
    def num_samples(self) -> int:
        """B, the samples this rank holds."""

    @property
    def ids(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Feature name -> (values (N,) int64, offsets (num_bags + 1,) int64)."""

    @property
    def dense(self) -> Tensor:
        """(B, num_dense) float32."""

    @property
    def sequences(self) -> Mapping[str, SequenceView]:
        """Sequence name -> its jagged history."""

    @property
    def labels(self) -> Mapping[str, Tensor]:
        """Task name -> (B,) float32 in {0, 1}."""

    @property
    def sample_index(self) -> Tensor:
        """(B,) int64 position of each sample in its data set."""

    def to(self, device: Any, non_blocking: bool = True) -> Self:
        """The same batch with its tensors on ``device``."""

    def pin_memory(self) -> Self:
        """The same batch in page-locked host memory, so that a device copy can overlap compute."""


@runtime_checkable
class BatchSource(Protocol):
    """Gives this rank its slice of each global batch.

    All ranks see the same number of batches; a slice may be empty. The state is the global position (of the batches
    already yielded), so a run may resume on another number of ranks.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield batches from the current position to the end of the last epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Global position; independent of rank and world size."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that ``state_dict`` gave."""


class Pending(Protocol):
    """Ids under way to the ranks that own their rows; opaque to the trainer."""


@runtime_checkable
class EmbeddingModule(Protocol):
    """Sparse tables whose optimizer runs inside backward."""

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
        """Start moving ids to their owners; may run one batch ahead of ``lookup``."""

    def start_lookup(self, pending: Any) -> None:
        """Start moving the batch's rows, once the backward of the batch before is done; ``lookup`` then waits for them.

        May do nothing. The learning rate of the batch's update is the one set before.
        """

    def lookup(self, pending: Any) -> dict[str, Tensor]:
        """Feature -> (num_bags, dim) for pooled features, (N, dim) for unpooled ones; differentiable."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the step size of the fused sparse optimizer, used from the next backward on."""

    def state_dict(self) -> dict[str, Any]:
        """Tables and their optimizer moments, plain or distributed tensors under stable names."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take back what ``state_dict`` gave."""


class StepWatch(Protocol):
    """Ends a run whose step does not end, such as a ``gem_parallel.watch.RankWatch``."""

    def step(self, label: str) -> AbstractContextManager[None]:
        """What the calling thread does inside must end in time; ``label`` is what the other ranks read of it."""


class Loss(Protocol):
    """Sums, never means: the trainer divides by the global number of samples."""

    @property
    def sum(self) -> Mapping[str, Tensor]:
        """Task -> scalar sum of the sample losses."""

    @property
    def total(self) -> Tensor:
        """Scalar: weighted sum over the tasks, of the sums."""


class ModuleFlops(Protocol):
    """FLOPs of one module."""

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""


class FlopCount(Protocol):
    """Model FLOPs of one batch from its true lengths."""

    @property
    def by_module(self) -> Mapping[str, ModuleFlops]:
        """Module name -> what its own code does."""

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""

    @property
    def total(self) -> float:
        """FLOPs of forward and backward."""


@runtime_checkable
class TrainableModel(Protocol):
    """The dense part of a ranking model."""

    def __call__(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Task -> logits (B,)."""

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Any:
        """A ``Loss``-shaped tuple: sums over this rank's samples, which the trainer divides by those of all ranks.

        Args:
            outputs: Task -> logits (B,).
            batch: The samples, with their labels.
        """

    def flops(self, batch: Any) -> Any:
        """A ``FlopCount``."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The dense parameters."""
