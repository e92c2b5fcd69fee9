"""One process on the CPU, tables that PyTorch updates: each has an engine of its own, which sums over bags.

A table's features follow each other in one call: the bags of a pooled feature as they are, an unpooled feature as
bags of one id. Sums are the engine's; a mean is its sum divided by the bag's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_parallel._src.embeddings.engine import Engine
from gem_parallel._src.embeddings.ids import FeatureIds
from gem_parallel._src.embeddings.pending import GroupRequest

__all__ = ["pooled_outputs"]


def pooled_outputs(request: GroupRequest, engines: Sequence[Engine], step: int | None, anchor: Tensor) -> list[Tensor]:
    """Outputs of one group's features, in the request's order; one engine per table."""
    by_table: dict[int, list[FeatureIds]] = {}
    for feature in request.ids.features:
        by_table.setdefault(feature.slot.table, []).append(feature)
    outputs: list[Tensor] = []
    for table, features in by_table.items():
        outputs += _table_outputs(request, engines[table], features, step, anchor)
    return outputs


def _table_outputs(
    request: GroupRequest, engine: Engine, features: Sequence[FeatureIds], step: int | None, anchor: Tensor
) -> list[Tensor]:
    start, end = features[0].start, features[-1].end
    sizes = [_num_outputs(feature) for feature in features]
    if start == end:
        # No kernel sees an empty batch; the anchor keeps the result in the graph.
        pooled = anchor.new_zeros(sum(sizes), request.ids.group.dim)
        if step is not None:
            pooled = pooled + anchor.sum()
    else:
        pooled = engine.lookup(request.rows[start:end], [end - start], _bags(features, start), step)
    parts = [pooled] if len(features) == 1 else pooled.split(sizes)
    return [_mean(part, feature) for part, feature in zip(parts, features, strict=True)]


def _num_outputs(feature: FeatureIds) -> int:
    return feature.end - feature.start if feature.slot.config.pooling == "none" else feature.num_bags


def _bags(features: Sequence[FeatureIds], start: int) -> Tensor | None:
    """Offsets of all bags of a table; None if each bag is one id."""
    if all(feature.slot.config.pooling == "none" for feature in features):
        return None
    if len(features) == 1:
        return features[0].offsets
    parts = []
    for feature in features:
        if feature.slot.config.pooling == "none":
            parts.append(torch.arange(feature.start - start, feature.end - start))
        else:
            parts.append(feature.offsets[:-1] + (feature.start - start))
    parts.append(torch.tensor([features[-1].end - start]))
    return torch.cat(parts)


def _mean(part: Tensor, feature: FeatureIds) -> Tensor:
    if feature.slot.config.pooling != "mean":
        return part
    return part / feature.offsets.diff().clamp(min=1).unsqueeze(1)
