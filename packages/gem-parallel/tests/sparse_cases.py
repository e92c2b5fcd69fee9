"""Batches of the multi-process embedding tests: one global batch, cut over ranks in awkward ways."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

DIM = 8
NUM_BAGS = 24
# One table smaller than any world size, one with a single row, one larger than the rest, and two of other dims: groups
# with exchanges of their own.
TABLES = {"wide": 50, "three": 3, "one": 1, "narrow": 11, "broad": 9}
DIMS = {"narrow": 4, "broad": 16}
MIXED_PLACEMENTS = {"wide": "row_wise", "three": "replicated", "one": "table_wise", "narrow": "auto"}
MIXED_POOLINGS = {"wide": "sum", "three": "mean", "one": "none", "narrow": "mean", "broad": "sum"}
POOLINGS = ("sum", "mean", "none")
# How the bags of a step are shared out, as fractions where ranks begin.
SPLITS = ("even", "first_empty", "last_has_all", "all_empty", "table_empty", "feature_missing")
NUM_STEPS = len(SPLITS)


@dataclass(frozen=True)
class SparseCase:
    placement: str
    pooling: str
    kind: str
    exact: bool
    """Gradients are small multiples of a power of two, so that their sums are exact in any order."""
    weight_decay: float = 0.0

    def placement_of(self, table):
        return MIXED_PLACEMENTS.get(table, "column_wise") if self.placement == "mixed" else self.placement

    def pooling_of(self, table):
        return MIXED_POOLINGS[table] if self.pooling == "mixed" else self.pooling

    @property
    def id(self):
        decay = f"-decay{self.weight_decay}" if self.weight_decay else ""
        return f"{self.placement}-{self.pooling}-{self.kind}-{'exact' if self.exact else 'random'}{decay}"


CASES = [
    SparseCase(placement, pooling, kind, exact)
    for placement in ("table_wise", "row_wise", "auto")
    for pooling in POOLINGS
    for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam")
    for exact in (True, False)
    if placement != "auto" or (pooling == "sum" and kind == "rowwise_adagrad")
]
# The placements whose tables PyTorch updates, in part: sums in another order are what GRID_CASES have.
CASES += [
    SparseCase(placement, pooling, kind, True)
    for placement in ("column_wise", "replicated")
    for pooling in POOLINGS
    for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam")
]


# For grids of ranks: every placement and a mix, with poolings mixed.
GRID_CASES = [
    SparseCase(placement, "mixed", kind, exact)
    for placement, kinds in {
        "row_wise": ("rowwise_adagrad", "adam"),
        "table_wise": ("rowwise_adagrad", "sgd"),
        "column_wise": ("rowwise_adagrad", "adagrad", "adam"),
        "replicated": ("rowwise_adagrad", "adam"),
        "mixed": ("sgd", "adagrad", "rowwise_adagrad", "adam"),
    }.items()
    for kind in kinds
    for exact in ((True, False) if placement == "mixed" else (True,))
]
# A row that several ranks name decays once.
GRID_CASES += [SparseCase("mixed", "mixed", kind, True, 0.25) for kind in ("rowwise_adagrad", "adam")]


def bitwise(case):
    """Column shards under row-wise AdaGrad are updated by PyTorch, one process by fbgemm: the same formula, rounded
    elsewhere."""
    joint = case.kind == "rowwise_adagrad" and case.placement in ("column_wise", "mixed")
    return case.exact and not joint


def make(case, mesh=None, device="cpu", **options):
    tables = [
        TableConfig(name=name, num_rows=rows, dim=DIMS.get(name, DIM), placement=case.placement_of(name))
        for name, rows in TABLES.items()
    ]
    features = [FeatureConfig(name=f"f_{name}", table=name, pooling=case.pooling_of(name)) for name in TABLES]
    features.append(FeatureConfig(name="again", table="wide", pooling="none"))
    optimizer = SparseOptimizerConfig(kind=case.kind, learning_rate=0.125, eps=1e-6, weight_decay=case.weight_decay)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, device=device, seed=5, **options)


def bounds(split, rank, world_size):
    """Bags [start, end) of a rank."""
    if split == "first_empty":
        edges = [0, 0, *[NUM_BAGS * each // (world_size - 1) for each in range(1, world_size)]]
    elif split == "last_has_all":
        edges = [*[0] * world_size, NUM_BAGS]
    elif split == "all_empty":
        edges = [0] * (world_size + 1)
    else:
        edges = [NUM_BAGS * each // world_size for each in range(world_size + 1)]
    return edges[rank], edges[rank + 1]


def global_batch(case, step):
    """Feature -> (values, lengths, upstream gradient); ids are skewed, with many duplicates."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for name, table, pooling in _features(case):
        rows = TABLES[table]
        # powers of two keep the mean exact
        lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (NUM_BAGS,), generator=generator)]
        total = int(lengths.sum())
        values = torch.randint(0, rows, (total,), generator=generator)
        values[torch.rand(total, generator=generator) < 0.4] = rows // 2
        dim = DIMS.get(table, DIM)
        size = total if pooling == "none" else NUM_BAGS
        upstream = torch.randn(size, dim, generator=generator)
        if case.exact:
            upstream = (upstream * 4).round() / 8
        found[name] = (values, lengths, upstream)
    return found


