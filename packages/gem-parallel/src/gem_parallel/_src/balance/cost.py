"""What a sample costs, from its lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem_parallel._src.checks import check_number

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
        for argument in ("linear", "quadratic"):
            given = getattr(self, argument)
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"LengthCost: `{argument}` must map sequences to coefficients, got {type(given).__name__}; "
                    'pass {"history": 1.0}, for example'
                )
            for name in given:
                if not isinstance(name, str):
                    raise TypeError(
                        f"LengthCost: `{argument}` must have names of sequences as its keys, got {type(name).__name__} "
                        f"{name!r}; pass a str"
                    )
        numbers = {"constant": self.constant}
        numbers |= {f"linear[{name!r}]": value for name, value in self.linear.items()}
        numbers |= {f"quadratic[{name!r}]": value for name, value in self.quadratic.items()}
        for name, value in numbers.items():
            check_number("LengthCost", name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LengthCost: `{name}` must be finite and at least 0, got {value}; give FLOPs")
        if not any(numbers.values()):
            raise ValueError("LengthCost: a coefficient must be above 0, got none; samples would all cost nothing")

    def __call__(self, lengths: Mapping[str, Tensor]) -> Tensor:
        """Costs of samples.

        Args:
            lengths: Sequence -> (B,) integers, tokens; at least those that a coefficient names.

        Returns:
            (B,) float64.

        Raises:
            TypeError: ``lengths`` does not map names to tensors.
            ValueError: a named sequence is not in ``lengths``, or it is empty.
        """
        _require_tensors("LengthCost", lengths)
        for name in (*self.linear, *self.quadratic):
            if name not in lengths:
                raise ValueError(
                    f"LengthCost: `lengths` must hold every sequence that a coefficient names, lacks {name!r}, got "
                    f"{sorted(lengths)}; add its lengths, or drop its coefficient"
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
            lengths: Sequence -> (n,) tokens of n samples; at least 1 + 2 * sequences samples, best all different: what
                equal ones leave open is shared out by the smallest coefficients.
            flops: (n,) FLOPs of each, finite, of forward and backward or of either.

        Raises:
            TypeError: ``lengths`` does not map names to tensors, or ``flops`` is no tensor.
            ValueError: shapes that do not fit, too few samples, lengths or FLOPs that are no finite
                numbers, or no coefficient above 0 fits.
        """
        _require_tensors("LengthCost.fit", lengths)
        if not isinstance(flops, Tensor):
            raise TypeError(
                f"LengthCost.fit: `flops` must be a tensor, got {type(flops).__name__}; pass torch.tensor(flops)"
            )
        names = list(lengths)
        columns = [torch.ones(flops.shape, dtype=torch.float64)]
        for name in names:
            if lengths[name].shape != flops.shape or flops.ndim != 1:
                raise ValueError(
                    f"LengthCost.fit: `lengths[{name!r}]` must have the shape (n,) of `flops`, got "
                    f"{tuple(lengths[name].shape)} and {tuple(flops.shape)}; give one length and one count per sample"
                )
            _require_finite(f"lengths[{name!r}]", lengths[name])
            length = lengths[name].double().cpu()
            columns += [length, length.square()]
        if flops.ndim != 1 or len(flops) < len(columns):
            raise ValueError(
                f"LengthCost.fit: `flops` must have the shape (n,) of at least {len(columns)} samples, 1 + 2 * "
                f"sequences with {len(names)} sequences, got {tuple(flops.shape)}; count the FLOPs of more samples"
            )
        _require_finite("flops", flops)
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
                f"LengthCost.fit: `flops` must grow with `lengths` or be above 0, got {flops.tolist()[:8]}; count the "
                "FLOPs of samples with events"
            )
        return cls(
            constant=found[0],
            linear={name: found[1 + 2 * index] for index, name in enumerate(names)},
            quadratic={name: found[2 + 2 * index] for index, name in enumerate(names)},
        )


def _require_tensors(owner: str, lengths: Mapping[str, Tensor]) -> None:
    if not isinstance(lengths, Mapping):
        raise TypeError(
            f"{owner}: `lengths` must map sequences to tensors, got {type(lengths).__name__}; "
            'pass {"history": lengths}, for example'
        )
    if not lengths:
        raise ValueError(f"{owner}: `lengths` must hold at least one sequence, got none; pass every sequence's lengths")
    for name, each in lengths.items():
        if not isinstance(each, Tensor):
            raise TypeError(
                f"{owner}: `lengths[{name!r}]` must be a tensor, got {type(each).__name__}; pass torch.tensor(lengths)"
            )


def _require_finite(argument: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ValueError(f"LengthCost.fit: `{argument}` must hold real numbers, got {tensor.dtype}; convert them")
    bad = (~torch.isfinite(tensor)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"LengthCost.fit: `{argument}` must be finite, got {float(tensor[bad[0]])} at position {bad[0]}; leave "
            "such samples out"
        )
