"""Defines the operators by differentiable torch operations, for derivatives in float64, where casts have no effect.

``norm`` has the arguments of ``rms_norm``, and ``weight`` those of ``_weighted``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _dims(normalized_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _weighted(rows: Tensor, weight: Tensor | None = None, weight_offset: float = 0.0, rounding: str = "once") -> Tensor:
    return rows if weight is None else rows * (weight + weight_offset)


def rms_norm(
    input: Tensor, normalized_shape: tuple[int, ...], eps: float = 0.0, bias: Tensor | None = None, **weight: Any
) -> Tensor:
    mean = input.square().mean(_dims(normalized_shape), keepdim=True)
    output = _weighted(input * torch.rsqrt(mean + eps), **weight)
    return output if bias is None else output + bias


def add_rms_norm(input: Tensor, residual: Tensor, alpha: float = 1.0, **norm: Any) -> tuple[Tensor, Tensor]:
    residual_out = alpha * input + residual
    return rms_norm(residual_out, **norm), residual_out


def gated_rms_norm(
    input: Tensor, gate: Tensor, activation: str = "silu", norm_before_gate: bool = True, **norm: Any
) -> Tensor:
    activated = F.silu(gate) if activation == "silu" else F.sigmoid(gate)
    return rms_norm(input, **norm) * activated if norm_before_gate else rms_norm(input * activated, **norm)


def rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    **norm: Any,
) -> Tensor:
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    if cos.shape[-1] != rotary_dim:
        cos, sin = ((t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)) for t in (cos, sin))
    ends = rotary_offset, rotary_offset + rotary_dim
    before, columns, behind = rms_norm(input, **norm).tensor_split(ends, -1)
    if interleaved:
        turned = torch.stack((-columns[..., 1::2], columns[..., ::2]), -1).flatten(-2)
    else:
        first, second = columns.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat((before, columns * cos + turned * sin, behind), -1)


def channel_rms_norm(input: Tensor, dim: int, activation: str = "identity", **norm: Any) -> Tensor:
    rows = rms_norm(input.movedim(dim, -1), **norm)
    if activation != "identity":
        rows = F.silu(rows) if activation == "silu" else F.sigmoid(rows)
    return rows.movedim(-1, dim)


def _to_rows(sums: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    return sums[(..., *[None] * len(normalized_shape))]


def rms_norm_stats(input: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    return input.square().sum(_dims(normalized_shape))


def rms_norm_from_stats(
    input: Tensor,
    square_sum: Tensor,
    normalized_shape: tuple[int, ...],
    row_size: int,
    eps: float = 0.0,
    **weight: Any,
) -> Tensor:
    return _weighted(input * _to_rows(torch.rsqrt(square_sum / row_size + eps), normalized_shape), **weight)


def rms_norm_backward_stats(
    grad_output: Tensor, input: Tensor, normalized_shape: tuple[int, ...], eps: float = 0.0, **weight: Any
) -> tuple[Tensor, Tensor]:
    dims = _dims(normalized_shape)
    return input.square().sum(dims), (_weighted(grad_output, **weight) * input).sum(dims)


def rms_norm_backward_from_stats(
    grad_output: Tensor,
    input: Tensor,
    square_sum: Tensor,
    dot: Tensor,
    normalized_shape: tuple[int, ...],
    row_size: int,
    weight: Tensor | None = None,
    eps: float = 0.0,
    grad_residual: Tensor | None = None,
    output_mask: Iterable[bool] = (True, True),
    **options: Any,
) -> tuple[Tensor, ...]:
    of_input, of_weight = output_mask
    rstd = _to_rows(torch.rsqrt(square_sum / row_size + eps), normalized_shape)
    normalized = input * rstd
    results = []
    if of_input:
        grad = _weighted(grad_output, weight, **options)
        grad_input = rstd * (grad - normalized * rstd * _to_rows(dot / row_size, normalized_shape))
        results.append(grad_input if grad_residual is None else grad_input + grad_residual)
    if of_weight and weight is not None:
        results.append((grad_output * normalized).sum_to_size(weight.shape))
    return tuple(results)
