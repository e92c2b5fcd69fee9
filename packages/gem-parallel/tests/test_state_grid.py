"""A run that moves between worlds of 1, 8, 2 and 4 ranks, copies and placements, and ends as if it never had."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sparse_cases import SparseCase, compare, full_state, joined, make, rank_batch, train_step

from gem_parallel import ParallelDims

pytestmark = pytest.mark.dist
RANKS = 8
"""Parts that the global batch of every step is cut into; each world takes them in runs."""


@dataclass(frozen=True)
class Stage:
    world_size: int
    replicas: int
    placement: str


# Worlds of 8 once; every placement follows another one.
STAGES = (
    Stage(1, 1, "auto"),
    Stage(8, 2, "mixed"),
    Stage(2, 2, "row_wise"),
    Stage(4, 1, "column_wise"),
    Stage(2, 1, "table_wise"),
    Stage(4, 2, "replicated"),
    Stage(1, 1, "auto"),
)
CASES = [
    (SparseCase("auto", "mixed", "adam", True), torch.float32),
    (SparseCase("auto", "mixed", "rowwise_adagrad", True), torch.float32),
    (SparseCase("auto", "mixed", "adam", True), torch.bfloat16),
]
NAMES = [f"{case.kind}-{str(dtype).removeprefix('torch.')}" for case, dtype in CASES]


def batch_of(case, step, rank, world_size):
    per_rank = RANKS // world_size
    # the first splits only: those that leave every feature on every rank, so that parts join
    parts = [rank_batch(case, step % 4, part, RANKS) for part in range(rank * per_rank, (rank + 1) * per_rank)]
    return joined(parts)


def rank_stage(rank, world_size, folder, number):
    """Load the previous stage's checkpoints, take one step, save; state as loaded and after the step."""
    stage = STAGES[number]
    dims = ParallelDims.for_world(world_size, sparse_replicate=stage.replicas)
    mesh = dims.build_mesh("cpu").sparse if world_size > 1 else None
    found = {}
    for name, (case, dtype) in zip(NAMES, CASES, strict=True):
        module = make(replace(case, placement=stage.placement), mesh, weight_dtype=dtype)
        if number > 0:
            with torch.no_grad():
                for value in module.state_dict().values():
                    # whatever is not loaded shows
                    (value.to_local() if hasattr(value, "to_local") else value).fill_(99)
            state = {"embeddings": module.state_dict()}
            dcp.load(state, checkpoint_id=folder / f"{name}-{number - 1}")
            module.load_state_dict(state["embeddings"])
        loaded = full_state(module)
        train_step(module, case, batch_of(case, number, rank, world_size))
        dcp.save({"embeddings": module.state_dict()}, checkpoint_id=folder / f"{name}-{number}")
        found[name] = (loaded, full_state(module))
    return found


@pytest.fixture(scope="module")
def stages(ranks):
    return [ranks("rank_stage", stage.world_size, number=number) for number, stage in enumerate(STAGES)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_moving_between_worlds_equals_staying(stages, index):
    case, dtype = CASES[index]
    name = NAMES[index]
    module = make(case, weight_dtype=dtype)
    first = full_state(module)
    previous = first
    for number, results in enumerate(stages):
        seen = set()
        for loaded, _ in (result[name] for result in results):
            for key, value in loaded.items():
                assert torch.equal(value, previous[key]), (number, key)
                seen.add(key)
        assert seen == set(first), number
        previous = {key: value for result in results for key, value in result[name][1].items()}
        train_step(module, case, batch_of(case, number, 0, 1))
        # Column shards under row-wise AdaGrad are rounded elsewhere than fbgemm's update.
        bitwise = case.kind != "rowwise_adagrad"
        for key, value in full_state(module).items():
            compare(previous[key], value, bitwise, f"stage {number}, {key}")
    assert all(not torch.equal(previous[key], first[key]) for key in first if key.endswith("weight"))
