"""Norms between linear layers, whose outputs need not be stored for the backward."""

from typing import Any

import torch
from torch import Tensor, nn

import normops
from reference import cases
from reference.operators import OPERATORS

FUNCTIONS = [operator for operator in OPERATORS if operator.outputs[0] == "output" and operator.gradient]
FORWARD, BACKWARD = "normops::rms_norm", "normops::rms_norm_backward"


def first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def problem(device: str, shape: tuple[int, ...] = (6, 3, 16), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (shape, shape, shape[-1:], (shape[-1], shape[-1]))
    return [cases.values(s, dtype, seed).to(device).requires_grad_() for seed, s in enumerate(shapes)]


def gradients(loss: Tensor, t: list[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss.sum(), t, allow_unused=True, **options)


class Block(nn.Module):
    """A block with a residual stream: two norms add to it, and the second norm's sum is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normops.RMSNorm(16, 1e-5), normops.RMSNorm(16, weight_offset=1.0)
        self.last = normops.RMSNorm(16, elementwise_affine=False)
        self.middle, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.second(self.middle(self.first(x)), x)
        y, _ = self.last(self.down(self.up(y).relu()), residual)
        return y
