"""The jagged helpers against loops over sequences: values bitwise, gradients, sizes, errors."""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from gem_kernels import reference
from gem_kernels.jagged import (
    jagged_concat,
    jagged_last_k,
    jagged_split,
    jagged_to_padded,
    lengths_to_offsets,
    offsets_to_lengths,
    padded_to_jagged,
)
from gem_kernels.testing import make_offsets


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    lengths: tuple[int, ...]
    trailing: tuple[int, ...] = (3,)
    offsets_dtype: torch.dtype = torch.int64

    @property
    def offsets(self):
        return make_offsets(self.lengths, dtype=self.offsets_dtype)

    def values(self, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sum(self.lengths), *self.trailing, generator=generator, dtype=torch.float64).to(dtype)


CASES = [
    Case(id="edges", lengths=(0, 1, 5, 0, 4, 65, 0)),
    Case(id="all-empty", lengths=(0, 0, 0)),
    Case(id="no-sequences", lengths=()),
    Case(id="one-token", lengths=(1,)),
    Case(id="outlier", lengths=(2, 300, 0, 1)),
    Case(id="scalars", lengths=(2, 0, 3), trailing=()),
    Case(id="heads", lengths=(2, 0, 3), trailing=(2, 4)),
    Case(id="no-channels", lengths=(2, 0, 3), trailing=(0,)),
    Case(id="int32", lengths=(2, 0, 3), offsets_dtype=torch.int32),
]
BY_CASE = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
SIZES = pytest.mark.parametrize("size", [0, 1, 4, 5, 70])


def assert_same_function(actual, expected, *inputs):
    """Equal values, bit by bit, and equal gradients for a random gradient of the output."""
    tensors = [x.detach().requires_grad_() for x in inputs]
    x, y = actual(*tensors), expected(*tensors)
    assert x.dtype == y.dtype
    assert torch.equal(x, y)
    do = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    for dx, dy in zip(torch.autograd.grad(x, tensors, do), torch.autograd.grad(y, tensors, do), strict=True):
        assert torch.equal(dx, dy)


@BY_CASE
def test_lengths_and_offsets_are_inverse(case):
    lengths = torch.tensor(case.lengths, dtype=case.offsets_dtype)
    offsets = lengths_to_offsets(lengths)
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == case.offsets.tolist()
    assert torch.equal(offsets_to_lengths(case.offsets), lengths)


def test_offsets_of_int32_lengths_pass_int32():
    lengths = torch.full((3,), 2**30, dtype=torch.int32)
    assert lengths_to_offsets(lengths).tolist() == [0, 2**30, 2**31, 3 * 2**30]


@BY_CASE
@SIZES
def test_jagged_to_padded(case, size):
    assert_same_function(
        lambda x: jagged_to_padded(x, case.offsets, size),
        lambda x: reference.jagged.jagged_to_padded(x, case.offsets, size),
        case.values(),
    )


@BY_CASE
@SIZES
def test_padded_to_jagged(case, size):
    padded = torch.randn(len(case.lengths), size, *case.trailing, dtype=torch.float64)
    for total in (None, sum(case.lengths)):
        assert_same_function(
            lambda x, total=total: padded_to_jagged(x, case.offsets, total),
            lambda x: reference.jagged.padded_to_jagged(x, case.offsets),
            padded,
        )


@BY_CASE
def test_padding_and_packing_are_inverse(case):
    values = case.values()
    longest = max(case.lengths, default=0)
    padded = jagged_to_padded(values, case.offsets, longest, fill=float("nan"))
    assert torch.equal(padded_to_jagged(padded, case.offsets), values)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.uint8, -1), (torch.uint8, 256), (torch.bool, 2), (torch.float32, 1e300), (torch.float16, 7e4)],
)
def test_a_fill_that_the_dtype_does_not_hold_is_refused(dtype, fill):
    values, offsets = torch.zeros(3, dtype=dtype), torch.tensor([0, 1, 3])
    with pytest.raises(ValueError, match=f"^jagged_to_padded: `fill` must be a number that {dtype} .* holds"):
        jagged_to_padded(values, offsets, 2, fill)
    largest = 1 if dtype == torch.bool else 255 if dtype == torch.uint8 else float("-inf")
    assert jagged_to_padded(values, offsets, 2, largest)[0, 1].item() == largest


