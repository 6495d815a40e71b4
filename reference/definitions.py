"""The operators in differentiable operations of torch, for derivatives in float64."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    output = input * torch.rsqrt(input.square().mean(dims, keepdim=True) + eps)
    return output if weight is None else output * (weight + weight_offset)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    residual_out = input + residual
    return rms_norm(residual_out, normalized_shape, weight, eps, weight_offset), residual_out


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> Tensor:
    activated = F.silu(gate) if activation == "silu" else F.sigmoid(gate)
    if norm_before_gate:
        return rms_norm(input, normalized_shape, weight, eps, weight_offset) * activated
    return rms_norm(input * activated, normalized_shape, weight, eps, weight_offset)
