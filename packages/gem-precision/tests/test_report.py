import copy

import pytest
import torch
from torch import Tensor, nn

from gem_kernels.modules import GDPA, JaggedAttention
from gem_precision import (
    BF16Recipe,
    LayerReport,
    MXFP8Recipe,
    PrecisionSummary,
    convert,
    describe,
    format_report,
    summarize,
)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "wide": nn.Linear(64, 64),
            "late": nn.Linear(64, 64),
            "logit": nn.Linear(64, 1),
            "scaled": Scaled(64, 64),
            "norm": nn.LayerNorm(64, dtype=torch.bfloat16),
            "act": nn.GELU(),
            "attention": GDPA(),
        }
    )


def not_late(layer: nn.Module, fqn: str) -> bool:
    return fqn != "late"


def by_name(module: nn.Module) -> dict[str, LayerReport]:
    return {report.fqn: report for report in describe(module)}


def test_every_layer_is_named_with_precision_backend_and_reason() -> None:
    reports = by_name(convert(model(), MXFP8Recipe(), filter=not_late))
    assert list(reports) == ["wide", "late", "logit", "scaled", "norm", "attention"]
    found = {name: (r.kind, r.precision, r.backend, r.is_converted) for name, r in reports.items()}
    assert found == {
        "wide": ("Linear", "mxfp8", "emulated", True),
        "late": ("Linear", "fp32", "torch", False),
        "logit": ("Linear", "fp32", "torch", False),
        "scaled": ("Linear", "fp32 parameters", "torch", False),
        "norm": ("LayerNorm", "bf16 parameters", "torch", False),
        "attention": ("GDPA", "mxfp8", "emulated", True),
    }
    assert reports["late"].reason == "excluded by the filter"
    assert reports["logit"].reason == "64 -> 1 features, below min_features=32"
    assert reports["scaled"].reason == "Scaled is a subclass of Linear, and its forward may be another"
    assert reports["norm"].reason == ("no recipe covers LayerNorm: its code and its input decide what it computes in")


def test_the_emulated_backend_says_why_and_what_stays_in_high_precision() -> None:
    auto = by_name(convert(model(), MXFP8Recipe(wgrad="high_precision")))
    assert "no native MXFP8 product in this version" in auto["wide"].reason
    assert "weight gradient in high precision" in auto["wide"].reason
    assert "weight gradient" not in auto["attention"].reason
    chosen = by_name(convert(model(), MXFP8Recipe(backend="emulated")))
    assert "no native" not in chosen["wide"].reason


def test_bf16() -> None:
    reports = by_name(convert(model(), BF16Recipe()))
    assert (reports["wide"].precision, reports["wide"].backend) == ("bf16", "torch")
    assert (reports["attention"].precision, reports["attention"].backend) == ("bf16", "gem_kernels")


def test_only_a_layer_that_must_compute_in_its_weight_is_said_to() -> None:
    mixed = nn.LayerNorm(64)
    mixed.bias = nn.Parameter(torch.zeros(64, dtype=torch.float64))
    layers = nn.ModuleDict(
        {"low": nn.Linear(64, 64), "norm": nn.LayerNorm(64), "narrow": nn.Linear(64, 8), "mixed": mixed}
    )
    reports = by_name(convert(layers, BF16Recipe(activations="bfloat16")))
    y = layers["norm"](layers["low"](torch.randn(3, 64)))
    # A norm with float32 parameters that returns bfloat16 is no fp32 layer; the narrow layer is one.
    assert (y.dtype, layers["narrow"](y).dtype) == (torch.bfloat16, torch.float32)
    assert {name: report.precision for name, report in reports.items()} == {
        "low": "bf16",
        "norm": "fp32 parameters",
        "narrow": "fp32",
        "mixed": "fp32+fp64 parameters",
    }


def test_an_unconverted_module() -> None:
    reports = describe(nn.Sequential(nn.Linear(4, 4), JaggedAttention()))
    assert [(r.fqn, r.precision, r.backend, r.reason) for r in reports] == [
        ("0", "fp32", "torch", "not converted"),
        ("1", "input", "gem_kernels", "not converted"),
    ]
    assert [r.fqn for r in describe(nn.Linear(2, 2))] == [""]


def test_reasons_survive_a_copy() -> None:
    converted = convert(model(), MXFP8Recipe(), filter=not_late)
    assert describe(copy.deepcopy(converted)) == describe(converted)
    assert set(converted.state_dict()) == set(model().state_dict())


def test_a_layer_passed_over_first_and_converted_later_has_no_stale_reason() -> None:
    converted = convert(model(), MXFP8Recipe(), filter=not_late)
    convert(converted["late"], BF16Recipe())
    assert by_name(converted)["late"].precision == "bf16"


def test_summary_and_table() -> None:
    reports = describe(convert(model(), MXFP8Recipe()))
    summary = summarize(reports)
    assert summary == PrecisionSummary(
        num_layers=6,
        num_converted=3,
        by_precision=(("mxfp8", 3), ("fp32", 1), ("fp32 parameters", 1), ("bf16 parameters", 1)),
    )
    lines = format_report(reports).splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["layer", "kind", "precision", "backend", "reason"]
    assert lines[3].split(maxsplit=4) == ["logit", "Linear", "fp32", "torch", "64 -> 1 features, below min_features=32"]
    unseen = (
        "; attention and products that the model calls as functions, with weights of a layer or not, stay what they "
        "are and are not counted"
    )
    assert lines[-1] == f"3 of 6 layers converted: 3 mxfp8, 1 fp32, 1 fp32 parameters, 1 bf16 parameters{unseen}"
    # Columns line up.
    assert len({line.index(report.precision) for line, report in zip(lines[1:], reports, strict=False)}) == 1
    assert format_report(()).splitlines()[-1] == f"0 of 0 layers converted: none{unseen}"


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match=r"describe: `module` must be an nn.Module, got list"):
        describe([])