def _features(case):
    return [*[(f"f_{name}", name, case.pooling_of(name)) for name in TABLES], ("again", "wide", "none")]


def rank_batch(case, step, rank, world_size):
    """A rank's part of the global batch: feature -> (values, offsets, upstream)."""
    split = SPLITS[step % len(SPLITS)]
    start, end = bounds(split, rank, world_size)
    found = {}
    pooling = {name: pooled for name, _, pooled in _features(case)}
    for name, (values, lengths, upstream) in global_batch(case, step).items():
        if split == "table_empty" and name == "f_three":
            lengths = torch.zeros_like(lengths)
            values = values[:0]
            upstream = upstream[:0] if pooling[name] == "none" else upstream
        if split == "feature_missing" and name == "f_wide" and rank == world_size - 1:
            continue
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        low, high = int(offsets[start]), int(offsets[end])
        part = slice(low, high) if pooling[name] == "none" else slice(start, end)
        found[name] = (values[low:high], offsets[start : end + 1] - low, upstream[part])
    return found


def joined(parts):
    """One process' batch that equals the ranks' batches together."""
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        mine = [part[name] for part in parts if name in part]
        values = torch.cat([each[0] for each in mine])
        lengths = torch.cat([each[1].diff() for each in mine])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found[name] = (values, offsets, torch.cat([each[2] for each in mine]))
    return found


def train_step(module, case, batch):
    """Outputs of one step, after its backward; exact cases have a loss that is linear in the rows."""
    outputs = module.lookup(module.exchange({name: (values, offsets) for name, (values, offsets, _) in batch.items()}))
    terms = [((each if case.exact else torch.tanh(each)) * batch[name][2]).sum() for name, each in outputs.items()]
    sum(terms).backward()
    return {name: each.detach().clone() for name, each in outputs.items()}


def full_state(module):
    """Whole tables on every rank that has a part of them."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()
        for key, value in module.state_dict().items()
    }


def check(world_size, results, case, bitwise, **options):
    """Results (state before, outputs of each step, state after) per rank against one process on the joined batches."""
    module = make(case, **options)
    first = full_state(module)
    parts = [[rank_batch(case, step, rank, world_size) for rank in range(world_size)] for step in range(NUM_STEPS)]
    outputs = [train_step(module, case, joined(part)) for part in parts]
    last = full_state(module)
    seen = set()
    for rank, (start, rank_outputs, end) in enumerate(results):
        for key, value in start.items():
            assert torch.equal(value, first[key]), key
        for key, value in end.items():
            seen.add(key)
            compare(value, last[key], bitwise, f"rank {rank}, {key}")
        for step in range(NUM_STEPS):
            for name, value in rank_outputs[step].items():
                before = [part[name] for part in parts[step][:rank] if name in part]
                offset = sum(len(each[2]) for each in before)
                expected = outputs[step][name][offset : offset + len(value)]
                compare(value, expected, bitwise, f"rank {rank}, step {step}, {name}")
    # every table is somewhere
    assert seen == set(last)
    assert all(not torch.equal(last[key], first[key]) for key in last if key.endswith("weight"))


def compare(value, expected, bitwise, what):
    if bitwise:
        assert torch.equal(value, expected), f"{what}: {(value - expected).abs().max()}"
    else:
        # Sums in another order: relative 1e-6 in a gradient, and steps of 0.125 that scale it to at most 1e-5.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")
