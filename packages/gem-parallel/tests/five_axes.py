"""A model that uses all five axes in one step, and the layouts of the ranks that it is trained on."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from sparse_cases import DIM, DIMS, NUM_BAGS, SPLITS, SparseCase, bounds, full_state, make, rank_batch
from torch import nn
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, clip_grad_norm_, parallelize

WIDTH = 5
ROWS_DIM = 4 * DIM + DIMS["narrow"] + DIMS["broad"]


@dataclass(frozen=True)
class Layout:
    """Degrees of the axes; sparse_shard is what remains."""

    dp_replicate: int
    dp_shard: int
    ep: int
    sparse_replicate: int

    @property
    def world_size(self):
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def id(self):
        sparse_shard = self.world_size // self.sparse_replicate
        return f"{self.dp_replicate}x{self.dp_shard}x{self.ep}-{self.sparse_replicate}x{sparse_shard}"

    def build_mesh(self, device_type="cpu"):
        return ParallelDims.for_world(
            self.world_size, dp_replicate=self.dp_replicate, ep=self.ep, sparse_replicate=self.sparse_replicate
        ).build_mesh(device_type)


@dataclass(frozen=True)
class Numbers:
    """exact: the loss is linear in all parameters and all inputs are small multiples of 1/8, so that every sum of
    gradients is exact and no order of summation shows. Else: layers in a row, and a loss that is not linear."""

    exact: bool

    @property
    def case(self):
        # The moment of row-wise AdaGrad is one number per row, of which column shards add parts.
        return SparseCase("mixed", "mixed", "adam" if self.exact else "rowwise_adagrad", self.exact)

    @property
    def id(self):
        return "exact" if self.exact else "random"


EXACT, RANDOM = Numbers(True), Numbers(False)


class Net(nn.Module):
    """Tables inside a model that ``parallelize`` shards: odd sizes, five experts, a parameter of one element."""

    def __init__(self, numbers, mesh, device):
        super().__init__()
        self.tables = make(numbers.case, None if mesh is None else mesh.sparse, device)
        torch.manual_seed(0)
        width = WIDTH if numbers.exact else ROWS_DIM + WIDTH
        self.stem = nn.Linear(width, 7)
        width = WIDTH if numbers.exact else 7
        experts = [nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 7)) for _ in range(5)]
        if numbers.exact:
            experts = [nn.Linear(width, 7) for _ in range(5)]
        self.experts = ExpertParallel(experts, None if mesh is None else mesh.ep_group)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 1, bias=False)
        self.exact = numbers.exact

    def forward(self, batch):
        """The loss: a sum over the rank's samples."""
        pairs = {name: (values, offsets) for name, (values, offsets, _) in batch.ids.items()}
        rows = self.tables.lookup(self.tables.exchange(pairs))
        x, y = batch.dense, batch.target
        if self.exact:
            loss = sum((each * batch.ids[name][2]).sum() for name, each in rows.items())
            terms = [(self.stem(x) * y).sum(), (self.experts(x) * y).sum(), (self.head(x) * y).sum()]
            return loss + sum(terms) + (self.gain * y).sum()
        parts = [x]
        for feature in self.tables.features:
            table = feature.table
            parts.append(self.pooled(feature, batch, rows.get(feature.name), DIMS.get(table, DIM)))
        hidden = torch.tanh(self.stem(torch.cat(parts, dim=1)))
        hidden = hidden * self.gain + self.experts(hidden)
        return ((self.head(hidden) - y) ** 2).sum()

    def pooled(self, feature, batch, rows, dim):
        """(samples, dim); a feature that the batch leaves out is zeros."""
        if rows is None:
            return batch.dense.new_zeros(len(batch.dense), dim)
        if feature.pooling != "none":
            return rows
        lengths = batch.ids[feature.name][1].diff()
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return rows.new_zeros(len(lengths), dim).index_add(0, owner, rows)


@dataclass(frozen=True)
class Batch:
    ids: dict
    dense: torch.Tensor
    target: torch.Tensor

    def to(self, device):
        ids = {name: tuple(each.to(device) for each in parts) for name, parts in self.ids.items()}
        return Batch(ids=ids, dense=self.dense.to(device), target=self.target.to(device))


def batch_of(numbers, step, first, last, parts):
    """Parts [first, last) of the global batch cut into ``parts``: empty and skewed ones, one with a feature missing."""
    generator = torch.Generator().manual_seed(200 + step)
    dense = torch.randint(-8, 9, (NUM_BAGS, WIDTH), generator=generator) / 8
    target = torch.randint(-8, 9, (NUM_BAGS, 1), generator=generator) / 8
    edges = [bounds(SPLITS[step % len(SPLITS)], part, parts) for part in range(first, last)]
    start, end = edges[0][0], edges[-1][1]
    found = [rank_batch(numbers.case, step, part, parts) for part in range(first, last)]
    ids = {}
    for name in dict.fromkeys(name for part in found for name in part):
        values, lengths, upstream = [], [], []
        for part, (low, high) in zip(found, edges, strict=True):
            if name in part:
                values.append(part[name][0])
                lengths.append(part[name][1].diff())
                upstream.append(part[name][2])
            else:
                # What a part leaves out is, beside parts that have it, bags without ids; f_wide is pooled.
                lengths.append(torch.zeros(high - low, dtype=torch.int64))
                upstream.append(torch.zeros(high - low, DIM))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        ids[name] = (torch.cat(values), offsets, torch.cat(upstream))
    return Batch(ids=ids, dense=dense[start:end], target=target[start:end])


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


class Training:
    """One rank's model and dense optimizer."""

    def __init__(self, numbers, mesh=None, device="cpu"):
        self.numbers, self.mesh, self.device = numbers, mesh, device
        # Initialised on the CPU everywhere; the tables stay where they are.
        self.net = Net(numbers, mesh, device).to(device)
        if mesh is not None:
            parallelize(self.net, ParallelPlan(shard_units=("stem", "head")), mesh)
        parameters = list(self.net.parameters())
        if numbers.exact:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.125, foreach=False)
        else:
            # Adam would turn what rounding leaves of a zero gradient into a whole step.
            self.optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False)

    def step(self, batch):
        """(loss over all ranks, gradients, norm)"""
        self.optimizer.zero_grad()
        loss = self.net(batch.to(self.device))
        # A power of two, which keeps exact gradients exact.
        (loss / 16).backward()
        total = loss.detach().double()
        if self.mesh is not None:
            dist.all_reduce(total)
        gradients = {name: full(parameter.grad) for name, parameter in self.net.named_parameters()}
        # Exact gradients must stay so: the bound is above every norm.
        norm = clip_grad_norm_(self.net.parameters(), 1e6 if self.numbers.exact else 1.0, self.mesh)
        self.optimizer.step()
        return float(total), gradients, float(norm)

    def state(self):
        """Whole weights and optimizer state of the dense part, and of the tables, of what this rank has a part of."""
        found = {}
        for name, parameter in self.net.named_parameters():
            found[name] = full(parameter)
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:
                    found[f"{name}.{key}"] = full(value)
        return found | full_state(self.net.tables)
