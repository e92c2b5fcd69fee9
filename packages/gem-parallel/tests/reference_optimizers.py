"""The sparse optimizers' formulas over dense gradients, in plain PyTorch; rows without an occurrence do not change."""

import torch


class ReferenceTable:
    """One table in float64 or float32; `update` takes one gradient row per occurrence of an id."""

    def __init__(self, weight, config):
        self.weight = weight.clone()
        self.config = config
        self.step = 0
        rows, dim = weight.shape
        shape = (rows, 1) if config.kind == "rowwise_adagrad" else (rows, dim)
        self.first = torch.zeros(rows, dim, dtype=weight.dtype)
        self.second = torch.zeros(shape, dtype=weight.dtype)

    def update(self, ids, gradients):
        config = self.config
        self.step += 1
        touched = torch.unique(ids)
        total = torch.zeros_like(self.weight).index_add_(0, ids, gradients.to(self.weight.dtype))[touched]
        weight = self.weight[touched]
        if config.kind == "sgd":
            change = total
        elif config.kind == "adam":
            self.first[touched] = config.beta1 * self.first[touched] + (1 - config.beta1) * total
            self.second[touched] = config.beta2 * self.second[touched] + (1 - config.beta2) * total**2
            first = self.first[touched] / (1 - config.beta1**self.step)
            second = self.second[touched] / (1 - config.beta2**self.step)
            change = first / (second.sqrt() + config.eps) + config.weight_decay * weight
        else:
            square = total**2
            if config.kind == "rowwise_adagrad":
                square = square.mean(1, keepdim=True)
            self.second[touched] += square
            change = total / (self.second[touched].sqrt() + config.eps) + config.weight_decay * weight
        self.weight[touched] = weight - config.learning_rate * change
