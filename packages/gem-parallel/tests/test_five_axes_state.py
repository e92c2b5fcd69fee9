"""A run of all five axes that moves 1 -> 2 -> 4 -> 8 -> 4 -> 2 -> 1 ranks, and ends as if it never had.

Dense weights, dense optimizer, tables and their optimizer state go through ``torch.distributed.checkpoint``.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from five_axes import EXACT, Layout, Training, batch_of
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.dist
PARTS = 8
"""The global batch of a step is cut into so many parts, which each world takes in runs."""
STAGES = (
    Layout(1, 1, 1, 1),
    Layout(1, 1, 2, 1),
    Layout(2, 2, 1, 2),
    Layout(2, 2, 2, 2),
    Layout(1, 2, 2, 4),
    Layout(1, 2, 1, 2),
    Layout(1, 1, 1, 1),
)


def optimizer_state(training):
    """Name -> tensor, as the ranks hold them; made if the optimizer has not stepped."""
    parameters = dict(training.net.named_parameters())
    if not training.optimizer.state:
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        training.optimizer.step()
    state = training.optimizer.state
    return {f"{name}.{key}": value for name, each in parameters.items() for key, value in state[each].items()}


def load(training, path):
    state = {"model": training.net.state_dict(), "optimizer": optimizer_state(training)}
    with torch.no_grad():
        for tensor in (*state["model"].values(), *state["optimizer"].values()):
            # Whatever is not loaded shows.
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(99)
    dcp.load(state, checkpoint_id=path)
    training.net.load_state_dict(state["model"])


def rank_stage(rank, world_size, folder, number):
    layout = STAGES[number]
    training = Training(EXACT, layout.build_mesh() if world_size > 1 else None)
    if number > 0:
        load(training, folder / str(number - 1))
    loaded = training.state()
    per_rank = PARTS // world_size
    loss, _, _ = training.step(batch_of(EXACT, number, rank * per_rank, (rank + 1) * per_rank, PARTS))
    state = {"model": training.net.state_dict(), "optimizer": optimizer_state(training)}
    dcp.save(state, checkpoint_id=folder / str(number))
    return loaded, loss, training.state()


@pytest.fixture(scope="module")
def stages(ranks):
    return [ranks("rank_stage", layout.world_size, number=number) for number, layout in enumerate(STAGES)]


def test_moving_between_worlds_equals_staying(stages):
    training = Training(EXACT)
    expected = training.state()
    for number, results in enumerate(stages):
        seen = set()
        for loaded, _, _ in results:
            seen |= set(loaded)
            for name, value in loaded.items():
                assert torch.equal(value, expected[name]), f"stage {number}, loaded {name}"
        assert seen == set(expected), number
        loss, _, _ = training.step(batch_of(EXACT, number, 0, PARTS, PARTS))
        expected = training.state()
        seen = set()
        for _, rank_loss, after in results:
            assert rank_loss == pytest.approx(loss, rel=1e-5, abs=1e-6), number
            seen |= set(after)
            for name, value in after.items():
                assert torch.equal(value, expected[name]), f"stage {number}, after a step {name}"
        assert seen == set(expected), number
    assert int(expected["head.weight.step"]) == int(expected["tables.wide.step"]) == len(STAGES)
