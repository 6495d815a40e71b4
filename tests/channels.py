"""Calls of channel_rms_norm, for tests in this process and in others."""

from typing import Any

import torch
from torch import Tensor

import normops  # noqa: F401  registers the operators
from reference.cases import EPS, values

ops = torch.ops.normops


def arguments(shape: tuple[int, ...], dtype: torch.dtype, dim: int = 1, has_bias: bool = True) -> dict[str, Any]:
    size = shape[dim]
    return {
        "input": values(shape, dtype, 1, scale=1.0),
        "normalized_shape": [size],
        "weight": values((size,), dtype, 2, scale=1.0),
        "eps": EPS,
        "weight_offset": 0.5,
        "bias": values((size,), torch.float32, 3, scale=1.0) if has_bias else None,
        "dim": dim - len(shape),
    }


def results(given: dict[str, Any], activation: str) -> tuple[Tensor, ...]:
    forward = {name: value for name, value in given.items() if name != "grad_output"}
    gradients = ops.channel_rms_norm_backward(**given, activation=activation)
    return ops.channel_rms_norm(**forward, activation=activation), *gradients


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