def test_totals_that_are_read_compile_whole():
    offsets, part = torch.tensor([0, 3, 8]), torch.tensor([0, 2, 4])
    for function, x in (
        (lambda x, o, a: padded_to_jagged(x, o), torch.randn(2, 5, 3)),
        (lambda x, o, a: jagged_split(x, o, a)[1][0], torch.randn(8, 3)),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, offsets, part), function(x, offsets, part))


@BY_CASE
@pytest.mark.parametrize("part", ["nothing", "third", "all"])
def test_jagged_split(case, part):
    lengths = torch.diff(case.offsets)
    offsets_a = make_offsets({"nothing": lengths * 0, "third": lengths // 3, "all": lengths}[part])
    (_, of_a), (_, of_b) = jagged_split(case.values(), case.offsets, offsets_a)
    assert torch.equal(of_a, offsets_a)
    assert torch.equal(of_b, case.offsets - offsets_a)
    for i in range(2):
        assert_same_function(
            lambda x, i=i: jagged_split(x, case.offsets, offsets_a, int(offsets_a[-1]))[i][0],
            lambda x, i=i: reference.jagged.jagged_split(x, case.offsets, offsets_a)[i][0],
            case.values(),
        )


@BY_CASE
def test_split_undoes_concat(case):
    values = case.values()
    both, offsets = jagged_concat((values, case.offsets), (values + 1, case.offsets))
    (a, _), (b, _) = jagged_split(both, offsets, case.offsets)
    assert torch.equal(a, values)
    assert torch.equal(b, values + 1)


@BY_CASE
def test_jagged_concat(case):
    other = Case(id="", lengths=tuple(reversed(case.lengths)), trailing=case.trailing)
    _, offsets = jagged_concat((case.values(), case.offsets), (other.values(1), other.offsets))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == (case.offsets.long() + other.offsets).tolist()
    assert_same_function(
        lambda x, y: jagged_concat((x, case.offsets), (y, other.offsets))[0],
        lambda x, y: reference.jagged.jagged_concat((x, case.offsets), (y, other.offsets))[0],
        case.values(),
        other.values(1),
    )


@BY_CASE
@SIZES
def test_jagged_last_k(case, size):
    assert torch.equal(
        jagged_last_k(case.values(), case.offsets, size)[1],
        reference.jagged.jagged_last_k(case.values(), case.offsets, size)[1],
    )
    assert_same_function(
        lambda x: jagged_last_k(x, case.offsets, size)[0],
        lambda x: reference.jagged.jagged_last_k(x, case.offsets, size)[0],
        case.values(),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_any_dtype_keeps_its_values(dtype):
    case = CASES[0]
    values = (case.values() * 10).to(dtype)
    padded = jagged_to_padded(values, case.offsets, 65)
    assert padded.dtype == dtype
    assert torch.equal(padded_to_jagged(padded, case.offsets), values)
    assert torch.equal(jagged_last_k(values, case.offsets, 1)[0][-2, 0], values[-1])
    both, offsets = jagged_concat((values, case.offsets), (values, case.offsets))
    assert torch.equal(both[offsets[-2] - 65 : offsets[-2]], values[-65:])


def test_strided_values():
    case = CASES[0]
    wide = torch.full((sum(case.lengths), 5), float("nan"), dtype=torch.float64)
    wide[:, ::2] = case.values()
    for function in (lambda x: jagged_to_padded(x, case.offsets, 65), lambda x: jagged_last_k(x, case.offsets, 2)[0]):
        assert torch.equal(function(wide[:, ::2]), function(case.values()))


def test_gradients_of_cut_tokens_are_zero_even_beside_nan():
    values = torch.ones(5, 2, requires_grad=True)
    padded = jagged_to_padded(values, torch.tensor([0, 3, 5]), 2)
    padded.backward(torch.tensor([float("nan"), 1.0]).expand_as(padded))
    assert values.grad[2].tolist() == [0.0, 0.0]


def test_gradcheck():
    case = Case(id="", lengths=(0, 3, 1, 6), trailing=(2,))
    offsets, x = case.offsets, case.values().requires_grad_()
    y = case.values(1).requires_grad_()
    torch.autograd.gradcheck(lambda x: jagged_to_padded(x, offsets, 4), x)
    torch.autograd.gradcheck(lambda x: padded_to_jagged(jagged_to_padded(x, offsets, 4), offsets, 10), x)
    torch.autograd.gradcheck(lambda x, y: jagged_concat((x, offsets), (y, offsets))[0], (x, y))
    torch.autograd.gradcheck(lambda x: jagged_last_k(x, offsets, 2)[0], x)


def all_helpers(values, offsets, max_seqlen):
    padded = jagged_to_padded(values, offsets, max_seqlen)
    both, both_offsets = jagged_concat((values, offsets), (values * 2, offsets))
    last, mask = jagged_last_k(both, both_offsets, 3)
    return padded, padded_to_jagged(padded, offsets, total=values.shape[0]), both, last, mask


def test_compiles_as_one_graph_and_for_all_batch_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(all_helpers, fullgraph=True, backend=counter)
    for seed in range(8):
        case = Case(id="", lengths=(*range(2 + seed), 3 * seed + 2))
        arguments = (case.values(seed), case.offsets, max(case.lengths))
        for x, y in zip(compiled(*arguments), all_helpers(*arguments), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2


V, OFF = torch.zeros(6, 2), torch.tensor([0, 2, 6])
BAD = [
    (lambda: lengths_to_offsets([1, 2]), TypeError, "lengths_to_offsets: `lengths` must be an int32 or int64 Tensor"),
    (lambda: lengths_to_offsets(V), TypeError, "lengths_to_offsets: `lengths` must be .* got torch.float32"),
    (lambda: lengths_to_offsets(OFF[None]), ValueError, r"lengths_to_offsets: `lengths` must have shape \(B,\)"),
    (lambda: lengths_to_offsets(torch.tensor([1, -2])), ValueError, "`lengths` must be >= 0 tokens, got -2 at seq.* 1"),
    (lambda: offsets_to_lengths(OFF[:0]), ValueError, r"offsets_to_lengths: `offsets` must have shape \(B \+ 1,\)"),
    (
        lambda: offsets_to_lengths(torch.tensor([0, 5, 3])),
        ValueError,
        r"offsets_to_lengths: `offsets` must not decrease, got 5 then 3 at sequence 1; make",
    ),
    (lambda: offsets_to_lengths(torch.tensor([2, 3])), ValueError, "`offsets` must start at 0, got 2"),
    (lambda: offsets_to_lengths(V[0]), TypeError, "offsets_to_lengths: `offsets` must be int32 or int64"),
    (lambda: jagged_to_padded(V[0, 0], OFF, 4), ValueError, r"jagged_to_padded: `values` must have shape \(T, ...\)"),
    (lambda: jagged_to_padded([0], OFF, 4), TypeError, "jagged_to_padded: `values` must be a Tensor, got list"),
    (lambda: jagged_to_padded(V, OFF, -1), ValueError, "jagged_to_padded: `max_seqlen` must be >= 0 tokens, got -1"),
    (lambda: jagged_to_padded(V, OFF, 4.0), TypeError, "`max_seqlen` must be a Python int, got float"),
    (lambda: jagged_to_padded(V[:5], OFF, 4), ValueError, "`offsets` must end at the number of packed rows, 5, got 6"),
    (lambda: jagged_to_padded(V, OFF - 1, 4), ValueError, "jagged_to_padded: `offsets` must start at 0, got -1"),
    (lambda: jagged_last_k(V, torch.tensor([0, 7, 6]), 1), ValueError, "`offsets` must not decrease, got 7 then 6"),
    (lambda: jagged_last_k(V, OFF, True), TypeError, "jagged_last_k: `k` must be a Python int, got bool"),
    (lambda: padded_to_jagged(V[0], OFF), ValueError, r"padded_to_jagged: `padded` must have shape \(B, L, ...\)"),
    (lambda: padded_to_jagged(V, OFF), ValueError, r"`offsets` must have shape .* \(7,\) for the B of `padded`"),
    (lambda: padded_to_jagged(V[:2], OFF, 5), ValueError, "`offsets` must end at the number of packed rows, 5, got 6"),
    (lambda: padded_to_jagged(V[:2], OFF, -6), ValueError, "padded_to_jagged: `total` must be >= 0 tokens, got -6"),
    (lambda: jagged_concat((V, OFF), (V.double(), OFF)), TypeError, "`values of b` must have the dtype of"),
    (lambda: jagged_concat((V, OFF), (V[:, :1], OFF)), ValueError, r"rows of the shape of `a`, \(2,\), got \(1,\)"),
    (lambda: jagged_concat((V, OFF), (V, OFF[[0, 2]])), ValueError, "`b` must have as many sequences as `a`, 2, got 1"),
    (lambda: jagged_split(V, OFF, OFF[[0, 2]]), ValueError, "`offsets_a` must have as many sequences as `offsets`, 2"),
    (lambda: jagged_split(V, OFF, OFF.flip(0)), ValueError, "jagged_split: `offsets_a` must"),
    (lambda: jagged_split(V, OFF, OFF.new_tensor([0, 0, 6])), ValueError, r"no part longer .* at sequence 1"),
    (lambda: jagged_concat((V, OFF), (V[:5], OFF)), ValueError, "jagged_concat: `offsets of b` must end at"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message[:50] for *_, message in BAD])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@BY_CASE
def test_cuda_equals_cpu_without_waiting_for_the_device(case):
    if not case.lengths:
        arguments = (case.values(), case.offsets, 0)
    else:
        arguments = (case.values(), case.offsets, max(case.lengths))
    on_cuda = [x.to("cuda") if isinstance(x, torch.Tensor) else x for x in arguments]
    values = on_cuda[0].requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = all_helpers(*on_cuda)
        if values.numel():
            torch.autograd.grad(results[3].sum() + results[1].sum(), values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(results, all_helpers(*arguments), strict=True):
        assert torch.equal(x.cpu(), y)


@pytest.mark.gpu
@pytest.mark.parametrize("debug", ["1", "0"])
def test_cuda_values_are_checked_while_debugging(debug, monkeypatch):
    monkeypatch.setenv("GEM_KERNELS_DEBUG", debug)
    values, bad = torch.randn(5, 2, device="cuda"), torch.tensor([0, 4, 2], device="cuda")
    with pytest.raises(ValueError, match=r"must end at .* 5, got 2") if debug == "1" else contextlib.nullcontext():
        jagged_last_k(values, bad, 2)
    with pytest.raises(ValueError, match="must be >= 0 tokens, got -1") if debug == "1" else contextlib.nullcontext():
        lengths_to_offsets(torch.tensor([3, -1], device="cuda"))


@pytest.mark.gpu
@pytest.mark.memory
def test_cuda_more_elements_than_int32_holds():
    rows, dim = 2**22, 520
    assert rows * dim > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * rows * dim:
        pytest.skip(f"needs {6 * rows * dim >> 30} GiB of free GPU memory, {free >> 30} are free")
    values = torch.zeros(rows, dim, dtype=torch.int8, device="cuda")
    values[-2:] = torch.tensor([[1], [2]], dtype=torch.int8, device="cuda")
    offsets = torch.tensor([0, rows - 3, rows], device="cuda")
    last, mask = jagged_last_k(values, offsets, 2)
    assert last[1].sum(1).tolist() == [dim, 2 * dim]
    assert mask.all()
    padded = jagged_to_padded(values, offsets, rows - 3)
    assert padded[1, 1].sum().item() == dim
    packed = padded_to_jagged(padded, offsets, rows)
    assert torch.equal(packed, values)
