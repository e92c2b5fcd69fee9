"""Dense and sparse axes together equal one process: loss, gradients, norm, weights and optimizer state of every step.

Every axis alone (2 ranks: one dense beside one sparse axis), every pair (4 ranks), all five at once (8 ranks), on gloo.
"""

from itertools import product

import pytest
import torch
from five_axes import EXACT, RANDOM, Layout, Training, batch_of
from sparse_cases import NUM_STEPS, compare

pytestmark = pytest.mark.dist

LAYOUTS = [
    *[Layout(*dense, copies) for dense, copies in product(((2, 1, 1), (1, 2, 1), (1, 1, 2)), (1, 2))],
    *[Layout(*dense, 2) for dense in ((2, 2, 1), (2, 1, 2), (1, 2, 2))],
    Layout(2, 2, 2, 2),
]


def rank_train(rank, world_size, folder):
    found = {}
    for layout in (layout for layout in LAYOUTS if layout.world_size == world_size):
        mesh = layout.build_mesh()
        for numbers in (EXACT, RANDOM):
            training = Training(numbers, mesh)
            steps = [training.step(batch_of(numbers, step, rank, rank + 1, world_size)) for step in range(NUM_STEPS)]
            found[layout.id, numbers.id] = steps, training.state()
    return found


@pytest.fixture(scope="module")
def trained(ranks):
    """World size -> results per rank; started when first asked for."""
    found = {}

    def get(world_size):
        if world_size not in found:
            found[world_size] = ranks("rank_train", world_size)
        return found[world_size]

    return get


@pytest.fixture(scope="module")
def one_process():
    """(numbers, parts of the batch) -> steps and state of one process; the parts shape the batch."""
    found = {}

    def get(numbers, parts):
        if (numbers, parts) not in found:
            training = Training(numbers)
            steps = [training.step(batch_of(numbers, step, 0, parts, parts)) for step in range(NUM_STEPS)]
            found[numbers, parts] = steps, training.state()
        return found[numbers, parts]

    return get


@pytest.mark.parametrize("numbers", [EXACT, RANDOM], ids=lambda numbers: numbers.id)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_equal_to_one_process(trained, one_process, layout, numbers):
    """Bit for bit where sums are exact; else relative 1e-5 of what six steps leave of sums in another order."""
    steps, state = one_process(numbers, layout.world_size)
    assert NUM_STEPS >= 5
    seen, seen_gradients = set(), set()
    for rank, result in enumerate(trained(layout.world_size)):
        rank_steps, rank_state = result[layout.id, numbers.id]
        for step, ((loss, gradients, norm), (expected_loss, expected, expected_norm)) in enumerate(
            zip(rank_steps, steps, strict=True)
        ):
            assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6), (rank, step)
            assert norm == pytest.approx(expected_norm, rel=1e-5), (rank, step)
            for name, gradient in gradients.items():
                compare(gradient, expected[name], numbers.exact, f"rank {rank}, step {step}, gradient of {name}")
            seen_gradients |= set(gradients)
        for name, value in rank_state.items():
            compare(value, state[name], numbers.exact, f"rank {rank}, {name}")
        seen |= set(rank_state)
    assert seen == set(state)
    assert seen_gradients == set(steps[0][1])
    # optimizer state of both parts is among what was compared
    kinds = {"exp_avg", "exp_avg_sq", "step"} if numbers.exact else {"momentum_buffer", "sum"}
    assert kinds <= {name.rpartition(".")[2] for name in state}


@pytest.mark.parametrize("numbers", [EXACT, RANDOM], ids=lambda numbers: numbers.id)
def test_every_parameter_trains(one_process, numbers):
    """Equality above means something: nothing stays as it was initialised."""
    first = Training(numbers).state()
    for name, value in one_process(numbers, 8)[1].items():
        if name in first:
            assert not torch.equal(value, first[name]), name


def rank_train_cuda(rank, world_size, folder):
    """As `rank_train`, through NCCL, numbers that round."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for layout in (layout for layout in LAYOUTS if layout.world_size == world_size):
        training = Training(RANDOM, layout.build_mesh("cuda"), device)
        steps = [training.step(batch_of(RANDOM, step, rank, rank + 1, world_size)) for step in range(NUM_STEPS)]
        found[layout.id] = steps, training.state()
    return found


@pytest.mark.gpu
def test_nccl_ranks_equal_one_cpu_process(ranks, one_process):
    """The layouts of as many ranks as there are GPUs: 8, 4 or 2."""
    world_size = next((size for size in (8, 4, 2) if size <= torch.cuda.device_count()), None)
    if world_size is None:
        pytest.skip("needs two GPUs or more")
    steps, state = one_process(RANDOM, world_size)
    results = ranks("rank_train_cuda", world_size, backend="nccl")
    seen = set()
    for rank, result in enumerate(results):
        for layout, (rank_steps, rank_state) in result.items():
            for step, ((loss, gradients, norm), (expected_loss, expected, expected_norm)) in enumerate(
                zip(rank_steps, steps, strict=True)
            ):
                assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5), (layout, rank, step)
                assert norm == pytest.approx(expected_norm, rel=1e-4), (layout, rank, step)
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
            for name, value in rank_state.items():
                torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-4)
            seen |= set(rank_state)
    assert seen == set(state)
