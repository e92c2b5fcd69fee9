"""Every op alike: all combinations of its flags, one long sequence, deterministic mode, many sequences, its schema."""

import dataclasses
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gem_kernels
from gem_kernels import gdpa_norm_block, reference
from gem_kernels._src.conformance.cases import ATTENTION_OPS, FIELDS, ConformanceCase, default_cases
from gem_kernels._src.conformance.run import make_problem, measure, run_op
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels.testing import assert_matches_oracle, attention_inputs, random_lengths, summation_floor

CPU = torch.device("cpu")
WEIGHTS = ("norm_weight", "norm_bias", "rms_weight")


def combinations(op, *choices, **fixed):
    """Cases of an op with one of each list of choices."""
    cases = []
    for chosen in itertools.product(*choices):
        fields = {name: value for each in chosen for name, value in each.items()}
        cases.append(ConformanceCase(op=op, **{name: x for name, x in (fixed | fields).items() if name in FIELDS[op]}))
    return list(dict.fromkeys(cases))


def each(name, *values):
    return [{name: value} for value in values]


PAIRS = {"lengths_q": (3, 0, 9, 2), "lengths_k": (4, 5, 0, 7)}
SHARED = [
    PAIRS,
    {"num_seeds": 3, "lengths_k": (4, 5, 0, 7)},
    {"lengths_q": (3, 0, 5, 2), "lengths_k": (4, 7), "request_index": (0, 0, 1, 1)},
    {"num_seeds": 3, "lengths_k": (4, 7), "request_index": (0, 0, 1)},
]
TARGETS = {"lengths_q": (0, 1, 9, 4), "num_targets": (0, 1, 4, 0)}
MASKS = [{}, {"causal": True}, {"window_size": (3, 2)}, {"causal": True, "window_size": (3, -1)}]
HEADS = each("num_heads_kv", None, 2, 1)
SMALL = {"dtype": "float32", "head_dim": 8}
COMBINATIONS = {
    "jagged_attention": combinations(
        "jagged_attention", SHARED, MASKS, HEADS, each("bias", False, True), each("head_dim_v", None, 12), **SMALL
    ),
    "gdpa": combinations("gdpa", [*SHARED, TARGETS], MASKS, HEADS, each("activation", *ACTIVATION_NAMES), **SMALL),
    "block_attention": combinations(
        "block_attention", [{"lengths_q": (0, 1, 33, 65)}], HEADS, each("block_size", 32, 64, 128),
        [{"rotary": True}, *each("head_dim_v", None, 12)], **SMALL,
    ),
}  # fmt: skip


def wrong(cases, device=CPU):
    """(case, tensor, error, bound) of what is not as near to float64 as it may be."""
    return [(case, *row) for case in cases for row in measure(case, device) if not row.passed]


@pytest.mark.parametrize("op", COMBINATIONS)
def test_every_combination_of_flags(op):
    assert not wrong(COMBINATIONS[op])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("weights", [w for n in range(4) for w in itertools.combinations(WEIGHTS, n)], ids=str)
