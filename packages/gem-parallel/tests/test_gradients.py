"""Norm and clipping in one process: what counts, and what is refused."""

import pytest
import torch
from torch import nn

from gem_parallel import ExpertParallel, clip_grad_norm_, grad_norm


def parameter(values):
    found = nn.Parameter(torch.zeros(len(values)))
    found.grad = torch.tensor(values)
    return found


def test_a_parameter_given_twice_counts_once():
    first, second = parameter([3.0]), parameter([4.0])
    assert float(grad_norm([first, second, first])) == 5.0
    assert float(clip_grad_norm_([first, second, first], 2.5)) == 5.0
    assert float(first.grad) == pytest.approx(1.5, rel=1e-6)


def test_experts_count_in_one_process():
    layer = ExpertParallel([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    layer.experts["0"].weight.grad, layer.experts["1"].weight.grad = torch.tensor([[3.0]]), torch.tensor([[4.0]])
    assert float(grad_norm(layer.parameters())) == 5.0


def sparse_table():
    table = nn.Embedding(4, 1, sparse=True)
    # Row 2 occurs twice: its gradient is 1 + 3, and not two of 1 and 3.
    table(torch.tensor([2, 0, 2])).backward(torch.tensor([[1.0], [3.0], [3.0]]))
    return table.weight


def test_sparse_gradients_only_where_asked_for():
    dense = parameter([12.0])
    assert float(grad_norm([dense])) == 12.0
    assert float(grad_norm([dense], sparse_params=[sparse_table()])) == 13.0
    weight = sparse_table()
    assert float(clip_grad_norm_([dense], 6.5, sparse_params=[weight])) == 13.0
    assert float(dense.grad) == pytest.approx(6.0, rel=1e-6)
    assert weight.grad.to_dense().flatten().tolist() == pytest.approx([1.5, 0.0, 2.0, 0.0], rel=1e-6)


def test_sparse_gradient_among_the_dense_is_refused():
    with pytest.raises(
        ValueError, match=r"grad_norm: gradients of `params` must be dense, .* at position 1; give it in"
    ):
        grad_norm([parameter([1.0]), sparse_table()])


def test_no_gradient_is_zero():
    assert float(grad_norm([nn.Parameter(torch.ones(2))])) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize(
    "given",
    [lambda param: param, lambda param: iter([param]), lambda param: (each for each in [param]), lambda param: {param}],
    ids=["a tensor", "an iterator", "a generator", "a set"],
)
def test_a_tensor_or_any_iterable_as_in_torch(given):
    ours, theirs = parameter([3.0, 4.0]), parameter([3.0, 4.0])
    norm = clip_grad_norm_(given(ours), 1.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert torch.equal(ours.grad, theirs.grad)
    assert float(grad_norm([], sparse_params=sparse_table())) == 5.0
    matrix = nn.Parameter(torch.zeros(2, 2))
    matrix.grad = torch.full((2, 2), 2.0)
    assert float(grad_norm(matrix)) == 4.0


REFUSED = {
    "module": (lambda: grad_norm(nn.Linear(1, 1)), TypeError, "`params` must be .* got Linear; pass module.parameters"),
    "Sequential": (lambda: clip_grad_norm_(nn.Sequential(nn.Linear(1, 1)), 1.0), TypeError, "got Sequential; pass"),
    "sparse module": (lambda: grad_norm([], sparse_params=nn.Embedding(1, 1)), TypeError, "`sparse_params` must be"),
    "pairs": (
        lambda: grad_norm(nn.Linear(1, 1).named_parameters()),
        TypeError,
        "hold tensors, got tuple at position 0",
    ),
    "None": (lambda: grad_norm(None), TypeError, "got NoneType"),
    "mesh": (lambda: grad_norm([], 2), TypeError, "grad_norm: `mesh` must be a ParallelMesh or None, got int; pass"),
    "str": (lambda: clip_grad_norm_([], "1"), TypeError, "clip_grad_norm_: `max_norm` must be a number, got str '1'"),
    "no bound": (lambda: clip_grad_norm_([], None), TypeError, "must be a number, got NoneType"),
    "bool": (lambda: clip_grad_norm_([], True), TypeError, "must be a number, got bool"),
    "zero": (lambda: clip_grad_norm_([], 0), ValueError, "`max_norm` must be above 0, got 0; inf"),
    "NaN": (lambda: clip_grad_norm_([], float("nan")), ValueError, "must be above 0, got nan"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_other_kinds(call, error, text):
    with pytest.raises(error, match=text):
        call()
