"""Random batches fit the config that they are drawn for."""

import pytest
import torch

from gem_model import random_batch


def test_shapes_follow_the_config(two_towers):
    lengths = {"clicks": (3, 0, 5), "visits": (0, 0, 2)}
    batch, embeddings = random_batch(two_towers, 3, lengths=lengths)
    assert batch.num_samples == 3
    assert batch.dense.shape == (3, 0)
    assert set(embeddings) == {"item", "user", "clicks.item", "clicks.topic"}
    assert embeddings["item"].shape == (3, 8)
    assert embeddings["clicks.topic"].shape == (8, 8)
    assert all(e.requires_grad and e.is_leaf for e in embeddings.values())
    clicks, visits = batch.sequences["clicks"], batch.sequences["visits"]
    assert clicks.offsets.tolist() == [0, 3, 3, 8]
    assert (clicks.max_seqlen, visits.max_seqlen) == (5, 2)
    assert visits.dense.shape == (2, 3)
    for task in two_towers.tasks:
        assert batch.labels[task].shape == (3,)
        assert set(batch.labels[task].tolist()) <= {0.0, 1.0}


def test_events_are_oldest_first(tiny):
    batch, _ = random_batch(tiny, 20, mean_length=30)
    sequence = batch.sequences["history"]
    assert (sequence.age > 0).all()
    for begin, end in zip(sequence.offsets[:-1].tolist(), sequence.offsets[1:].tolist(), strict=True):
        assert (torch.diff(sequence.age[begin:end]) <= 0).all()


def test_lengths_are_skewed_and_cut(tiny):
    batch, _ = random_batch(tiny, 2000, mean_length=10, max_length=25)
    lengths = torch.diff(batch.sequences["history"].offsets).float()
    assert lengths.max() == batch.sequences["history"].max_seqlen == 25
    assert lengths.min() == 0
    assert 6 < lengths.mean() < 11
    assert lengths.median() < lengths.mean()


def test_the_seed_decides(tiny):
    (a, ea), (b, eb), (c, _) = (random_batch(tiny, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.sequences["history"].age, b.sequences["history"].age)
    assert torch.equal(ea["item"], eb["item"])
    assert not torch.equal(a.dense, c.dense)


def test_moves_to_a_device(tiny):
    batch, _ = random_batch(tiny, 2)
    moved = batch.to("meta")
    assert moved.dense.device.type == moved.labels["like"].device.type == "meta"
    assert moved.sequences["history"].offsets.device.type == "meta"
    assert moved.num_samples == 2


def test_wrong_lengths_are_refused(tiny):
    for name, value in (("mean_length", 30.0), ("max_length", 99)):
        with pytest.raises(ValueError, match=f"`{name}` must be left out with `lengths`, .*, got {value}; give one"):
            random_batch(tiny, 3, lengths={"history": (1, 2, 3)}, **{name: value})
    with pytest.raises(ValueError, match=r"`lengths\['history'\]` must have 3 entries, got 2"):
        random_batch(tiny, 3, lengths={"history": (1, 2)})
    with pytest.raises(ValueError, match=r"must have 3 entries, got 0"):
        random_batch(tiny, 3, lengths={})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_samples": -1}, ValueError, "`num_samples` must be >= 0, got -1"),
        ({"num_samples": 2.0}, TypeError, "`num_samples` must be an int, got float"),
        ({"max_length": -1}, ValueError, "`max_length` must be >= 0, got -1"),
        ({"mean_length": float("nan")}, ValueError, "`mean_length` must be >= 0 events and finite, got nan"),
        ({"mean_length": "a"}, TypeError, "`mean_length` must be a number, got str"),
        ({"seed": None}, TypeError, "`seed` must be an int, got NoneType"),
        ({"lengths": (1, 2)}, TypeError, "`lengths` must map sequences to lengths, got tuple"),
        ({"lengths": {"history": (1, -2)}}, ValueError, r"`lengths\['history'\]` must be >= 0 events, got -2"),
        ({"lengths": {"history": (1, 2.5)}}, TypeError, r"`lengths\['history'\]` must be ints, got torch.float32"),
        ({"lengths": {"history": ("a", "b")}}, TypeError, r"`lengths\['history'\]` must be ints, got \('a', 'b'\)"),
        (
            {"lengths": {"history": (1, 2), "x": (1, 2)}},
            ValueError,
            "`lengths` must name sequences of the config, 'history', got 'x'",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_named(tiny, arguments, error, words):
    with pytest.raises(error, match=f"^random_batch: {words}"):
        random_batch(**{"config": tiny, "num_samples": 2} | arguments)
    with pytest.raises(TypeError, match=r"^random_batch: `config` must be a RankingConfig, got dict"):
        random_batch({}, 2)