def test_every_combination_of_flags_of_the_norm_block(weights, recompute):
    x = attention_inputs(*PAIRS.values(), num_heads=4, num_heads_kv=2, head_dim=8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    tables = {name: torch.randn(32, generator=generator, dtype=torch.float64) for name in weights}
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, *tables.values())]
    fixed = tables | {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "activation": "silu"}
    names = ("query_residual", "residual", "layer_norm", "rms_norm")
    for flags in itertools.product([True, False], repeat=4):
        options = fixed | dict(zip(names, flags, strict=True))
        if (not flags[2] and {"norm_weight", "norm_bias"} & set(weights)) or (not flags[3] and "rms_weight" in weights):
            with pytest.raises(ValueError, match=r"must be None without `(layer|rms)_norm`, got a tensor"):
                gdpa_norm_block(x.q, x.k, x.v, **options, max_seqlen_q=9, max_seqlen_k=7)
            continue
        bounds = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k, "recompute": recompute}
        out = gdpa_norm_block(x.q, x.k, x.v, **options, **bounds)
        gradients = reference.gdpa_norm_block_backward(x.do, x.q, x.k, x.v, **options)
        expected = [reference.gdpa_norm_block(x.q, x.k, x.v, **options), *(g for g in gradients if g is not None)]
        for a, b in zip([out, *torch.autograd.grad(out, leaves, x.do)], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


LONG = [
    {"lengths_q": (2, 0, 8192, 5), "lengths_k": (3, 1, 33, 0)},
    {"lengths_q": (2, 0, 33), "lengths_k": (3, 1, 8192)},
]


@pytest.mark.parametrize("op", COMBINATIONS | {"gdpa_norm_block": None})
def test_one_sequence_of_8192(op):
    assert not wrong(combinations(op, LONG, dtype="float32", num_heads=1, head_dim=16))


@pytest.mark.gpu
@pytest.mark.parametrize("op", COMBINATIONS | {"gdpa_norm_block": None})
def test_cuda_one_sequence_of_8192(op):
    both = [{"lengths_q": (2, 0, 8192, 5, 0)}, LONG[1], {"num_seeds": 4, "lengths_k": (3, 0, 8192)}]
    # Few heads: the float64 reference holds all scores of a sequence.
    cases = combinations(op, both[: 3 if "num_seeds" in FIELDS[op] else 2], num_heads=2, head_dim=64)
    assert not wrong(cases, torch.device("cuda"))


TIMES = 10
"""So often one batch is repeated in the next cases, as the op on the CPU takes a minute for 80,000 sequences."""
MANY = tuple((random_lengths(80_000 // TIMES, 8, seed=0) - 1).tolist())
FEW = tuple((random_lengths(8_000 // TIMES, 8, seed=1) - 1).tolist())
INDEX = tuple(i // 10 for i in range(len(MANY)))
FLOAT32 = {"dtype": "float32"}
"""In half precision the CPU op, the eager path here, rounds less than the kernels do."""
MANY_CASES = [
    ConformanceCase(**FLOAT32, op="jagged_attention", bias=True, causal=True, lengths_q=MANY),
    ConformanceCase(**FLOAT32, op="jagged_attention", num_seeds=3, lengths_k=MANY),
    ConformanceCase(**FLOAT32, op="jagged_attention", lengths_q=MANY, lengths_k=FEW, request_index=INDEX),
    ConformanceCase(**FLOAT32, op="gdpa", causal=True, lengths_q=MANY, num_targets=tuple(n // 2 for n in MANY)),
    ConformanceCase(**FLOAT32, op="gdpa", causal=True, lengths_q=MANY, lengths_k=FEW, request_index=INDEX),
    ConformanceCase(**FLOAT32, op="gdpa", num_seeds=3, lengths_k=FEW, request_index=INDEX),
    ConformanceCase(**FLOAT32, op="gdpa_norm_block", affine=True, lengths_q=MANY),
]
TABLES = (*WEIGHTS, "position_bias", "time_bias")


def repeated(case):
    """The same sequences TIMES over, with indices of their own."""
    fields = {name: getattr(case, name) for name in ("lengths_q", "lengths_k", "num_targets", "request_index")}
    fields = {name: x * TIMES for name, x in fields.items() if x is not None}
    if case.request_index is not None:
        requests = len(case.lengths_k)
        fields["request_index"] = tuple(i + t * requests for t in range(TIMES) for i in case.request_index)
    return dataclasses.replace(case, **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MANY_CASES, ids=lambda case: case.label)
def test_cuda_80000_sequences(case):
    one = make_problem(case, CPU)
    problem = make_problem(repeated(case), torch.device("cuda"))

    shared = (*TABLES, "q") if case.num_seeds else TABLES

    def rows(name, x):
        return x if name in shared else x.repeat(TIMES, *[1] * (x.dim() - 1))

    for name, x in one.tensors.items():
        problem.tensors[name].copy_(rows(name, x))
    problem.dout.copy_(rows("dout", one.dout))
    for name, x in one.options.items():
        if name.startswith("times"):
            problem.options[name].copy_(rows(name, x))

    def on_cpu(dtype):
        tensors = {name: x.to(dtype) for name, x in one.tensors.items()}
        results = run_op(case, one._replace(tensors=tensors, dout=one.dout.to(dtype)))
        # The gradients of what all sequences share add up.
        return {n: TIMES * x if n[1:] in shared else rows(n[1:], x) for n, x in results.items()}

    exact, eager = on_cpu(torch.float64), on_cpu(torch.float32)
    for name, x in run_op(case, problem).items():
        # Sums over the batch: n roundings of one sign grow like a random walk.
        floor = summation_floor(exact[name], x.dtype, units=2 * (TIMES * len(MANY)) ** 0.5)
        assert_matches_oracle(name, x, exact[name], eager[name], factor=2.0 if name == "out" else 3.0, floor=floor)


def check_deterministic(case, problem):
    """Two runs in deterministic mode, which fills new memory with NaN, have the bits of one without it."""
    expected = run_op(case, problem)
    for _ in range(2):
        # Only warns, as cuBLAS asks for a variable in the environment; a warning is an error here.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            results = run_op(case, problem)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(x, expected[name]) for name, x in results.items())


def check_narrow_offsets(case, problem):
    """Offsets and indices of 32 bits are those of 64."""
    options = dict(problem.options)
    for name, x in options.items():
        if torch.is_tensor(x) and not x.is_floating_point() and not name.startswith("times"):
            options[name] = x.int()
    assert options.keys() & {"offsets", "offsets_k"}
    expected = run_op(case, problem)
    for name, x in run_op(case, problem._replace(options=options)).items():
        assert torch.equal(x, expected[name]), name


def check_autocast(case, problem):
    """Under autocast an op is a call of cast tensors."""
    device = problem.dout.device
    wide = make_problem(dataclasses.replace(case, dtype="float32"), device)
    biases = ("position_bias", "time_bias")
    tensors = {name: x if name in biases else x.bfloat16() for name, x in wide.tensors.items()}
    wide = wide._replace(dout=wide.dout.bfloat16())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        results = run_op(case, wide)
    for name, x in run_op(case, wide._replace(tensors=tensors)).items():
        assert results[name].dtype == (torch.bfloat16 if name == "out" else torch.float32)
        assert torch.equal(results[name], x.to(results[name].dtype)), name


def check_compiled_and_checkpointed(case, problem):
    """Such a call is the plain one, in one graph."""
    torch._dynamo.reset()
    function = getattr(gem_kernels, case.op)
    expected = run_op(case, problem)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gem_kernels, case.op, lambda **all: checkpoint(compiled, use_reentrant=False, **all))
        results = run_op(case, problem)
    for name, x in results.items():
        assert torch.equal(x, expected[name]), name


def check_schema_and_fake(case, problem):
    """Those of all that a call runs."""
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "gem_kernels":
                calls.append((function, args))
            return function(*args, **kwargs or {})

    with Watch():
        run_op(case, problem)
    assert len(calls) >= 2
    for function, args in calls:
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))


CHECKS = [
    check_deterministic, check_narrow_offsets, check_autocast, check_compiled_and_checkpointed, check_schema_and_fake
]  # fmt: skip


def name_of(case):
    return f"{case.op}, {case.dtype}, {case.label}"


def all_options(device):
    """The built-in cases of one dtype and head dim, which have all options."""
    cases = default_cases(torch.device(device))
    first = cases[0]
    return [case for case in cases if case.dtype == first.dtype and (case.rows or case.head_dim == first.head_dim)]


@pytest.mark.parametrize("case", all_options("cpu"), ids=name_of)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_built_in_case(case, check):
    if check is not check_narrow_offsets or case.op in ATTENTION_OPS:
        check(case, make_problem(case, CPU))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")
@pytest.mark.parametrize("case", default_cases(torch.device("cuda")), ids=name_of)
def test_cuda_built_in_case(case):
    """All of it in one test, as each case compiles kernels of its own."""
    assert not wrong([case], torch.device("cuda"))
    problem, options = make_problem(case, torch.device("cuda")), all_options("cuda")
    check_deterministic(case, problem)
    if case not in options:
        return
    check_autocast(case, problem)
    check_compiled_and_checkpointed(case, problem)
    check_schema_and_fake(case, problem)
    if case.op in ATTENTION_OPS and case == next(other for other in options if other.op == case.op):
        check_narrow_offsets(case, problem)
