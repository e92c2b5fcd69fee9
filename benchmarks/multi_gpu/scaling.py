"""Training steps on all GPUs against one, and what each switch of the parallel stack changes.

One step is the trainer's: ids exchanged, rows looked up, forward, backward with the fused sparse update, gradient
guard, clipping, AdamW. Every rank has its own random batches, on the device, so that no reader is measured.

- One GPU: every rank alone on its own batches, at the same time, no process group in use; the mean over ranks.
- Local MFU: forward and backward of the dense model alone on one GPU, embeddings given. E2E MFU: the whole step. Their
  ratio is the scaling ratio of Meta's post on GEM training of 2026-08-03; ``of_one_gpu`` is N GPUs against one GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem_model import RankingModel, capture_segments
from gem_model.random_batch import RandomBatch, RandomSequence, random_batch
from gem_parallel import (
    LengthCost,
    ParallelDims,
    ParallelMesh,
    ParallelPlan,
    balance_samples,
    clip_grad_norm_,
    parallelize,
)
from gem_parallel.collectives import choose_collectives, set_fully_shard_collectives
from gem_precision import convert, get_recipe, get_wire
from gem_train import mfu
from gem_train.config import TrainerConfig
from gem_train.feed import Staged
from gem_train.optimizer import build_adamw
from gem_train.recipes.parallel import hold_experts
from gem_train.schedule import LearningRateSchedule
from gem_train.step import TrainStep
from gem_train.timing import PhaseTimer
from multi_gpu.launch import Rank
from multi_gpu.workload import Rows, Samples, draw_samples, make_config, make_tables

__all__ = ["Bench", "Variant", "run", "variants"]

NUM_BATCHES = 3
WARM_UP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The switches of a run over all ranks."""

    ep: int = 1
    """Ranks that hold different experts of each layer, and exchange rows; 1: every rank runs all experts."""
    overlap: bool = True
    """Ids leave one batch ahead on a stream of their own, rows before the optimizer's step, and FSDP prefetches."""
    wire_dtype: str = "float32"
    """Of rows and their gradients between ranks."""
    table_copies: int = 1
    """Copies of the tables (sparse_replicate)."""
    sharded_at_rest: bool = True
    """Copies keep a slice between two lookups, and not the whole."""
    gather: str = "tables"
    """What a lookup fetches of the other slices: whole tables, or the batch's rows."""
    balanced: bool = False
    """Samples are moved between ranks so that the ranks' FLOPs are alike, before the time is taken."""
    gathers: str = "default"
    """Engine of FSDP's all-gathers."""
    param_dtype: str = "own"
    """Of gathered parameters and what goes into a unit; gradients are reduced in float32. own: each layer decides."""
    keep_parameters: bool = False
    """Parameters stay gathered between forward and backward: one all-gather less, and their memory."""
    param_wire: str = "none"
    """Form in which parameters travel, by the name that ``gem_precision.get_wire`` knows."""


def variants(size: int, num_experts: int, *, every: bool) -> dict[str, Variant]:
    """The base, and the base with one switch turned, as far as the number of ranks allows.

    Args:
        size: Ranks.
        num_experts: Of each layer; with several, the switch is how many ranks share them.
        every: Also the switches of which one model has shown enough.
    """
    base = Variant()
    if num_experts > 1:
        degrees = [degree for degree in range(2, size + 1) if size % degree == 0 and degree <= num_experts]
        return {"base": base, **{f"ep {ep}": replace(base, ep=ep) for ep in degrees}, "base again": base}
    found = {
        "base": base,
        "no overlap": replace(base, overlap=False),
        "rows in bf16": replace(base, wire_dtype="bfloat16"),
    }
    if every:
        found["parameters kept for backward"] = replace(base, keep_parameters=True)
        found["parameters in bf16"] = replace(base, param_dtype="bfloat16")
        found["parameters in mxfp8"] = replace(base, param_wire="mxfp8")
    if size % 2 == 0 and every:
        found["2 table copies, at rest sharded"] = replace(base, table_copies=2)
        found["2 table copies, rows gathered"] = replace(base, table_copies=2, gather="rows")
        found["2 table copies, at rest whole"] = replace(base, table_copies=2, sharded_at_rest=False)
    found["balanced batches"] = replace(base, balanced=True)
    found["base again"] = base
    return found


