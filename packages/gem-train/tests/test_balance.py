"""Samples that are packed, moved and unpacked are the samples that were read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gem_parallel import LengthCost
from gem_train.balance import SampleBalancer, balance_record
from gem_train.data import Batch, EventLog, EventSource
from gem_train.world import World

COST = LengthCost(constant=1.0, linear={"history": 2.0})


def tensors(batch: Batch) -> dict[str, Tensor]:
    found = {f"ids.{name}.{k}": tensor for name, pair in batch.ids.items() for k, tensor in enumerate(pair)}
    for name, sequence in batch.sequences.items():
        found |= {f"{name}.{field}": getattr(sequence, field) for field in ("offsets", "dense", "age")}
    found |= {f"label.{task}": label for task, label in batch.labels.items()}
    return found | {"dense": batch.dense, "index": batch.sample_index}


def balancer(log: EventLog, **options: object) -> SampleBalancer:
    multi = [feature.name for feature in log.features if feature.multi_valued]
    assert len(multi) == 2
    return SampleBalancer(COST, World(), multi_valued=multi, **{"mode": "exchange", **options})


@pytest.mark.parametrize("size", [37, 1, 0])
def test_a_batch_comes_back_bit_for_bit(toy_log: EventLog, size: int) -> None:
    source = EventSource(toy_log, "train", global_batch_size=max(1, size), world_size=1 if size else 2)
    batch = next(iter(source))
    assert batch.num_samples == size
    balance = balancer(toy_log)
    again = balance(batch)
    assert again.num_samples == size
    assert again.sequences["history"].max_seqlen == batch.sequences["history"].max_seqlen
    assert list(again.ids) == list(batch.ids)
    before, after = tensors(batch), tensors(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def test_the_record_says_why_a_rank_is_heavy(toy_log: EventLog) -> None:
    batch = next(iter(EventSource(toy_log, "train", global_batch_size=20)))
    for mode, balance in ((m, balancer(toy_log, mode=m)) for m in ("exchange", "reader", "none")):
        given = balance(batch)
        assert (given is batch) == (mode != "exchange")
        record = balance_record(mode, balance.report(given), ("history",))
        lengths = batch.sequences["history"].offsets.diff()
        assert record["mode"] == mode
        assert record["heaviest_samples"] == 20
        longest = record["dearest"][0]
        assert longest["lengths"] == {"history": int(lengths.max())}
        assert longest["share"] == pytest.approx((1 + 2 * int(lengths.max())) / float((1 + 2 * lengths).sum()))


def test_a_feature_with_several_ids_must_be_named(toy_log: EventLog) -> None:
    batch = next(iter(EventSource(toy_log, "train", global_batch_size=20)))
    values, offsets = batch.ids["item"]
    wrong = dataclasses.replace(batch, ids={**batch.ids, "item": (values[:-1], offsets)})
    with pytest.raises(ValueError, match=r"bags of feature 'item' must hold one id each, got 19 ids in 20 bags"):
        balancer(toy_log)(wrong)
