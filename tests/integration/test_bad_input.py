"""Bad input to each package's public functions: one sentence that names what is wrong, before anything happens."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gem_kernels
import gem_precision
from gem_model import RankingModel
from gem_train.data import EventSource, generate

LENGTHS = (3, 0, 5)
TOTAL = sum(LENGTHS)
OFFSETS = torch.tensor([0, 3, 3, 8])


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class BadIds:
    id: str
    feature: str
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    says: str


def first(value: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def change(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        values = values.clone()
        values[0] = value
        return values, offsets

    return change


def last(by: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def change(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        offsets = offsets.clone()
        offsets[-1] += by
        return values, offsets

    return change


BAD_IDS = [
    BadIds("negative", "item", first(-1), r"item.*-1|-1.*item"),
    BadIds("too-large", "item", first(60), r"item.*60|60.*item"),
    BadIds("event-feature-too-large", "history.click", first(2), r"history\.click"),
    BadIds("far-too-large", "user", first(2**40), r"user"),
    BadIds("offsets-too-short", "item", last(-1), "offsets"),
    BadIds("offsets-too-long", "item", last(1), "offsets"),
    BadIds("offsets-decrease", "item", lambda values, offsets: (values, offsets[[0, 2, 1, 3]]), "offsets"),
    BadIds("offsets-start-late", "item", lambda values, offsets: (values, offsets.clamp_min(1)), "offsets"),
    BadIds("float-ids", "item", lambda values, offsets: (values.float(), offsets), "item"),
    BadIds("two-dims", "item", lambda values, offsets: (values[:, None], offsets), "item"),
]


@pytest.mark.parametrize("case", BAD_IDS, ids=lambda case: case.id)
def test_tables_refuse_ids(case: BadIds, make_batch, make_tables) -> None:
    tables, ids = make_tables(), dict(make_batch(LENGTHS).ids)
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    ids[case.feature] = case.change(*ids[case.feature])
    with pytest.raises((IndexError, ValueError, TypeError), match=f"(?s){case.says}"):
        tables.lookup(tables.exchange(ids))
    for name, value in tables.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_tables_refuse_an_unknown_feature(make_batch, make_tables) -> None:
    ids = make_batch(LENGTHS).ids
    with pytest.raises(ValueError, match="colour"):
        make_tables().exchange({**ids, "colour": ids["item"]})


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_other_policies_give_finite_vectors(policy: str, make_batch, make_tables) -> None:
    tables, ids = make_tables(id_policy=policy), dict(make_batch(LENGTHS).ids)
    clean = tables.lookup(tables.exchange(ids))["item"].detach()
    values, offsets = ids["item"]
    broken = values.clone()
    broken[0], broken[2] = -5, 10**9
    vectors = tables.lookup(tables.exchange({**ids, "item": (broken, offsets)}))["item"].detach()
    assert torch.equal(vectors[1], clean[1])
    assert torch.isfinite(vectors).all()
    if policy == "drop":
        assert torch.equal(vectors[[0, 2]], torch.zeros_like(vectors[[0, 2]]))
    else:
        edges = tables.lookup(tables.exchange({**ids, "item": (torch.tensor([0, int(values[1]), 59]), offsets)}))
        assert torch.equal(vectors, edges["item"].detach())


# ---------------------------------------------------------------- operators


@dataclass(frozen=True)
class BadAttention:
    id: str
    says: str
    changes: dict[str, object]


def attention_inputs() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOTAL, 2, 16, generator=generator) for _ in range(3))
    return {"q": q, "k": k, "v": v, "offsets_q": OFFSETS, "offsets_k": OFFSETS, "max_seqlen_q": 5, "max_seqlen_k": 5}


BAD_ATTENTION = [
    BadAttention("offsets-end-early", "offsets_k", {"offsets_k": torch.tensor([0, 3, 3, 7])}),
    BadAttention("offsets-end-late", "offsets_q", {"offsets_q": torch.tensor([0, 3, 3, 9])}),
    BadAttention("offsets-start-late", "offsets_q", {"offsets_q": torch.tensor([1, 3, 3, 8])}),
    BadAttention("offsets-decrease", "offsets_k", {"offsets_k": torch.tensor([0, 5, 3, 8])}),
    BadAttention("offsets-float", "offsets_q", {"offsets_q": OFFSETS.float()}),
    BadAttention("offsets-of-another-batch", "offsets", {"offsets_k": torch.tensor([0, 8])}),
    BadAttention("max-seqlen-too-small", "max_seqlen_k", {"max_seqlen_k": 4}),
    BadAttention("head-dims-differ", "k", {"k": torch.zeros(TOTAL, 2, 32)}),
    BadAttention("heads-do-not-divide", "heads|H", {"k": torch.zeros(TOTAL, 3, 16), "v": torch.zeros(TOTAL, 3, 16)}),
    BadAttention("tokens-differ", "v", {"v": torch.zeros(TOTAL - 1, 2, 16)}),
    BadAttention("dtypes-differ", "dtype", {"k": torch.zeros(TOTAL, 2, 16, dtype=torch.bfloat16)}),
    BadAttention("window-of-one", "window_size", {"window_size": (-3, 1)}),
]


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("case", BAD_ATTENTION, ids=lambda case: case.id)
def test_operators_refuse_input(op: str, case: BadAttention) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"(?s){op}.*({case.says})"):
        getattr(gem_kernels, op)(**{**attention_inputs(), **case.changes})


def test_block_attention_refuses_input() -> None:
    good = {"offsets": OFFSETS, "max_seqlen": 5}
    q, k, v = (attention_inputs()[name] for name in "qkv")
    with pytest.raises(ValueError, match=r"block_attention.*block_size.*48"):
        gem_kernels.block_attention(q, k, v, **good, block_size=48)
    with pytest.raises(ValueError, match=r"block_attention.*offsets"):
        gem_kernels.block_attention(q, k, v, offsets=OFFSETS - 1, max_seqlen=5)


# ---------------------------------------------------------------- model, precision, reader


def test_model_refuses_embeddings(config, make_batch, make_tables) -> None:
    model, tables, batch = RankingModel(config), make_tables(), make_batch(LENGTHS)
    embeddings = {name: value.detach() for name, value in tables.lookup(tables.exchange(batch.ids)).items()}
    with pytest.raises(ValueError, match=r"history\.click"):
        model(batch, {name: value for name, value in embeddings.items() if name != "history.click"})
    with pytest.raises(ValueError, match="tags"):
        model(batch, {**embeddings, "tags": embeddings["tags"][:, :8]})
    with pytest.raises(ValueError, match=r"history\.item"):
        model(batch, {**embeddings, "history.item": embeddings["history.item"][1:]})
    with pytest.raises(ValueError, match="history"):
        model(dataclasses.replace(batch, sequences={}), embeddings)
    with pytest.raises(ValueError, match="like"):
        model.loss(model(batch, embeddings), dataclasses.replace(batch, labels={"click": batch.labels["click"]}))


def test_precision_refuses_an_unknown_recipe() -> None:
    with pytest.raises(ValueError, match=r"fp7.*mxfp8|mxfp8.*fp7"):
        gem_precision.get_recipe("fp7")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 8, "rank": 2, "world_size": 2}, "rank"),
        ({"global_batch_size": 8, "max_history": 0}, "max_history"),
        ({"global_batch_size": 8, "split": "holdout"}, "holdout"),
    ],
    ids=["no-batch", "rank-outside", "no-history", "unknown-split"],
)
def test_reader_refuses_arguments(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EventSource(generate(num_users=20, num_items=10), **arguments)
