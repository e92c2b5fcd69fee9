"""What has been measured since the last log record, as sums that merge over ranks and go into a checkpoint."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_train.metrics import BinaryMetrics
from gem_train.protocols import FlopCount
from gem_train.step import StepResult
from gem_train.world import World

__all__ = ["Window", "WindowRecord"]


class WindowRecord(NamedTuple):
    """A window over all ranks."""

    seconds: float
    """Wall time."""
    samples: int
    """Samples trained on."""
    loss: float
    """Mean of the weighted loss per sample."""
    grad_norm: float
    """Global gradient norm of the last step, before clipping."""
    tasks: dict[str, dict[str, Any]]
    """Task -> values of `BinaryMetrics.compute`."""
    flops: float
    """Model FLOPs, forward and backward."""
    flops_by_module: dict[str, float]
    """Module -> forward FLOPs of this rank."""


class Window:
    """Metric states, loss and counts of the steps since the last record."""

    def __init__(self, tasks: tuple[str, ...], world: World) -> None:
        """Creates an empty window.

        Args:
            tasks: Names of the tasks, in the order of the records.
            world: The ranks whose sums are merged.
        """
        self._world = world
        self._metrics = {task: BinaryMetrics(world.device) for task in tasks}
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._last_norm = torch.zeros((), dtype=torch.float32, device=world.device)
        self._samples = torch.zeros((), dtype=torch.int64)
        self._flops = 0.0
        self._flops_by_module: dict[str, float] = {}
        self._began = time.perf_counter()

    def add(self, result: StepResult, labels: dict[str, Tensor], num_samples: int) -> None:
        """Adds a step; does not wait for the device.

        Args:
            result: What the step left.
            labels: Task -> (B,) of this rank.
            num_samples: Samples of the step over all ranks.
        """
        self._loss += result.loss_sum.double()
        self._last_norm = result.grad_norm
        self._samples += num_samples
        for task, metrics in self._metrics.items():
            metrics.update(result.logits[task].float(), labels[task])

    def add_flops(self, flops: FlopCount) -> None:
        """Adds the FLOPs of a step on this rank.

        Args:
            flops: From the model.
        """
        self._flops += flops.total
        for name, part in flops.by_module.items():
            self._flops_by_module[name] = self._flops_by_module.get(name, 0.0) + part.forward

    def close(self) -> WindowRecord:
        """Merges the window over the ranks, empties it, and gives its record. All ranks call it."""
        for metrics in self._metrics.values():
            if self._world.size > 1:
                metrics.all_reduce()
        samples = int(self._samples)
        totals = self._world.sum(torch.stack((self._loss.cpu(), torch.tensor(self._flops, dtype=torch.float64))))
        now = time.perf_counter()
        record = WindowRecord(
            seconds=now - self._began,
            samples=samples,
            loss=float(totals[0]) / max(1, samples),
            grad_norm=float(self._last_norm),
            tasks={task: metrics.compute() for task, metrics in self._metrics.items()},
            flops=float(totals[1]),
            flops_by_module=self._flops_by_module,
        )
        self._began = now
        self._loss.zero_()
        self._samples.zero_()
        self._flops, self._flops_by_module = 0.0, {}
        for metrics in self._metrics.values():
            metrics.reset()
        return record

    def merged_tensors(self) -> dict[str, Tensor]:
        """The window over all ranks, for a checkpoint; the window itself is not changed. All ranks call it."""
        # `samples` counts all ranks already.
        return {name: t if name == "samples" else self._sum(t) for name, t in self._host_copies().items()}

    def load_merged(self, tensors: dict[str, Tensor]) -> None:
        """Takes over a merged window: the first rank holds all of it, the others begin empty.

        Args:
            tensors: From `merged_tensors`, of any world size.
        """
        share = 1 if self._world.is_first else 0
        for task, metrics in self._metrics.items():
            state = {name: tensors[f"{task}.{name}"] * share for name in metrics.state_dict()}
            metrics.load_state_dict(state)
        self._loss.copy_(tensors["loss"] * share)
        self._samples.copy_(tensors["samples"])

    def merged_account(self) -> dict[str, Any]:
        """What the open window has cost so far, as JSON values for a checkpoint. All ranks call it."""
        return {
            "seconds": time.perf_counter() - self._began,
            "flops": float(self._world.sum(torch.tensor(self._flops, dtype=torch.float64))),
            "flops_by_module": self._flops_by_module,
        }

    def load_account(self, account: dict[str, Any]) -> None:
        """Takes over what an open window has cost: its samples are counted, so its time and FLOPs must be too.

        Args:
            account: From `merged_account`, of any world size; the modules are those of the first rank.
        """
        self._began = time.perf_counter() - float(account["seconds"])
        if self._world.is_first:
            self._flops = float(account["flops"])
            self._flops_by_module = dict(account["flops_by_module"])

    def _host_copies(self) -> dict[str, Tensor]:
        tensors = {"loss": self._loss, "samples": self._samples}
        for task, metrics in self._metrics.items():
            tensors |= {f"{task}.{name}": tensor for name, tensor in metrics.state_dict().items()}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._world.control is not None:
            torch.distributed.all_reduce(tensor, group=self._world.control)
        return tensor
