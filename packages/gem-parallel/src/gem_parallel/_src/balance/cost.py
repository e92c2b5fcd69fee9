"""What a sample costs, from its lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LengthCost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCost:
    """cost = constant + sum over sequences s of (linear[s] * length_s + quadratic[s] * length_s ** 2), in FLOPs.

    Linear is what every token costs (projections, norms, windowed attention), quadratic full self-attention, constant
    what a sample costs without history.
    """

    constant: float = 0.0
    linear: Mapping[str, float] = field(default_factory=dict)
    quadratic: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {"constant": self.constant}
        numbers |= {f"linear[{name!r}]": value for name, value in self.linear.items()}
        numbers |= {f"quadratic[{name!r}]": value for name, value in self.quadratic.items()}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LengthCost: `{name}` must be finite and at least 0, got {value}")
        if not any(numbers.values()):
            raise ValueError("LengthCost: a coefficient must be above 0, got none; samples would all cost nothing")

    def __call__(self, lengths: Mapping[str, Tensor]) -> Tensor:
        """Costs of samples.

        Args:
            lengths: Sequence -> (B,) integers, tokens; at least those that a coefficient names.

        Returns:
            (B,) float64.

        Raises:
            ValueError: a named sequence is not in ``lengths``.
        """
        for name in (*self.linear, *self.quadratic):
            if name not in lengths:
                raise ValueError(
                    f"LengthCost: `lengths` must hold every sequence that a coefficient names, lacks {name!r}, "
                    f"got {sorted(lengths)}"
                )
        first = next(iter(lengths.values()))
        total = torch.full(first.shape, float(self.constant), dtype=torch.float64, device=first.device)
        for name, value in self.linear.items():
            total += value * lengths[name].double()
        for name, value in self.quadratic.items():
            total += value * lengths[name].double().square()
        return total

    @classmethod
    def fit(cls, lengths: Mapping[str, Tensor], flops: Tensor) -> LengthCost:
        """Least squares over samples whose cost a model has counted, with no coefficient below 0.

        Where the fit finds one below 0 (windowed or block attention bends down), it is left out and the rest fitted
        again.

        Args:
            lengths: Sequence -> (n,) tokens of n samples; at least 1 + 2 * sequences different ones.
            flops: (n,) FLOPs of each, of forward and backward or of either.

        Raises:
            ValueError: shapes that do not fit, too few samples, or no coefficient above 0 fits.
        """
        names = list(lengths)
        columns = [torch.ones(flops.shape, dtype=torch.float64)]
        for name in names:
            if lengths[name].shape != flops.shape or flops.ndim != 1:
                raise ValueError(
                    f"LengthCost.fit: `lengths[{name!r}]` must have the shape (n,) of `flops`, got "
                    f"{tuple(lengths[name].shape)} and {tuple(flops.shape)}"
                )
            length = lengths[name].double().cpu()
            columns += [length, length.square()]
        if len(flops) < len(columns):
            raise ValueError(
                f"LengthCost.fit: `flops` must hold at least {len(columns)} samples for {len(names)} sequences, "
                f"got {len(flops)}"
            )
        # Columns of equal size: squares of lengths would drown the constant.
        scales = [float(column.abs().max()) or 1.0 for column in columns]
        matrix = torch.stack([column / scale for column, scale in zip(columns, scales, strict=True)], dim=1)
        target = flops.double().cpu()
        keep = list(range(len(columns)))
        found = [0.0] * len(columns)
        while keep:
            solution = torch.linalg.lstsq(matrix[:, keep], target[:, None], driver="gelsd").solution[:, 0].tolist()
            lowest = min(range(len(keep)), key=solution.__getitem__)
            if solution[lowest] >= 0:
                for position, value in zip(keep, solution, strict=True):
                    found[position] = value / scales[position]
                break
            del keep[lowest]
        if not any(found):
            raise ValueError(
                f"LengthCost.fit: `flops` must grow with `lengths` or be above 0, got {flops.tolist()[:8]}"
            )
        return cls(
            constant=found[0],
            linear={name: found[1 + 2 * index] for index, name in enumerate(names)},
            quadratic={name: found[2 + 2 * index] for index, name in enumerate(names)},
        )