def run(
    rank: Rank,
    preset: str,
    num_samples: int,
    max_length: int,
    item_rows: int,
    steps: int,
    precision: str,
    num_experts: int = 1,
    every: bool = True,
    only: Sequence[str] | None = None,
    captured: bool = False,
    trace: str | None = None,
    engine: str | None = None,
) -> None:
    """Measure one GPU and all variants; with ``engine`` only the base and that engine's gathers.

    Args:
        rank: This process.
        preset: Of gem_model.
        num_samples: Local batch.
        max_length: Longest history, in events; the mean is half.
        item_rows: Rows of the item table.
        steps: Timed steps of each variant.
        precision: Recipe of gem_precision.
        num_experts: Of each layer's interaction.
        every: As of ``variants``.
        only: Names of the variants to run, where not all.
        captured: One GPU also with ``capture_segments``, which a sharded model cannot have.
        trace: Folder for a Chrome trace of two steps of the base, on the first rank.
        engine: Name as of ``choose_collectives``.
    """
    bench = Bench(rank, preset, num_samples, max_length, Rows(item=item_rows), steps, precision, num_experts)
    about = {"workload": bench.about["workload"]}
    if engine is None:
        rank.attempt(bench.one_gpu, name="one GPU", **about)
        if captured and rank.device.type == "cuda":
            rank.attempt(partial(bench.one_gpu, captured=True), name="one GPU, captured", **about)
        chosen = variants(rank.size, num_experts, every=every) if rank.size > 1 else {}
        chosen = {name: variant for name, variant in chosen.items() if only is None or name in only}
    else:
        chosen = {f"base beside {engine}": Variant(), f"gathers {engine}": Variant(gathers=engine)}
    for name, variant in chosen.items():
        if not rank.has_seconds(8.0):
            rank.row(name=name, status="skipped", reason="the part's time is over", **about)
            continue
        path = Path(trace) / f"{preset}-{num_experts}.json.gz" if trace and name == "base" else None
        rank.attempt(partial(bench.several, name, variant, trace=path), name=name, **about)
        _free()


