"""ExpertParallel in one process, and what it refuses."""

import pytest
import torch
from torch import nn

from gem_parallel._src.experts import is_expert_parameter, local_experts
from gem_parallel.experts import ExpertParallel, exchange_counts


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_experts", [8, 11])
def test_every_expert_is_on_one_rank_and_counts_differ_by_one(num_experts, degree):
    parts = [local_experts(num_experts, degree, rank) for rank in range(degree)]
    assert [position for part in parts for position in part] == list(range(num_experts))
    assert {len(part) for part in parts} <= {num_experts // degree, num_experts // degree + 1}


def test_one_process_is_the_sum_with_the_names_of_a_list():
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    layer = ExpertParallel(experts)
    x = torch.randn(5, 3)
    assert torch.equal(layer(x), experts[0](x) + experts[1](x))
    assert list(layer.state_dict()) == [f"experts.{name}" for name in experts.state_dict()]
    assert all(is_expert_parameter(parameter) for parameter in layer.parameters())
    assert not is_expert_parameter(nn.Parameter(torch.ones(1)))
    assert "num_experts=2, degree=1, local=['0', '1']" in repr(layer)


def test_marks_survive_the_replacement_of_parameters():
    layer = ExpertParallel([nn.Linear(3, 2, device="meta")]).to_empty(device="cpu")
    nn.init.ones_(layer.experts["0"].weight)
    layer(torch.ones(1, 3))
    assert all(is_expert_parameter(parameter) for parameter in layer.parameters())


def test_counts_of_one_process():
    assert exchange_counts([3, 0], None) == ((3,), (0,))
    with pytest.raises(ValueError, match=r"exchange_counts: `counts` must be at least 0, got \[1, -1\]"):
        exchange_counts([1, -1], None)


SHARED = nn.Identity()


class Pairs(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("experts", "arguments", "error", "text"),
    [
        ([], {}, ValueError, "at least one expert for each of the 1 ranks of `group`, got 0"),
        ([torch.sigmoid], {}, TypeError, "`experts` must hold modules, got builtin"),
        (
            [SHARED, nn.Identity(), SHARED],
            {},
            ValueError,
            "a module of its own at every position, got one module at 0 a",
        ),
        (
            [nn.Identity()],
            {"gather_dtype": torch.float32},
            ValueError,
            "one of .* or None, got torch.float32",
        ),
        (nn.Linear(1, 1), {}, TypeError, "`experts` must be a list of modules, got Linear; pass all experts"),
        ([nn.Identity()], {"group": 3}, TypeError, "`group` must be a process group, .* got int; pass mesh.ep_group"),
        ([nn.Identity()], {"collectives": "default"}, TypeError, "must be an engine or None, got str 'default'; pass"),
        ([nn.Identity()], {"reduce_dtype": "bf16"}, TypeError, "`reduce_dtype` must be a torch.dtype or None, got str"),
        ([nn.Identity()], {"gather_dtype": "bf16"}, TypeError, "`gather_dtype` must be a torch.dtype or None, got str"),
        ([nn.Identity()], {"reduce_dtype": torch.int32}, ValueError, "`reduce_dtype` must be a floating point dtype"),
    ],
)
def test_construction_refuses(experts, arguments, error, text):
    with pytest.raises(error, match=text):
        ExpertParallel(experts, **arguments)


@pytest.mark.parametrize(
    ("expert", "inputs", "text"),
    [
        (nn.Identity(), (), "`inputs` must hold at least one tensor, got none"),
        (
            Pairs(),
            (torch.ones(2, 3),),
            "one row for each of the 2 rows of its first input, got tuple",
        ),
        (nn.Flatten(0), (torch.ones(2, 3),), r"one row for each of the 2 rows of its first input, got \(6,\)"),
    ],
)
def test_forward_refuses(expert, inputs, text):
    with pytest.raises(ValueError, match=text):
        ExpertParallel([expert])(*inputs)


@pytest.mark.parametrize(
    ("inputs", "rows", "error", "text"),
    [
        ((torch.tensor(1.0),), None, ValueError, "must have rows along their first dim, got a scalar at position 0"),
        (([1.0],), None, TypeError, "`inputs` must be tensors, got list at position 0"),
        ((torch.ones(2, 4), 3), None, TypeError, "got int at position 1; pass what is no tensor by its name"),
        ((torch.ones(2, 4),), [[3]], ValueError, r"at rank 0 those given, \[2\], got \(\(3,\),\)"),
        ((torch.ones(2, 4),), [[-2]], ValueError, "the rows of 1 ranks"),
        ((torch.ones(2, 4),), [[2, 3]], ValueError, "the rows of 1 ranks"),
        ((torch.ones(2, 4),), [[2], [2]], ValueError, "for each of 1 inputs"),
        ((torch.ones(2, 4),), [2], TypeError, r"`rows` must hold lists of ints, got \[2\]"),
        ((torch.ones(2, 4),), "x", TypeError, "`rows` must hold lists of ints, got 'x'"),
        ((torch.ones(2, 4),), [[2.0]], TypeError, "`rows` must hold lists of ints"),
        ((torch.ones(2, 4),), 5, TypeError, "`rows` must hold lists of ints, got 5"),
    ],
)
def test_inputs_and_rows_are_checked_in_one_process(inputs, rows, error, text):
    layer = ExpertParallel([nn.Identity()])
    with pytest.raises(error, match=text):
        layer(*inputs, rows=rows)
    assert layer(torch.ones(2, 4), rows=[[2]]).shape == (2, 4)
