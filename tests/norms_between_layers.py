"""Norms between linear layers, whose outputs need not be kept for the backward."""

from typing import Any

import torch
from torch import Tensor

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
