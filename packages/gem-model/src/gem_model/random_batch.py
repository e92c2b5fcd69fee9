"""Random batches of the shape a config reads, for tests, benchmarks and examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gem_model.config import RankingConfig

__all__ = ["RandomBatch", "RandomSequence", "random_batch"]

MEAN_LENGTH, MAX_LENGTH = 120.0, 512
"""Of drawn histories."""


class RandomSequence(NamedTuple):
    """One packed history. B samples, T events."""

    offsets: Tensor
    """(B + 1,) int64."""
    max_seqlen: int
    """Longest history, in events."""
    dense: Tensor
    """(T, num_event_dense) float32."""
    age: Tensor
    """(T,) float32, seconds; oldest first in each history."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RandomBatch:
    """A batch that satisfies `gem_model.protocols.RankingBatch`."""

    num_samples: int
    """B."""
    dense: Tensor
    """(B, num_dense) float32."""
    sequences: Mapping[str, RandomSequence]
    """Sequence name -> its events."""
    labels: Mapping[str, Tensor]
    """Task name -> (B,) float32 in {0, 1}."""

    def to(self, device: torch.device | str) -> RandomBatch:
        """The same batch on another device."""
        move: Callable[[Tensor], Tensor] = lambda x: x.to(device)  # noqa: E731
        return RandomBatch(
            num_samples=self.num_samples,
            dense=move(self.dense),
            sequences={
                name: RandomSequence(move(s.offsets), s.max_seqlen, move(s.dense), move(s.age))
                for name, s in self.sequences.items()
            },
            labels={name: move(x) for name, x in self.labels.items()},
        )


def random_batch(
    config: RankingConfig,
    num_samples: int,
    *,
    lengths: Mapping[str, Sequence[int]] | None = None,
    mean_length: float = MEAN_LENGTH,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> tuple[RandomBatch, dict[str, Tensor]]:
    """Draw a batch and its embeddings on the CPU.

    Lengths are skewed as real histories are: exponential, cut at `max_length`, so some are empty or short and a few
    are as long as allowed.

    Args:
        config: What the model reads.
        num_samples: B.
        lengths: Sequence name -> B lengths in events, instead of drawn ones.
        mean_length: Mean of the exponential, in events, before the cut.
        max_length: Longest history drawn, in events.
        seed: Of all draws.

    Returns:
        The batch, and feature -> embeddings (B or T, embedding_dim) that require gradients.

    Raises:
        ValueError: if `lengths` does not have one entry per sample for each sequence, or comes with how to draw them,
            or a number is out of range.
        TypeError: if an argument has another type.
    """
    _check(config, num_samples, lengths, mean_length, max_length, seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sequences: dict[str, RandomSequence] = {}
    rows = dict.fromkeys(config.context_features, num_samples)
    for tower in config.sequences:
        if lengths is None:
            uniform = torch.rand(num_samples, generator=generator, dtype=torch.float64)
            drawn = (-torch.log1p(-uniform) * mean_length).long().clamp(max=max_length)
        else:
            drawn = _given_lengths(tower.name, lengths.get(tower.name, ()))
            if drawn.shape != (num_samples,):
                raise ValueError(
                    f"random_batch: `lengths[{tower.name!r}]` must have {num_samples} entries, "
                    f"got {drawn.numel()}; give one length per sample."
                )
        offsets = torch.zeros(num_samples + 1, dtype=torch.int64)
        torch.cumsum(drawn, 0, out=offsets[1:])
        num_events = int(offsets[-1])
        age = 1.0 + torch.rand(num_events, generator=generator).square() * 1e7
        owner = torch.repeat_interleave(torch.arange(num_samples), drawn)
        # Oldest first within each sample: sort by sample, then by falling age.
        age = age[torch.argsort(owner * 1e8 - age.double(), stable=True)]
        sequences[tower.name] = RandomSequence(
            offsets, int(drawn.max()) if num_samples else 0, normal(num_events, tower.num_event_dense), age
        )
        rows |= dict.fromkeys(tower.event_features, num_events)
    batch = RandomBatch(
        num_samples=num_samples,
        dense=normal(num_samples, config.num_dense),
        sequences=sequences,
        labels={task: (torch.rand(num_samples, generator=generator) < 0.5).float() for task in config.tasks},
    )
    embeddings = {name: normal(count, config.embedding_dim).requires_grad_() for name, count in rows.items()}
    return batch, embeddings


def _check(
    config: RankingConfig,
    num_samples: int,
    lengths: Mapping[str, Sequence[int]] | None,
    mean_length: float,
    max_length: int,
    seed: int,
) -> None:
    if not isinstance(config, RankingConfig):
        raise TypeError(
            f"random_batch: `config` must be a RankingConfig, got {type(config).__name__}; make one, or take one of "
            "gem_model.presets."
        )
    for name, value in (("num_samples", num_samples), ("max_length", max_length), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"random_batch: `{name}` must be an int, got {type(value).__name__}; pass int(x).")
        if value < 0 and name != "seed":
            raise ValueError(f"random_batch: `{name}` must be >= 0, got {value}; 0 is allowed.")
    if isinstance(mean_length, bool) or not isinstance(mean_length, int | float):
        raise TypeError(
            f"random_batch: `mean_length` must be a number, got {type(mean_length).__name__}; pass float(x)."
        )
    if not 0.0 <= mean_length < math.inf:
        raise ValueError(f"random_batch: `mean_length` must be >= 0 events and finite, got {mean_length}; shorten it.")
    if lengths is None:
        return
    for name, given, default in (("mean_length", mean_length, MEAN_LENGTH), ("max_length", max_length, MAX_LENGTH)):
        if given != default:
            raise ValueError(
                f"random_batch: `{name}` must be left out with `lengths`, which draws none, got {given}; give one of "
                "the two."
            )
    if not isinstance(lengths, Mapping):
        raise TypeError(
            f"random_batch: `lengths` must map sequences to lengths, got {type(lengths).__name__}; pass a dict."
        )
    unknown = sorted(set(lengths) - {tower.name for tower in config.sequences})
    if unknown:
        known = ", ".join(repr(tower.name) for tower in config.sequences)
        raise ValueError(
            f"random_batch: `lengths` must name sequences of the config, {known or 'which has none'}, "
            f"got {unknown[0]!r}; rename or drop it."
        )


def _given_lengths(sequence: str, lengths: Sequence[int]) -> Tensor:
    try:
        given = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"random_batch: `lengths[{sequence!r}]` must be ints, got {lengths!r}; give one length per sample."
        ) from error
    # No lengths at all are floats to torch.
    if given.numel() and (given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool):
        raise TypeError(
            f"random_batch: `lengths[{sequence!r}]` must be ints, got {given.dtype}; give one length per sample."
        )
    if given.numel() and int(given.min()) < 0:
        raise ValueError(
            f"random_batch: `lengths[{sequence!r}]` must be >= 0 events, got {int(given.min())}; 0 is an empty history."
        )
    return given.to(torch.int64)
