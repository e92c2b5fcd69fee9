"""The dense optimizer, with state that exists from the first step on and goes into a checkpoint by name."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_train.config import TrainerConfig

__all__ = ["build_adamw", "optimizer_tensors", "set_learning_rate"]


def build_adamw(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Fused AdamW over a model's parameters.

    Weight decay is for parameters with two or more dims. The moments are made here and not at the first step, so
    that a checkpoint always has the same inventory.

    Args:
        model: The dense model, already placed and sharded.
        config: Learning rate, betas, eps, weight decay.

    Returns:
        The optimizer.

    Raises:
        ValueError: if the model has no trainable parameter.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("build_adamw: `model` must have trainable parameters, got none; check its configuration")
    # A fused update takes tensors of one mesh, and experts lie on another than the rest.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "weight_decay": config.weight_decay if decayed else 0.0}
            for (decayed, _), group in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the step size of all groups.

    Args:
        optimizer: As `build_adamw` gives it.
        learning_rate: Step size from the next update on.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter name>.<moment>` -> live tensor.

    Args:
        model: What the optimizer updates.
        optimizer: As `build_adamw` gives it, whose state is there from the beginning.
    """
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, tensor in optimizer.state[parameter].items()
    }
