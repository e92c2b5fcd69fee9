"""One batch, from the reader to the metrics, through all five packages."""

import torch

import gem_precision
from gem_kernels.jagged import offsets_to_lengths
from gem_model import RankingConfig, RankingModel, SequenceTowerConfig
from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_train.config import PRECISIONS
from gem_train.data import EventSource, generate
from gem_train.metrics import BinaryMetrics


def test_the_command_line_offers_every_precision_recipe() -> None:
    assert gem_precision.recipe_names() == PRECISIONS


def test_one_batch_through_five_packages() -> None:
    torch.manual_seed(0)
    log = generate(num_users=40, num_items=30, mean_events=15.0)
    source = EventSource(log, "train", global_batch_size=48, max_history=16)
    batch = next(iter(source))

    sequence = batch.sequences["history"]
    assert int(offsets_to_lengths(sequence.offsets).max()) == sequence.max_seqlen <= 16

    tables = ShardedEmbeddings(
        tables=[TableConfig(name=table.name, num_rows=table.num_rows, dim=16) for table in log.tables],
        features=[
            FeatureConfig(name=feature.name, table=feature.table, pooling="mean" if feature.multi_valued else "sum")
            for feature in log.features
        ],
        optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-8),
        device=torch.device("cpu"),
    )
    tower = SequenceTowerConfig(
        name="history", event_features=log.event_features, num_event_dense=log.num_event_dense, dim=32, num_heads=2
    )
    config = RankingConfig(
        context_features=log.context_features,
        num_dense=log.num_dense,
        sequences=(tower,),
        tasks=log.tasks,
        embedding_dim=16,
        dim=32,
    )
    model = gem_precision.convert(RankingModel(config), gem_precision.get_recipe("mxfp8"))

    rows_before = {name: value.clone() for name, value in tables.state_dict().items() if name.endswith(".weight")}
    weights_before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    embeddings = tables.lookup(tables.exchange(batch.ids))
    outputs = model(batch, embeddings)
    loss = model.loss(outputs, batch)
    (loss.total / batch.num_samples).backward()
    optimizer.step()

    assert set(embeddings) == {feature.name for feature in log.features}
    assert set(outputs) == set(log.tasks)
    moved = {name: (tables.state_dict()[name] != rows).any(dim=1) for name, rows in rows_before.items()}
    for table in log.tables:
        used = [batch.ids[feature.name][0] for feature in log.features if feature.table == table.name]
        rows = torch.zeros(table.num_rows, dtype=torch.bool)
        rows[torch.cat(used)] = True
        touched = moved[f"tables.{table.name}.weight"]
        assert not touched[~rows].any(), f"{table.name}: a row that the batch does not name was updated"
        assert touched[rows].float().mean() > 0.5, f"{table.name}: rows that the batch names were not updated"
    changed = [not torch.equal(a, b) for a, b in zip(weights_before, model.parameters(), strict=True)]
    assert sum(changed) > len(changed) // 2

    metrics = BinaryMetrics()
    (task,) = log.tasks
    metrics.update(outputs[task].detach(), batch.labels[task])
    scores = metrics.compute()
    assert scores["count"] == batch.num_samples
    expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs[task].detach(), batch.labels[task])
    torch.testing.assert_close(
        torch.tensor(scores["logloss"]), expected.double(), check_dtype=False, rtol=1e-5, atol=1e-6
    )
