"""Defines the operators by differentiable torch operations, for derivatives in float64, where casts have no effect."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Tensor | None = None,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    output = input * torch.rsqrt(input.square().mean(dims, keepdim=True) + eps)
    output = output if weight is None else output * (weight + weight_offset)
    return output if bias is None else output + bias


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    rounding: str = "once",
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    residual_out = alpha * input + residual
    return rms_norm(residual_out, normalized_shape, weight, eps, weight_offset), residual_out


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    rounding: str = "once",
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> Tensor:
    activated = F.silu(gate) if activation == "silu" else F.sigmoid(gate)
    if norm_before_gate:
        return rms_norm(input, normalized_shape, weight, eps, weight_offset) * activated
    return rms_norm(input * activated, normalized_shape, weight, eps, weight_offset)


def rotated(
    rows: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int | None, rotary_offset: int
) -> Tensor:
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    if cos.shape[-1] != rotary_dim:
        cos, sin = ((t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)) for t in (cos, sin))
    before, columns, behind = rows.tensor_split((rotary_offset, rotary_offset + rotary_dim), -1)
    if interleaved:
        turned = torch.stack((-columns[..., 1::2], columns[..., ::2]), -1).flatten(-2)
    else:
        first, second = columns.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat((before, columns * cos + turned * sin, behind), -1)


def rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    rounding: str = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Tensor:
    output = rms_norm(input, normalized_shape, weight, eps, weight_offset)
    return rotated(output, cos, sin, interleaved, rotary_dim, rotary_offset)
