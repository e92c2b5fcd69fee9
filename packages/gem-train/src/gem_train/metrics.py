"""Metrics of binary predictions as states of fixed size that merge: over batches, ranks and runs.

Normalised entropy (NE) is the log loss divided by the entropy of the evaluated samples' own mean label (X. He et al.,
"Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014): 1 is no better than that mean. Calibration
is the mean prediction divided by the mean label. AUC is the probability that a positive ranks above a negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_BINS = 65_536
LOGIT_RANGE = 16.0
"""Bins divide logits from -16 to 16, probabilities from 1e-7 to 1 - 1e-7, evenly; the outer two take the rest."""

_COUNT, _POSITIVE, _INVALID_PREDICTION, _INVALID_LABEL = range(4)


class BinaryMetrics:
    """Log loss, NE, calibration, AUC and a calibration curve of one task.

    The state is a histogram of the logits per label and a few sums: 1 MiB, whatever the number of samples. Counts are
    int64, sums float64. AUC counts a pair of one bin as half right, so it is off by at most half the share of
    such pairs, which `compute` reports as auc_error_bound; the other values do not depend on the bins.

    On a GPU `update` never waits for the device, so a NaN is reported by `compute` or `all_reduce` there and at once
    on the CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Creates an empty state.

        Args:
            device: Where the state lives; that of the predictions.
        """
        self.histogram = torch.zeros(2 * NUM_BINS, dtype=torch.int64, device=device)
        """Negatives per bin, then positives per bin."""
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Log loss in nats, predictions."""

    def update(self, predictions: Tensor, labels: Tensor, *, from_logits: bool = True) -> None:
        """Adds a batch.

        Args:
            predictions: (B,) floating point logits, or probabilities; B may be 0.
            labels: (B,) 0 or 1, any number type.
            from_logits: Whether predictions are logits.

        Raises:
            TypeError: if predictions are not floating point.
            ValueError: if shapes differ, or (on the CPU) for a prediction that is NaN, infinite or not a probability,
                or a label that is neither 0 nor 1.
        """
        if not predictions.is_floating_point():
            raise TypeError(
                f"BinaryMetrics.update: predictions must be floating point, got {predictions.dtype}; pass the logits"
            )
        if predictions.ndim != 1 or predictions.shape != labels.shape:
            raise ValueError(
                f"BinaryMetrics.update: predictions and labels must have one shape (B,), got "
                f"{tuple(predictions.shape)} and {tuple(labels.shape)}; flatten them"
            )
        with torch.no_grad():
            x = predictions.detach().to(self.sums.device, torch.float64)
            y = labels.detach().to(self.sums.device, torch.float64)
            valid = torch.isfinite(x)
            if not from_logits:
                valid &= (x >= 0) & (x <= 1)
                x = torch.logit(x.clamp(1e-15, 1 - 1e-15))
            counts = torch.stack(
                (
                    torch.full((), x.numel(), device=x.device, dtype=torch.int64),
                    (y == 1).sum(),
                    (~valid).sum(),
                    ((y != 0) & (y != 1)).sum(),
                )
            )
            if x.device.type == "cpu":
                _check(counts, predictions, labels, valid)
            x = torch.nan_to_num(x)  # keeps the bin index in range; compute() refuses the state anyway
            bins = ((x + LOGIT_RANGE) * (NUM_BINS / (2 * LOGIT_RANGE))).floor().clamp(0, NUM_BINS - 1).long()
            bins += NUM_BINS * (y == 1).long()
            self.histogram.index_add_(0, bins, torch.ones_like(bins))
            self.counts += counts
            loss = torch.nn.functional.softplus(x) - x * y
            self.sums += torch.stack((loss.sum(), torch.sigmoid(x).sum()))

    def merge(self, other: BinaryMetrics) -> None:
        """Adds the samples of another state.

        Args:
            other: The state; not changed.
        """
        device = self.sums.device
        self.histogram += other.histogram.to(device)
        self.counts += other.counts.to(device)
        self.sums += other.sums.to(device)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Adds up the states of all ranks of a group, in place: two collectives of fixed size.

        Call it once per evaluation, on every rank, also on one that saw no sample.

        Args:
            group: The ranks; None is the default group. Without torch.distributed this does nothing.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        counters = torch.cat((self.counts, self.histogram))
        dist.all_reduce(counters, group=group)
        dist.all_reduce(self.sums, group=group)
        self.counts, self.histogram = counters[:4].clone(), counters[4:].clone()

    def reset(self) -> None:
        """Forgets all samples."""
        for state in (self.histogram, self.counts, self.sums):
            state.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The state, for a checkpoint."""
        return {"histogram": self.histogram, "counts": self.counts, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over a state.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """
        for name, mine in self.state_dict().items():
            if name not in state or state[name].shape != mine.shape:
                raise ValueError(
                    f"BinaryMetrics.load_state_dict: {name} must have shape {tuple(mine.shape)}, got "
                    f"{tuple(state[name].shape) if name in state else 'nothing'}; load a state of this version"
                )
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])

    def compute(self, *, curve_points: int = 0) -> dict[str, Any]:
        """The metrics of all samples so far.

        Args:
            curve_points: Length of the calibration curve; 0 leaves it out.

        Returns:
            count, base_rate, mean_prediction, logloss, ne, auc, auc_error_bound, calibration. A value that does not
            exist is None: all but count without samples; ne and auc when all labels are equal; calibration without
            positives. With `curve_points`, curve: a list of {count, prediction, label}, means of samples in order of
            their logits, about equally many each.

        Raises:
            ValueError: if a prediction was not finite or a label neither 0 nor 1.
        """
        counts = self.counts.cpu()
        _check(counts)
        n, positives = int(counts[_COUNT]), int(counts[_POSITIVE])
        loss_sum, prediction_sum = self.sums.cpu().tolist()
        out: dict[str, Any] = dict.fromkeys(
            ("base_rate", "mean_prediction", "logloss", "ne", "auc", "auc_error_bound", "calibration")
        )
        out["count"] = n
        if n:
            rate = positives / n
            out |= {"base_rate": rate, "mean_prediction": prediction_sum / n, "logloss": loss_sum / n}
            if positives:
                out["calibration"] = prediction_sum / positives
            if 0 < positives < n:
                entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
                out["ne"] = loss_sum / n / entropy
                out["auc"], out["auc_error_bound"] = self._auc(positives, n - positives)
        if curve_points:
            out["curve"] = self._curve(curve_points)
        return out

    def _auc(self, positives: int, negatives: int) -> tuple[float, float]:
        negative, positive = self.histogram.cpu().view(2, NUM_BINS).double()
        below = torch.cumsum(negative, 0) - negative
        pairs = float(positives) * float(negatives)
        tied = float((positive * negative).sum()) / pairs
        return float((positive * below).sum()) / pairs + 0.5 * tied, 0.5 * tied

    def _curve(self, points: int) -> list[dict[str, float]]:
        negative, positive = self.histogram.cpu().view(2, NUM_BINS)
        total = negative + positive
        n = int(total.sum())
        if n == 0:
            return []
        # The group of a bin is set by the samples up to its middle: equal counts, and no bin is split.
        middle = torch.cumsum(total, 0).double() - 0.5 * total
        group = (middle * (points / n)).long().clamp(0, points - 1)
        centre = torch.sigmoid((torch.arange(NUM_BINS).double() + 0.5) * (2 * LOGIT_RANGE / NUM_BINS) - LOGIT_RANGE)
        zeros = torch.zeros(points, dtype=torch.float64)
        count = zeros.index_add(0, group, total.double())
        label = zeros.index_add(0, group, positive.double())
        prediction = zeros.index_add(0, group, total * centre)
        return [
            {"count": int(c), "prediction": p / c, "label": y / c}
            for c, p, y in zip(count.tolist(), prediction.tolist(), label.tolist(), strict=True)
            if c
        ]


def _check(
    counts: Tensor, predictions: Tensor | None = None, labels: Tensor | None = None, valid: Tensor | None = None
) -> None:
    bad_predictions, bad_labels = int(counts[_INVALID_PREDICTION]), int(counts[_INVALID_LABEL])
    if bad_predictions:
        example = ""
        if predictions is not None and valid is not None:
            row = int((~valid).nonzero()[0])
            example = f", first at sample {row}: {float(predictions[row])}"
        raise ValueError(
            f"BinaryMetrics: predictions must be finite, and probabilities lie in [0, 1], got "
            f"{bad_predictions} that are not{example}; look for a diverged model"
        )
    if bad_labels:
        example = ""
        if labels is not None:
            row = int(((labels != 0) & (labels != 1)).nonzero()[0])
            example = f", first at sample {row}: {float(labels[row])}"
        raise ValueError(f"BinaryMetrics: labels must be 0 or 1, got {bad_labels} others{example}; check the data")
