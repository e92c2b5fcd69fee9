"""Stops a run whose loss or gradients stop being finite, before the weights take them in."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_train.errors import NonFiniteError

__all__ = ["GradientGuard"]


class GradientGuard:
    """Finds the first tensor that is NaN or infinite, and keeps its step out of the weights.

    Rows of the sparse tables are updated inside backward, so a non-finite gradient of a looked-up feature is replaced
    by zeros there. Dense gradients are inspected after backward, and `found_inf` makes the fused AdamW skip its update
    on the device. On the CPU `check` is immediate. On CUDA it reads the flag that was copied to the host one step ago,
    and so costs no synchronisation: all steps from the bad one on are skipped, and the run ends one step later. Before
    anything is saved call `check(wait=True)`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Prepares the flags.

        Args:
            model: The dense model.
            optimizer: A fused optimizer that honours `found_inf`.
            device: Where the gradients are.
        """
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._optimizer = optimizer
        self._device = device
        self._names: list[str] = []
        self._magnitudes: list[Tensor] = []
        self._bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._host = torch.full((), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._copied_names: list[str] = []

    def watch(self, embeddings: Mapping[str, Tensor]) -> None:
        """Begins a step: each looked-up feature's gradient is inspected when backward reaches it.

        Args:
            embeddings: Feature -> looked-up rows.
        """
        self._names, self._magnitudes = [], []
        for name, rows in embeddings.items():
            if rows.requires_grad:
                rows.register_hook(partial(self._inspect_rows, name))  # type: ignore[no-untyped-call]

    def observe(self, name: str, value: Tensor) -> None:
        """Adds a scalar to what must be finite.

        Args:
            name: What it is, for the message.
            value: A scalar on the device.
        """
        self._names.append(name)
        self._magnitudes.append(_local(value.detach()).reshape(()))

    def inspect_parameters(self) -> None:
        """Looks at the dense gradients, after backward and before clipping, which would spread a NaN to all."""
        held = [(name, _local(p.grad)) for name, p in self._parameters if p.grad is not None]
        held = [(name, gradient) for name, gradient in held if gradient.numel()]
        if held:
            self._names += [f"the gradient of parameter {name}" for name, _ in held]
            self._magnitudes += torch._foreach_norm([gradient for _, gradient in held], torch.inf)

    def arm(self) -> None:
        """Makes the coming optimizer step a no-op if anything observed is not finite."""
        magnitudes = torch.stack([m.to(self._device, torch.float32) for m in self._magnitudes])
        finite = torch.isfinite(magnitudes)
        first = torch.where(finite.all(), -1, torch.argmin(finite.to(torch.int8)))
        self._bad = torch.where(self._bad >= 0, self._bad, first)
        self._optimizer.found_inf = (self._bad >= 0).to(torch.float32)  # type: ignore[attr-defined]
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]

    def check(self, step: int, *, wait: bool = False) -> None:
        """Raises if something was not finite.

        Args:
            step: Index of the step from 0; the message counts from 1, as progress and records do.
            wait: Wait for the device, so that the answer covers the latest step.

        Raises:
            NonFiniteError: naming the first bad tensor.
        """
        if self._device.type != "cuda":
            self._raise_if_bad(int(self._bad), self._names, step)
            return
        if self._copied is not None:
            self._copied.synchronize()
            self._raise_if_bad(int(self._host), self._copied_names, step - 1)
        self._copied_names = self._names
        self._host.copy_(self._bad, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        if wait:
            self._copied.synchronize()
            self._raise_if_bad(int(self._host), self._copied_names, step)

    def _inspect_rows(self, name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not gradient.numel():  # None: the model does not read the feature
            return gradient
        magnitude = torch.linalg.vector_norm(gradient, ord=torch.inf)
        self.observe(f"the gradient of the looked-up rows of feature {name}", magnitude)
        # One op where isfinite is four: a norm is no negative number, and NaN is not less than anything.
        finite = magnitude < torch.inf
        if self._device.type != "cuda" and bool(finite):
            return gradient
        return torch.where(finite, gradient, 0.0)

    @staticmethod
    def _raise_if_bad(bad: int, names: list[str], step: int) -> None:
        if bad >= 0:
            raise NonFiniteError(
                f"step {step + 1}: {names[bad]} is NaN or infinite; the step was not applied and nothing was saved. "
                "Lower the learning rate, or look at the data of this step"
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
