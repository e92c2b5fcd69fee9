"""The parts that ship satisfy the protocols, and so does anything with the same methods."""

import torch

from gem_train.data import EventSource, generate
from gem_train.protocols import BatchSource, EmbeddingModule, TrainableModel
from gem_train.recipes import RunConfig, build, get
from gem_train.world import World


def test_the_parts_of_a_recipe_satisfy_the_protocols() -> None:
    log = generate(num_users=20, num_items=20, mean_events=8.0)
    config = RunConfig.resolve(get("synthetic"), log, {"data.prefetch_batches": "0", "data.global_batch_size": "16"})
    parts = build(config, log, World())
    assert isinstance(parts.train_source, EventSource)
    assert isinstance(parts.train_source, BatchSource)
    assert isinstance(parts.embeddings, EmbeddingModule)
    assert isinstance(parts.model, TrainableModel)
    batch = next(iter(parts.train_source))
    embeddings = parts.embeddings.lookup(parts.embeddings.exchange(batch.ids))
    outputs = parts.model(batch, embeddings)
    loss = parts.model.loss(outputs, batch)
    flops = parts.model.flops(batch)
    assert {task: tuple(logits.shape) for task, logits in outputs.items()} == {"click": (batch.num_samples,)}
    assert torch.equal(loss.total, loss.sum["click"])
    assert 0 < flops.forward < flops.total
    assert sum(part.forward for part in flops.by_module.values()) == flops.forward


def test_a_class_without_the_methods_does_not() -> None:
    assert not isinstance(object(), BatchSource)
    assert not isinstance(object(), EmbeddingModule)
    assert not isinstance(torch.nn.Linear(1, 1), TrainableModel)
