"""The planner's prediction of the steps that were measured, made from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gem_parallel import ParallelDims, Topology
from gem_parallel.planner import ModelDescription, SparseTable, Workload, explain
from gem_precision import get_wire
from gem_train.recipes.describe import describe_dense
from multi_gpu.launch import announce
from multi_gpu.workload import Rows, draw_samples, make_config

__all__ = ["predict"]

BYTES = {"own": 4, "float32": 4, "bfloat16": 2}
DENSE = "dense model, one GPU"


def predict(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each measured step whose switches the planner knows.

    Args:
        rows: Of all parts; those of scaling are used.

    Yields:
        Rows; one with status "skipped" if nothing was measured.
    """
    measured = [row for row in rows if row["part"] == "scaling" and row["status"] == "ok"]
    if not measured:
        yield {"part": "prediction", "name": "all", "status": "skipped", "reason": "no step was measured"}
        return
    models: dict[str, ModelDescription] = {}
    for row in measured:
        # The planner overlaps, frees what it gathers, and knows neither engines of collectives nor CUDA graphs.
        default = row.get("gathers", "default") == "default" and not row["name"].endswith("captured")
        keeps = row.get("keep_parameters", False) or not row.get("sharded_at_rest", True)
        if keeps or not (default and row.get("overlap", True)):
            continue
        workload_name = row["workload"]
        if workload_name not in models:
            announce(f"prediction: {workload_name} described from its first batch")
            models[workload_name] = _describe(row)
        model = models[workload_name]
        ranks, copies = row["ranks_in_use"], row.get("table_copies", 1)
        wire = row.get("param_wire", "none")
        workload = Workload(
            samples_per_rank=row["local_batch"],
            row_bytes=BYTES[row.get("wire_dtype", "float32")],
            gather_bytes=BYTES[row.get("param_dtype", "own")],
            param_wire=None if wire == "none" else get_wire(wire),
            table_gather=row.get("gather", "tables"),
            imbalance=max(1.0, row.get("imbalance", 1.0)),
        )
        dims = ParallelDims.for_world(ranks, ep=row.get("ep", 1), sparse_replicate=copies)
        report = explain(model, Topology(gpus_per_host=ranks), dims, workload)
        seconds = report.mean_compute.dense if row["name"] == DENSE else report.step.seconds
        peak = None if row["name"] == DENSE else report.memory.peak.total / 2**30
        yield {
            "part": "prediction",
            "workload": workload_name,
            "name": row["name"],
            "status": "ok",
            "predicted_ms": 1e3 * seconds,
            "measured_ms": row["step_ms"],
            "error": 1e3 * seconds / row["step_ms"] - 1.0,
            "predicted_peak_gib": peak,
            "measured_peak_gib": None if row["name"] == DENSE else row["peak_gib"],
            "predicted_limit": report.terms[0].name,
            "rates": report.hardware.name,
        }


def _describe(row: dict[str, Any]) -> ModelDescription:
    config = make_config(row["preset"], row["num_experts"])
    rows = Rows(item=row["item_rows"])
    samples = draw_samples(config, rows, row["local_batch"], row["max_length"], seed=0)
    tables = []
    for name in ("item", "category", "rating"):
        values = [values for feature, (values, _) in samples.ids.items() if feature.split(".")[-1] == name]
        ids = torch.cat(values)
        tables.append(
            SparseTable(
                name=name,
                num_rows=rows.of(name),
                dim=config.embedding_dim,
                ids_per_sample=len(ids) / samples.batch.num_samples,
                unique_fraction=len(ids.unique()) / len(ids),
                kind="row_wise",
            )
        )
    units = describe_dense(config, {"history": samples.lengths.tolist()}, precision=row["precision"])
    return ModelDescription(name=row["workload"], units=units, tables=tuple(tables))
