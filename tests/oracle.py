"""The definition of the operators in wider arithmetic, and how far from it a result may be: the only tolerances.

A bound is not tuned, it counts roundings: one to the result's type (half an ulp), plus a number of roundoffs of the
type computed in (2^-24 for float32, 2^-53 for float64), relative to the magnitudes of the terms that were added up.
For half types that is less than one ulp wherever terms do not cancel. docs/numerics.md explains the counts.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class Bounded(NamedTuple):
    """An exact value and how far a computed one may be from it, elementwise."""

    value: Array
    bound: Array


class Backward(NamedTuple):
    grad_input: Bounded
    grad_weight: Bounded | None


def _wide(tensor: Tensor, compute: torch.dtype) -> Array:
    array = tensor.detach().cpu().to(torch.float64).numpy()
    return array.astype(np.longdouble) if compute == torch.float64 else array


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _half_ulp(value: Array, dtype: torch.dtype) -> Array:
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), info.tiny)))
    return np.exp2(exponent - 1) * info.eps


def _bounded(value: Array, roundoffs: Array, dtype: torch.dtype, compute: torch.dtype) -> Bounded:
    """``roundoffs``: the sum of the terms' magnitudes, each times its count of roundings."""
    info = torch.finfo(compute)
    # A product that underflows loses up to half of the smallest number of the type.
    accumulated = roundoffs * info.eps / 2 + 4 * info.smallest_normal * info.eps
    return Bounded(value, accumulated + _half_ulp(np.abs(value) + accumulated, dtype))


def _sum_roundings(cols: int, compute: torch.dtype) -> float:
    """Roundings in the sum of a row: those in the chain of a span, the folding of chains and lanes, the spans."""
    if compute == torch.float64:
        return 32 + 5 + cols / 1024
    return 16 + 6


def _groups(weight: Tensor, normalized_shape: tuple[int, ...]) -> tuple[int, ...]:
    return weight.shape[: weight.dim() - len(normalized_shape)]


class _Terms(NamedTuple):
    """What forward and backward have in common, flattened to [rows, cols]."""

    compute: torch.dtype
    h: Array
    rstd: Array
    w: Array
    rstd_roundings: float


def _terms(
    input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None, eps: float | None, weight_offset: float
) -> _Terms:
    compute = _compute_dtype(input)
    cols = math.prod(normalized_shape)
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    h = _wide(input, compute).reshape(rows, cols)
    if eps is None:
        eps = torch.finfo(compute).eps
    with np.errstate(all="ignore"):
        mean = (h * h).sum(1, keepdims=True) / cols if cols else np.zeros((rows, 1))
        rstd = 1 / np.sqrt(mean + eps)
    w = np.ones((1, cols), h.dtype)
    if weight is not None:
        groups = math.prod(_groups(weight, normalized_shape))
        w = _wide(weight, compute).reshape(groups, cols) + weight_offset
        w = np.tile(w, (rows // groups, 1)) if groups > 1 else w
    return _Terms(compute, h, rstd, w, _sum_roundings(cols, compute) / 2 + 3)


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Bounded:
    """``dtype``: of the output, by default that of the input."""
    t = _terms(input, normalized_shape, weight, eps, weight_offset)
    with np.errstate(all="ignore"):
        output = (t.h * t.rstd * t.w).reshape(input.shape)
        # x * rstd and the product with w; the conversion of the weight and its sum with the offset, which may cancel.
        weight_magnitude = np.abs(t.w) + abs(weight_offset) if weight is not None else t.w
        roundoffs = (
            np.abs(output) * (t.rstd_roundings + 2) + np.abs(t.h * t.rstd * weight_magnitude).reshape(input.shape) * 2
        )
        return _bounded(output, roundoffs, dtype or input.dtype, t.compute)


def rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    grad_residual: Tensor | None = None,
) -> Backward:
    t = _terms(input, normalized_shape, weight, eps, weight_offset)
    dy = _wide(grad_output, t.compute).reshape(t.h.shape)
    rows, cols = t.h.shape
    with np.errstate(all="ignore"):
        g = dy * t.w
        g_magnitude = np.abs(dy) * (np.abs(t.w) + (abs(weight_offset) if weight is not None else 0.0))
        direct = t.rstd * g
        projected = t.rstd**3 * t.h * (g * t.h).sum(1, keepdims=True) / max(cols, 1)
        residual = 0.0 if grad_residual is None else _wide(grad_residual, t.compute).reshape(t.h.shape)
        direct_magnitude = t.rstd * g_magnitude
        projected_magnitude = t.rstd**3 * np.abs(t.h) * (g_magnitude * np.abs(t.h)).sum(1, keepdims=True) / max(cols, 1)
        roundoffs = (
            direct_magnitude * (t.rstd_roundings + 5)
            + projected_magnitude * (3 * t.rstd_roundings + _sum_roundings(cols, t.compute) + 8)
            + np.abs(residual) * 2
        )
        value = direct - projected + residual
        grad_input = _bounded(value.reshape(input.shape), roundoffs.reshape(input.shape), input.dtype, t.compute)
        if weight is None:
            return Backward(grad_input, None)

        rows_of_group = rows // max(math.prod(_groups(weight, normalized_shape)), 1)
        terms = (dy * t.h * t.rstd).reshape(rows_of_group, *weight.shape)
        # Within chunks of about sqrt(rows) rows, and over the chunks.
        row_roundings = 2 * (math.isqrt(rows_of_group) + 5)
        grad_weight = _bounded(
            terms.sum(0),
            np.abs(terms).sum(0) * (t.rstd_roundings + 3 + row_roundings),
            weight.dtype,
            t.compute,
        )
    return Backward(grad_input, grad_weight)


def violation(actual: Tensor, expected: Bounded) -> str | None:
    """What is wrong with ``actual``, or None."""
    value = expected.value
    if tuple(actual.shape) != value.shape:
        return f"shape {tuple(actual.shape)} instead of {value.shape}"
    if not value.size:
        return None
    computed = actual.detach().cpu().to(torch.float64).numpy().astype(value.dtype)
    with np.errstate(all="ignore"):
        # Beyond the largest number of the type, infinity is the right rounding.
        info = torch.finfo(actual.dtype)
        overflows = (
            np.isinf(computed) & (np.abs(value) + expected.bound >= info.max) & (np.sign(computed) == np.sign(value))
        )
        same = (computed == value) | (np.isnan(computed) & np.isnan(value)) | overflows
        error = np.where(same, 0.0, np.abs(computed - value))
        wrong = ~same & ~(error <= expected.bound)
    if not wrong.any():
        return None
    excess = np.where(wrong, np.nan_to_num(error / expected.bound, nan=np.inf), 0)
    at = np.unravel_index(np.argmax(excess), value.shape)
    return (
        f"{int(wrong.sum())} of {wrong.size} elements out of bounds; worst at {tuple(map(int, at))}: "
        f"got {computed[at]!r}, expected {value[at]!r} within {expected.bound[at]!r}"
    )


def assert_within(actual: Tensor, expected: Bounded, name: str = "result") -> None:
    problem = violation(actual, expected)
    assert problem is None, f"{name}: {problem}"