class Bench:
    """One workload on one GPU and on all; arguments as of ``run``."""

    def __init__(
        self,
        rank: Rank,
        preset: str,
        num_samples: int,
        max_length: int,
        rows: Rows,
        steps: int,
        precision: str,
        num_experts: int = 1,
    ) -> None:
        self.rank, self.rows, self.steps, self.precision = rank, rows, steps, precision
        self.config = make_config(preset, num_experts)
        self.drawn = [
            draw_samples(self.config, rows, num_samples, max_length, seed=1000 * batch + rank.rank)
            for batch in range(NUM_BATCHES)
        ]
        self.about: dict[str, Any] = {
            "workload": preset if num_experts == 1 else f"{preset}, {num_experts} experts",
            "preset": preset,
            "num_experts": num_experts,
            "precision": precision,
            "local_batch": num_samples,
            "max_length": max_length,
            "item_rows": rows.item,
            "steps": steps,
        }
        name = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "cpu"
        peak = mfu.device_peak(name)
        self.peak = peak.flops_per_second if peak is not None else None
        self.meshes: dict[tuple[int, int], ParallelMesh] = {}
        self.local_flops: float | None = None
        """FLOP/s of one GPU on the dense model alone."""
        self.one_rate: float | None = None
        """Samples per second of one GPU."""
        self.base_rate: float | None = None
        """Samples per second of the base."""

    def one_gpu(self, *, captured: bool = False) -> None:
        """The dense model alone, then whole steps, on each rank by itself.

        Args:
            captured: Parts over samples from CUDA graphs. What the others are compared with stays that without.
        """
        batches = [samples.to(self.rank.device) for samples in self.drawn]
        suffix = ", captured" if captured else ""
        self._dense_alone(batches, suffix)
        _free()
        tables = make_tables(self.config, self.rows, self.rank.device, None)
        model = self._model()
        flops = self._flops(model, self.drawn)
        if captured:
            capture_segments(model, batches[0].batch, self._embeddings(batches[0]))
        seconds = self._mean(self._time(self._trainer(model, tables, None, batches, overlap=False)))
        if not captured:
            self.one_rate = self.about["local_batch"] / seconds
        self._row(f"one GPU{suffix}", seconds, flops, ranks_in_use=1)
        del model, tables, batches
        _free()

    def _embeddings(self, samples: Samples) -> dict[str, Any]:
        return {
            name: torch.randn(len(values), self.config.embedding_dim, device=self.rank.device).requires_grad_()
            for name, (values, _) in samples.ids.items()
        }

    def _dense_alone(self, batches: Sequence[Samples], suffix: str) -> None:
        model = self._model()
        rows = [self._embeddings(samples) for samples in batches]
        if suffix:
            capture_segments(model, batches[0].batch, rows[0])

        def dense(index: int) -> None:
            batch, embeddings = batches[index % NUM_BATCHES].batch, rows[index % NUM_BATCHES]
            (model.loss(model(batch, embeddings), batch).total / batch.num_samples).backward()
            model.zero_grad(set_to_none=True)
            for tensor in embeddings.values():
                tensor.grad = None

        flops = self._flops(model, self.drawn)
        seconds = self._mean(self._time(dense))
        if not suffix:
            self.local_flops = self._mean(sum(flops) / len(flops)) / seconds
        self._row(f"dense model, one GPU{suffix}", seconds, flops, ranks_in_use=1)

    def several(self, name: str, variant: Variant, *, trace: Path | None = None) -> None:
        """A row for one variant over all ranks, and then, with ``trace``, a file of two more of its steps."""
        rank = self.rank
        mesh = self._mesh(variant.ep, variant.table_copies)
        model = self._model()
        drawn = [self._balance(model, samples) for samples in self.drawn] if variant.balanced else self.drawn
        flops = self._flops(model, drawn)
        units = model.shard_units  # before modules are replaced
        hold_experts(model, mesh)
        plan = ParallelPlan(
            shard_units=units,
            forward_prefetch=int(variant.overlap),
            backward_prefetch=int(variant.overlap),
            param_dtype=None if variant.param_dtype == "own" else getattr(torch, variant.param_dtype),
            reduce_dtype=torch.float32,
            reshard_after_forward=False if variant.keep_parameters else None,
            param_wire=None if variant.param_wire == "none" else get_wire(variant.param_wire),
        )
        model = parallelize(model, plan, mesh)
        if variant.gathers != "default":
            try:
                collectives = choose_collectives(mesh.fsdp.get_group(), variant.gathers)  # type: ignore[arg-type]
            except ValueError as error:
                rank.row(name=name, status="unavailable", reason=str(error), workload=self.about["workload"])
                rank.say(f"{name}: {error}")
                return
            set_fully_shard_collectives(model, collectives)
        tables = make_tables(
            self.config,
            self.rows,
            rank.device,
            mesh.sparse,
            wire_dtype=getattr(torch, variant.wire_dtype),
            gather=variant.gather,
            keep_gathered=not variant.sharded_at_rest,
        )
        batches = [samples.to(rank.device) for samples in drawn]
        step = self._trainer(model, tables, mesh, batches, overlap=variant.overlap)
        seconds = rank.reduce(self._time(step))[0]
        # The ranks wait for the heaviest in every step.
        total = sum(rank.reduce(*flops, op=dist.ReduceOp.SUM))
        imbalance = sum(rank.reduce(*flops)) * rank.size / total
        self._row(name, seconds, flops, ranks_in_use=rank.size, imbalance=imbalance, **asdict(variant))
        if trace is not None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for index in range(WARM_UP + self.steps, WARM_UP + self.steps + 2):
                    step(index)
                rank.synchronize()
            if rank.rank == 0:
                trace.parent.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(trace))
            rank.barrier()
        del tables, model, batches, step
        _free()

    def _row(self, name: str, seconds: float, flops: Sequence[float], *, ranks_in_use: int, **values: Any) -> None:
        rate = self.about["local_batch"] * ranks_in_use / seconds
        work = self._mean(sum(flops) / len(flops))
        flops_rate = work / seconds
        if ranks_in_use > 1 and self.base_rate is None:
            self.base_rate = rate
        peak_gib = None
        if self.rank.device.type == "cuda":
            peak_gib = self.rank.reduce(torch.cuda.max_memory_allocated(self.rank.device) / 2**30)[0]
        row = {
            "step_ms": 1e3 * seconds,
            "samples_per_second": rate,
            "of_base": rate / self.base_rate if self.base_rate and ranks_in_use > 1 else None,
            "of_one_gpu": rate / (ranks_in_use * self.one_rate) if self.one_rate else None,
            "local_mfu": self.local_flops / self.peak if self.local_flops and self.peak else None,
            "e2e_mfu": flops_rate / self.peak if self.peak else None,
            "scaling_ratio": flops_rate / self.local_flops if self.local_flops else None,
            "gflop_per_sample": work / self.about["local_batch"] / 1e9,
            "peak_gib": peak_gib,
        }
        self.rank.row(name=name, status="ok", ranks_in_use=ranks_in_use, **row, **values, **self.about)
        peak = f", {peak_gib:.1f} GiB" if peak_gib is not None else ""
        ratio = f", scaling ratio {row['scaling_ratio']:.3f}" if row["scaling_ratio"] else ""
        self.rank.say(f"{self.about['workload']}, {name}: {1e3 * seconds:.1f} ms, {rate:.0f} samples/s{ratio}{peak}")

    def _mean(self, value: float) -> float:
        return self.rank.reduce(value, op=dist.ReduceOp.SUM)[0] / self.rank.size

    def _mesh(self, ep: int, table_copies: int) -> ParallelMesh:
        """One mesh for each shape: groups are never freed."""
        shape = (ep, table_copies)
        if shape not in self.meshes:
            dims = ParallelDims.for_world(self.rank.size, ep=ep, sparse_replicate=table_copies)
            self.meshes[shape] = dims.build_mesh(self.rank.device.type)
        return self.meshes[shape]

    def _model(self) -> Any:
        torch.manual_seed(0)
        # Weights are drawn where they are: on one thread a billion would take longer than the steps.
        with self.rank.device:
            model = RankingModel(self.config)
        return model if self.precision == "fp32" else convert(model, get_recipe(self.precision))

    @staticmethod
    def _flops(model: Any, drawn: Sequence[Samples]) -> list[float]:
        """Forward and backward of each batch of this rank."""
        return [float(model.flops(samples.batch).total) for samples in drawn]

    def _trainer(
        self, model: Any, tables: Any, mesh: ParallelMesh | None, batches: Sequence[Samples], *, overlap: bool
    ) -> Callable[[int], None]:
        """The function of one step; its argument counts from 0."""
        device = self.rank.device
        settings = TrainerConfig()
        side = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None
        num_samples = self.about["local_batch"] * (1 if mesh is None else self.rank.size)

        train = TrainStep(
            settings,
            model=model,
            embeddings=tables,
            sparse_learning_rate=0.02,
            optimizer=build_adamw(model, settings),
            schedule=LearningRateSchedule.from_config(settings, 1000),
            clip=lambda parameters, max_norm: clip_grad_norm_(parameters, max_norm, mesh),
            device=device,
            timer=PhaseTimer(device),
        )

        def stage(index: int) -> Staged:
            samples = batches[index % NUM_BATCHES]
            with torch.cuda.stream(side):  # of None, this changes nothing
                pending = tables.exchange(samples.ids)
            return Staged(samples.batch, samples.batch, pending, num_samples, {})

        staged: dict[int, Staged] = {}

        def step(index: int) -> None:
            def ahead() -> Staged:
                staged[index + 1] = stage(index + 1)
                return staged[index + 1]

            current = staged.pop(index) if index in staged else stage(index)
            if overlap:
                train(index, current, ahead=ahead)
            else:
                train(index, current)

        return step

    def _time(self, step: Callable[[int], None]) -> float:
        """Seconds of a step of this rank. Compiles, and meets every batch, before the time is taken."""
        for index in range(WARM_UP):
            step(index)
        self.rank.barrier()
        if self.rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rank.device)
        start = time.perf_counter()
        for index in range(WARM_UP, WARM_UP + self.steps):
            step(index)
        self.rank.synchronize()
        return (time.perf_counter() - start) / self.steps

    def _balance(self, model: Any, samples: Samples) -> Samples:
        """The samples of this rank after all ranks' have been dealt by their FLOPs."""
        longest = self.about["max_length"]
        probes = sorted({1 + (longest - 1) * step // 8 for step in range(9)})
        flops = [
            float(model.flops(random_batch(self.config, 1, lengths={"history": [length]})[0]).total)
            for length in probes
        ]
        cost = LengthCost.fit({"history": torch.tensor(probes)}, torch.tensor(flops, dtype=torch.float64))
        history = samples.batch.sequences["history"]
        rows = {"dense": samples.batch.dense, **{f"label.{name}": x for name, x in samples.batch.labels.items()}}
        jagged = {"history": (history.dense, history.offsets), "age": (history.age, history.offsets)}
        for name, (values, _) in samples.ids.items():
            if "." in name:
                jagged[name] = (values, history.offsets)
            else:
                rows[name] = values
        lengths = dict.fromkeys(jagged, samples.lengths)
        moved = balance_samples(lengths, cost, self.rank.control).move(rows, jagged)
        dense, offsets = moved.jagged["history"]
        batch = RandomBatch(
            num_samples=len(offsets) - 1,
            dense=moved.rows["dense"],
            sequences={
                "history": RandomSequence(offsets, int(torch.diff(offsets).max()), dense, moved.jagged["age"][0])
            },
            labels={name: moved.rows[f"label.{name}"] for name in samples.batch.labels},
        )
        ids = {}
        for name in samples.ids:
            values = moved.jagged[name][0] if "." in name else moved.rows[name]
            ids[name] = (values, torch.arange(len(values) + 1))
        return Samples(batch=batch, ids=ids)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
