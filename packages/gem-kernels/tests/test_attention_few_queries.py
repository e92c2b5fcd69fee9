"""The backward of few queries over many keys against float64 and beside the kernels of the two sides."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gem_kernels import jagged_attention

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)


class Case(NamedTuple):
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    dim: int
    dim_v: int


CASES = [
    Case((20, 3, 0, 17), (5, 0, 70, 133), 2, 32, 32),
    Case((16, 16), (64, 128), 1, 64, 64),
    Case((1, 64), (1, 65), 3, 40, 24),
    Case((48, 1, 0, 33), (100, 31, 7, 65), 2, 128, 128),
]


class Call(NamedTuple):
    tensors: tuple[Tensor, Tensor, Tensor]
    offsets_q: Tensor
    offsets_k: Tensor
    max_q: int
    max_k: int


def offsets(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def draw(case: Case, dtype: torch.dtype, device: str = "cpu") -> Call:
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (sum(case.queries), case.heads, case.dim),
        (sum(case.keys), case.heads, case.dim),
        (sum(case.keys), case.heads, case.dim_v),
    )
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    sides = (offsets(case.queries, device), offsets(case.keys, device))
    return Call((q, k, v), *sides, max(case.queries), max(case.keys))


def forward(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return jagged_attention(
        *tensors,
        offsets_q=call.offsets_q,
        offsets_k=call.offsets_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        return_lse=True,
    )


def exact(call: Call) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Output, log-sum-exp and their gradients, then the gradients of q, k and v, in float64 on the CPU."""
    on_cpu = call._replace(offsets_q=call.offsets_q.cpu(), offsets_k=call.offsets_k.cpu())
    leaves = [x.detach().double().cpu().requires_grad_() for x in call.tensors]
    out, lse = forward(on_cpu, tuple(leaves))
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    # A query without keys has no log-sum-exp to follow.
    dlse[lse.isinf()] = 0.0
    total = (out * do).sum() + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
    return (out.detach(), lse.detach(), do, dlse), list(torch.autograd.grad(total, leaves))


def assert_close(actual, expected: list[Tensor], tolerance: float) -> None:
    for value, reference in zip(actual, expected, strict=True):
        scale = reference.abs().max().item() if reference.numel() else 1.0
        torch.testing.assert_close(value.double().cpu(), reference, rtol=0, atol=tolerance * scale)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_interpreted_kernel(case, with_dlse, monkeypatch):
    from gem_kernels._src.jagged_attention import backward, backward_few_queries

    monkeypatch.setattr(backward_few_queries, "_MIN_PROGRAMS", 1)
    launched = []
    launch = backward.launch_few_queries
    monkeypatch.setattr(
        backward, "launch_few_queries", lambda *args, **options: launched.append(1) or launch(*args, **options)
    )
    call = draw(case, torch.float16)
    (out, lse, do, dlse), expected = exact(call)
    if not with_dlse:
        leaves = [x.double().requires_grad_() for x in call.tensors]
        expected = list(torch.autograd.grad(forward(call, tuple(leaves))[0], leaves, do))
    gradients = backward.launch_backward(
        do.half(),
        dlse.float() if with_dlse else None,
        *call.tensors,
        out.half(),
        lse.float(),
        call.offsets_q,
        call.offsets_k,
        call.max_q,
        call.max_k,
        case.dim**-0.5,
        -1,
        -1,
    )
    assert launched
    assert_close(gradients, expected, 4e-3)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("few", [True, False])
def test_interpreted_kernel_where_keys_are_values(few, monkeypatch):
    from gem_kernels._src.jagged_attention import backward, backward_few_queries

    monkeypatch.setattr(backward_few_queries, "_MIN_PROGRAMS", 1 if few else 1000)
    call = draw(CASES[0], torch.float16)
    q, k, _ = call.tensors
    leaves = [x.double().requires_grad_() for x in (q, k)]
    out, lse = forward(call, (*leaves, leaves[1]))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = list(torch.autograd.grad(out, leaves, do))
    sides = (call.offsets_q, call.offsets_k, call.max_q, call.max_k, q.shape[2] ** -0.5, -1, -1)
    gradients = backward.launch_backward_of_one(
        do.half(), None, q, k, out.detach().half(), lse.detach().float(), *sides
    )
    assert_close(gradients, expected, 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("few", [True, False])
def test_cuda_where_keys_are_values(few, monkeypatch):
    from gem_kernels._src.jagged_attention import backward_few_queries

    monkeypatch.setattr(backward_few_queries, "_MIN_PROGRAMS", 1 if few else 1000)
    call = draw(CASES[0], torch.bfloat16, "cuda")
    q, k, _ = call.tensors
    on_cpu = call._replace(offsets_q=call.offsets_q.cpu(), offsets_k=call.offsets_k.cpu())
    exact_leaves = [x.double().cpu().requires_grad_() for x in (q, k)]
    out, _ = forward(on_cpu, (*exact_leaves, exact_leaves[1]))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = list(torch.autograd.grad(out, exact_leaves, do))
    leaves = [x.requires_grad_() for x in (q, k)]
    out, _ = forward(call, (*leaves, leaves[1]))
    assert_close(torch.autograd.grad(out, leaves, do.to("cuda", torch.bfloat16)), expected, 2**-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cuda_kernel(case, dtype, monkeypatch):
    from gem_kernels._src.jagged_attention import backward, backward_few_queries

    monkeypatch.setattr(backward_few_queries, "_MIN_PROGRAMS", 1)
    launched = []
    launch = backward.launch_few_queries
    monkeypatch.setattr(
        backward, "launch_few_queries", lambda *args, **options: launched.append(1) or launch(*args, **options)
    )
    call = draw(case, dtype, "cuda")
    (_, lse, do, dlse), expected = exact(call)
    leaves = tuple(x.requires_grad_() for x in call.tensors)

    def gradients() -> tuple[Tensor, ...]:
        out, sums = forward(call, leaves)
        grads = (do.to("cuda", dtype), torch.where(lse.isinf(), 0.0, dlse).float().cuda())
        return torch.autograd.grad((out, sums), leaves, grads)

    first = gradients()
    assert launched
    assert_close(first, expected, 16 * torch.finfo(dtype).eps)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_cuda_takes_it_for_many_sequences_of_few_queries(dim, monkeypatch):
    from gem_kernels._src.jagged_attention import backward

    monkeypatch.setattr(backward, "launch_dkdv", None)
    case = Case((48,) * 300, (0, 7, 200) * 100, 4, dim, dim)
    call = draw(case, torch.bfloat16, "cuda")
    leaves = tuple(x.requires_grad_() for x in call.tensors)
    out, _ = forward(call, leaves)
    do = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, do)
    on_cpu = call._replace(offsets_q=call.offsets_q.cpu(), offsets_k=call.offsets_k.cpu())
    exact_leaves = tuple(x.detach().double().cpu().requires_grad_() for x in leaves)
    expected = torch.autograd.grad(forward(on_cpu, exact_leaves)[0], exact_leaves, do.double().cpu())
    assert_close(gradients, list(expected), 2**-5)
