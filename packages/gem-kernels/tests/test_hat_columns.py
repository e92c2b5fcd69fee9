"""hat_columns against its definition, event by event: CPU, interpreted kernel, CUDA."""

import math
import os

import pytest
import torch

from gem_kernels.hat_columns import hat_columns

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
LENGTHS = (3, 0, 70, 1, 130, 0)
KNOTS = ((16, 20.0), (12, math.log(100.0)))
WIDTHS = [(1, 32), (0, 28), (5, 33)]


def draw(num_dense, device="cpu"):
    lengths = torch.tensor(LENGTHS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(int(offsets[-1]), num_dense, generator=generator)
    # From now to beyond the last knot.
    age = torch.exp(22.0 * torch.rand(int(offsets[-1]), generator=generator)) - 1.0
    return dense.to(device), age.to(device), offsets.to(device)


def hats(x, num_knots, largest):
    step = largest / (num_knots - 1)
    return [max(0.0, 1.0 - abs(min(x, largest) / step - knot)) for knot in range(num_knots)]


def expected(dense, age, width):
    rows, event = [], 0
    for length in LENGTHS:
        for place in range(length):
            row = dense[event].tolist() + hats(math.log1p(age[event].item()), *KNOTS[0])
            row += hats(math.log1p(length - 1 - place), *KNOTS[1])
            rows.append(row + [0.0] * (width - len(row)))
            event += 1
    return torch.tensor(rows)


def call(dense, age, offsets, width):
    return hat_columns(dense, age, offsets, max_seqlen=130, age_knots=KNOTS[0], recency_knots=KNOTS[1], width=width)


@pytest.mark.parametrize(("num_dense", "width"), WIDTHS)
def test_cpu(num_dense, width):
    dense, age, offsets = draw(num_dense)
    torch.testing.assert_close(call(dense, age, offsets, width), expected(dense, age, width), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("num_dense", "width"), WIDTHS)
def test_interpreted_kernel(num_dense, width):
    from gem_kernels._src.hat_columns.kernel import launch

    dense, age, offsets = draw(num_dense)
    for bound in (130, 500):
        columns = launch(dense, age, offsets, bound, *KNOTS, width)
        torch.testing.assert_close(columns, expected(dense, age, width), rtol=1e-5, atol=1e-5)


def test_no_events():
    empty = torch.zeros(3, dtype=torch.int64)
    assert call(torch.zeros(0, 1), torch.zeros(0), empty, 32).shape == (0, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": torch.zeros(4, 1)}, r"`age` must have shape \(T,\), got \(4, 1\)"),
        ({"dense": torch.zeros(3, 1)}, r"`dense` must have shape \(T, n\) with T = 4, got \(3, 1\)"),
        ({"offsets": torch.zeros(2)}, r"`offsets` must be int32 or int64, got torch.float32; cast"),
        (
            {"offsets": torch.zeros(2, 2).long()},
            r"`offsets` must have shape \(B \+ 1,\) .*, got \(2, 2\); make it with",
        ),
        ({"age_knots": (1, 2.0)}, "`age_knots` must be at least two knots"),
        ({"recency_knots": (2, 0.0)}, "`recency_knots` must be at least two knots"),
        ({"width": 4}, "`width` must be at least the 5 columns that are filled, got 4"),
        ({"width": 5.0}, "`width` must be a Python int, got float"),
        ({"age_knots": None}, "`age_knots` must be a pair of the number of knots .*, got None"),
        ({"age_knots": (2, 1.0, 3)}, "`age_knots` must be a pair"),
        ({"recency_knots": ("a", 1.0)}, r"`recency_knots\[0\]` must be a Python int, got str"),
        ({"age_knots": (2, float("nan"))}, r"`age_knots\[1\]` must be finite, got nan"),
        ({"max_seqlen": None}, "`max_seqlen` must be a Python int, got NoneType"),
        ({"max_seqlen": 3}, "`max_seqlen` must be at least the longest sequence, 4 tokens"),
        ({"offsets": torch.tensor([0, 3])}, "`offsets` must end at the number of packed rows, 4, got 3"),
        ({"offsets": torch.tensor([0, 3, 2, 4])}, "`offsets` must not decrease, got 3 then 2"),
        ({"dense": torch.zeros(4, 1, device="meta")}, "`dense` must be on the device of `age`, cpu, got meta"),
        ({"age": torch.zeros(4, requires_grad=True)}, "`age` gets no gradient"),
    ],
)
def test_bad_input_is_named(change, words):
    given = {
        "dense": torch.zeros(4, 1),
        "age": torch.zeros(4),
        "offsets": torch.tensor([0, 4]),
        "max_seqlen": 4,
        "age_knots": (2, 1.0),
        "recency_knots": (2, 1.0),
        "width": 5,
    } | change
    with pytest.raises((TypeError, ValueError), match=f"hat_columns: {words}"):
        hat_columns(given.pop("dense"), given.pop("age"), given.pop("offsets"), **given)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_dense", "width"), WIDTHS)
def test_cuda(num_dense, width):
    dense, age, offsets = draw(num_dense, "cuda")
    columns = call(dense, age, offsets, width).cpu()
    torch.testing.assert_close(columns, expected(dense.cpu(), age.cpu(), width), rtol=1e-5, atol=1e-5)
    assert torch.equal(call(dense, age, offsets.int(), width).cpu(), columns)
