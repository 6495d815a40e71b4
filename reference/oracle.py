"""Computes the operators in wider arithmetic, with error bounds of their results: the only tolerances.

A bound is not tuned, it counts roundings: one to the result's dtype (half an ulp), plus roundoffs of the compute dtype
(2^-24 for float32, 2^-53 for float64). The latter are relative to the magnitudes of the summed terms. For 16-bit dtypes
a bound is less than one ulp unless terms cancel. docs/numerics.md explains the counts.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference.cases import compute_dtype

Array = np.ndarray[Any, Any]

# True if sums over rows form a tree, as in the CPU kernels. Other kernels have as many partial sums as the device runs
# at once.
sums_rows_by_tree = True


class Bounded(NamedTuple):
    """An exact value and the elementwise error bound of a computed one."""

    value: Array
    bound: Array


class Backward(NamedTuple):
    grad_input: Bounded
    grad_weight: Bounded | None


class BiasedBackward(NamedTuple):
    grad_input: Bounded
    grad_weight: Bounded | None
    grad_bias: Bounded | None


class GatedBackward(NamedTuple):
    grad_input: Bounded
    grad_gate: Bounded
    grad_weight: Bounded | None


def _wide(tensor: Tensor, compute: torch.dtype) -> Array:
    array = tensor.detach().cpu().to(torch.float64).numpy()
    return array.astype(np.longdouble) if compute == torch.float64 else array


def _half_ulp(value: Array, dtype: torch.dtype) -> Array:
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), info.tiny)))
    return np.exp2(exponent - 1) * info.eps


def _bounded(
    value: Array, roundoffs: Array, dtype: torch.dtype, compute: torch.dtype, underflow: Array | float = 0.0
) -> Bounded:
    """Returns a value with its bound. ``roundoffs``: the sum of the terms' magnitudes, each times its roundings;
    ``underflow``: the additional error where a number that the value depends on is too small for the dtype."""
    info = torch.finfo(compute)
    # A product that underflows loses up to half of the smallest number of the type.
    accumulated = roundoffs * info.eps / 2 + underflow + 4 * info.smallest_normal * info.eps
    return Bounded(value, accumulated + _half_ulp(np.abs(value) + accumulated, dtype))


def _sum_roundings(cols: int, compute: torch.dtype) -> float:
    """Returns the roundings in the sum of a row: in the chain of a span, in folding chains and lanes, over spans."""
    if compute == torch.float64:
        return 32 + 5 + cols / 1024
    return 16 + 6


def _to_rows(tensor: Tensor, input: Tensor, h: Array, compute: torch.dtype) -> Array:
    """Broadcasts a tensor over the rows of input, flattened like them."""
    return np.broadcast_to(_wide(tensor, compute), input.shape).reshape(h.shape)


def _over_rows(terms: Array | float, input: Tensor, h: Array, like: Tensor) -> Array:
    """Returns the sum over the dimensions that ``like`` broadcasts over."""
    shape = (1,) * (input.dim() - like.dim()) + tuple(like.shape)
    dims = tuple(d for d, (size, whole) in enumerate(zip(shape, input.shape, strict=True)) if size != whole)
    summed: Array = np.broadcast_to(terms, h.shape).reshape(input.shape).sum(dims).reshape(like.shape)
    return summed


def _rows_summed(input: Tensor, like: Tensor) -> int:
    return input.numel() // max(like.numel(), 1)


class _Terms(NamedTuple):
    """The terms that forward and backward share, flattened to [rows, cols]."""

    compute: torch.dtype
    h: Array
    rstd: Array
    w: Array
    w_magnitude: Array
    """The magnitude of the summands of w, the weight and the offset."""
    rstd_roundings: float


def _terms(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    factor: Array | None = None,
    of_whole: tuple[Tensor, int] | None = None,
) -> _Terms:
    """Returns the shared terms. ``factor`` multiplies the input before the norm. ``of_whole``: the square sums and the
    size of whole rows, if the input has parts of them."""
    compute = compute_dtype(input.dtype)
    cols = math.prod(normalized_shape)
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    h = _wide(input, compute).reshape(rows, cols)
    if eps is None:
        eps = torch.finfo(compute).eps
    with np.errstate(all="ignore"):
        h = h if factor is None else h * factor
        if of_whole is not None:
            mean = _of_rows(of_whole[0], compute) / max(of_whole[1], 1)
        else:
            mean = (h * h).sum(1, keepdims=True) / cols if cols else np.zeros((rows, 1))
        rstd = 1 / np.sqrt(mean + eps)
    w = np.ones((1, cols), h.dtype)
    w_magnitude = w
    if weight is not None:
        w = _to_rows(weight, input, h, compute) + weight_offset
        w_magnitude = np.abs(w) + abs(weight_offset)
    sum_roundings = 0 if of_whole is not None else _sum_roundings(cols, compute)
    return _Terms(compute, h, rstd, w, w_magnitude, sum_roundings / 2 + 3)


def _of_rows(sums: Tensor, compute: torch.dtype) -> Array:
    return _wide(sums, compute).reshape(-1, 1)


class _Value(NamedTuple):
    """A value, its roundoffs and its underflow as ``_bounded`` takes them."""

    value: Array
    roundoffs: Array
    underflow: Array | float = 0.0

    def bounded(self, like: Tensor, compute: torch.dtype, dtype: torch.dtype | None = None) -> Bounded:
        shaped = [np.broadcast_to(array, self.value.shape).reshape(like.shape) for array in self]
        return _bounded(shaped[0], shaped[1], dtype or like.dtype, compute, shaped[2])


def _product(a: _Value, b: _Value, compute: torch.dtype) -> _Value:
    """Returns the product with its rounding and its underflow."""
    info = torch.finfo(compute)
    value = a.value * b.value
    return _Value(
        value,
        np.abs(a.value) * b.roundoffs + np.abs(b.value) * a.roundoffs + np.abs(value),
        np.abs(a.value) * b.underflow + np.abs(b.value) * a.underflow + info.smallest_normal * info.eps,
    )


def _exact(array: Array) -> _Value:
    return _Value(array, np.zeros_like(array))


def _as_stored(array: Array, dtype: torch.dtype) -> Array:
    rounded: Array = torch.from_numpy(array.astype(np.float64)).to(dtype).to(torch.float64).numpy()
    return rounded.astype(array.dtype)


def _cast(value: _Value, dtype: torch.dtype | None, compute: torch.dtype) -> _Value:
    """Returns the value rounded to the dtype, if given: without an error, unless the possible computed values round to
    different numbers."""
    if dtype is None:
        return value
    info = torch.finfo(compute)
    off = value.roundoffs * info.eps / 2 + value.underflow + 4 * info.smallest_normal * info.eps
    low, rounded, high = (_as_stored(number, dtype) for number in (value.value - off, value.value, value.value + off))
    error = np.where(low == high, 0.0, np.maximum(high - rounded, rounded - low))
    return _Value(rounded, np.zeros_like(rounded), error)


def _cast_dtype(rounding: str, dtype: torch.dtype, compute: torch.dtype) -> torch.dtype | None:
    """Returns the dtype that the mode rounds intermediate results to, None if that changes no computed value."""
    narrower = torch.finfo(dtype).eps > torch.finfo(compute).eps
    return {"once": None, "llama": dtype if narrower else None}[rounding]


def _normalized(t: _Terms, h_roundings: float = 0.0, h_underflow: Array | float = 0.0) -> _Value:
    """Returns h * rstd. ``h_roundings``, ``h_underflow``: those of h, on which rstd depends too."""
    value = t.h * t.rstd
    underflow = t.rstd * h_underflow + np.abs(t.h) * _rstd_underflow(t, h_underflow)
    return _Value(value, np.abs(value) * (t.rstd_roundings + 1 + 2 * h_roundings), underflow)


def _normed(t: _Terms, dtype: torch.dtype | None, h_roundings: float = 0.0, h_underflow: Array | float = 0.0) -> _Value:
    """Returns h * rstd * w. ``dtype``: the dtype that h * rstd is cast to, or None; others: see ``_normalized``."""
    n = _cast(_normalized(t, h_roundings, h_underflow), dtype, t.compute)
    # The conversion of the weight and its sum with the offset, which may cancel, and the product.
    return _product(n, _Value(t.w, t.w_magnitude * 2), t.compute)


def _rstd_underflow(t: _Terms, h_underflow: Array | float) -> Array:
    off = t.rstd**3 * (np.abs(t.h) * h_underflow).sum(1, keepdims=True) / max(t.h.shape[1], 1)
    return np.where(t.rstd == 0, 0.0, off)  # rstd is 0 in rows with an infinity


def _grad_input(
    t: _Terms,
    dtype: torch.dtype | None,
    dy: Array,
    dy_roundings: float = 0.0,
    dy_underflow: Array | float = 0.0,
    h_roundings: float = 0.0,
    h_underflow: Array | float = 0.0,
    dot_roundings: float = 0.0,
    mean_of_whole: Array | None = None,
) -> _Value:
    """Returns grad_input. ``dtype`` is the dtype that dy * w is cast to, or None; ``dy_*`` and ``h_*`` belong to dy, h.
    ``dot_roundings`` are additional ones in the sum of dy * w * h, and ``mean_of_whole`` is its given mean."""
    cols = t.h.shape[1]

    def mean(array: Array) -> Array:
        return array.sum(1, keepdims=True) / max(cols, 1)

    g, h = dy * t.w, np.abs(t.h)
    g_magnitude = np.abs(dy) * t.w_magnitude
    of_g: Array | float = dy_underflow * t.w_magnitude
    if dtype is not None:
        g, _, of_g = _cast(_Value(g, g_magnitude * (3 + dy_roundings), of_g), dtype, t.compute)
        g_magnitude = np.abs(g)
    if mean_of_whole is None:
        mean_dot, mean_magnitude = mean(g * t.h), mean(g_magnitude * h)
        sum_roundings = _sum_roundings(cols, t.compute) + dot_roundings + dy_roundings
        of_dot: Array | float = mean(of_g * h) + mean(g_magnitude * h_underflow)
    else:
        mean_dot, mean_magnitude = mean_of_whole, np.abs(mean_of_whole)
        sum_roundings = of_dot = 0.0
    value = t.rstd * g - t.rstd**3 * t.h * mean_dot
    direct = t.rstd * g_magnitude
    projected = t.rstd**3 * h * mean_magnitude
    roundoffs = direct * (t.rstd_roundings + 5 + dy_roundings + h_roundings) + projected * (
        3 * t.rstd_roundings + sum_roundings + 8 + 5 * h_roundings
    )
    of_h, of_rstd = h_underflow, _rstd_underflow(t, h_underflow)
    underflow = t.rstd * of_g + g_magnitude * of_rstd
    underflow = underflow + t.rstd**3 * (h * of_dot + of_h * mean_magnitude)
    underflow = underflow + 3 * t.rstd**2 * of_rstd * h * mean_magnitude
    return _Value(value, roundoffs, underflow)


def _summed(t: _Terms, terms: _Value, input: Tensor, normalized_shape: tuple[int, ...]) -> Bounded:
    """Returns the sum of the terms over each row, in the shape of the result."""
    shape = input.shape[: input.dim() - len(normalized_shape)]
    roundoffs = terms.roundoffs + np.abs(terms.value) * _sum_roundings(t.h.shape[1], t.compute)
    value, roundoffs, underflow = (
        np.broadcast_to(array, t.h.shape).sum(1).reshape(shape) for array in (terms.value, roundoffs, terms.underflow)
    )
    return _bounded(value, roundoffs, t.compute, t.compute, underflow)


def _grad_weight(t: _Terms, dtype: torch.dtype | None, dy: _Value, n: _Value, weight: Tensor, input: Tensor) -> Bounded:
    """Returns grad_weight. ``n``: h * rstd. ``dtype``: that n and its product with dy are cast to, or None."""
    terms = _cast(_product(dy, _cast(n, dtype, t.compute), t.compute), dtype, t.compute)
    return _summed_over_rows(t, terms, weight, input)


def _summed_over_rows(t: _Terms, terms: _Value, like: Tensor, input: Tensor) -> Bounded:
    value, size, roundoffs, underflow = (
        _over_rows(array, input, t.h, like) for array in (terms.value, np.abs(terms.value), *terms[1:])
    )
    rows = _rows_summed(input, like)
    row_roundings = _tree_roundings(rows, t.h.shape[1]) if sums_rows_by_tree else 2 * (math.isqrt(rows) + 5)
    return _bounded(value, roundoffs + size * (row_roundings + 1), like.dtype, t.compute, underflow)


def _tree_roundings(rows: int, cols: int) -> int:
    """Returns the most additions that a row's term goes through: those of a leaf, and the height of the tree."""
    leaf = 8
    while leaf < 64 and 2 * leaf * cols <= 16384 and 4 * leaf * leaf <= rows:
        leaf *= 2
    leaves = -(-rows // leaf)
    return min(leaf, rows) + max(leaves - 1, 0).bit_length()


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    of_whole: tuple[Tensor, int] | None = None,
) -> Bounded:
    """Returns the norm. ``dtype``: that of the output, by default the input's; ``of_whole``: see ``_terms``."""
    t = _terms(input, normalized_shape, weight, eps, weight_offset, of_whole=of_whole)
    with np.errstate(all="ignore"):
        cast = _cast_dtype(rounding, dtype or input.dtype, t.compute)
        return _shifted(t, cast, bias, input).bounded(input, t.compute, dtype)


def exact_sum(input: Tensor, residual: Tensor, alpha: float = 1.0, rounding: str = "once") -> Tensor:
    """Returns the sum, rounded once or with a rounded product. In float64, alpha must be a power of two."""
    compute = compute_dtype(input.dtype)
    wide: Any = np.longdouble if compute == torch.float32 else np.float64
    narrow = np.float32 if compute == torch.float32 else np.float64
    x, r = (tensor.detach().cpu().to(compute).numpy().astype(wide) for tensor in (input, residual))
    product = x * wide(narrow(alpha))
    if rounding == "llama":
        product = torch.from_numpy(product.astype(narrow)).to(input.dtype).to(compute).numpy().astype(wide)
    return torch.from_numpy((product + r).astype(narrow)).to(residual.dtype)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    alpha: float = 1.0,
) -> tuple[Bounded, Bounded]:
    """Returns the norm of the rounded sum, and that sum, which must be exact."""
    h = exact_sum(input, residual, alpha, rounding)
    output = rms_norm(h, normalized_shape, weight, eps, weight_offset, rounding, dtype=input.dtype)
    return output, Bounded(_wide(h, compute_dtype(h.dtype)), np.zeros(h.shape))


def rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    grad_residual: Tensor | None = None,
    bias: Tensor | None = None,
    of_whole: tuple[Tensor, int] | None = None,
    mean_of_whole: Array | None = None,
) -> BiasedBackward:
    """Returns the gradients. ``of_whole``: see ``_terms``; ``mean_of_whole``: see ``_grad_input``."""
    t = _terms(input, normalized_shape, weight, eps, weight_offset, of_whole=of_whole)
    dy = _wide(grad_output, t.compute).reshape(t.h.shape)
    dtype = _cast_dtype(rounding, grad_output.dtype, t.compute)
    with np.errstate(all="ignore"):
        value, roundoffs, underflow = _grad_input(t, dtype, dy, mean_of_whole=mean_of_whole)
        if grad_residual is not None:
            residual = _wide(grad_residual, t.compute).reshape(t.h.shape)
            value, roundoffs = value + residual, roundoffs + np.abs(residual) * 2
        grad_input = _Value(value, roundoffs, underflow).bounded(input, t.compute)
        grad_weight = None
        if weight is not None:
            grad_weight = _grad_weight(t, dtype, _exact(dy), _normalized(t), weight, input)
        grad_bias = None if bias is None else _summed_over_rows(t, _exact(dy), bias, input)
    return BiasedBackward(grad_input, grad_weight, grad_bias)


def rms_norm_stats(input: Tensor, normalized_shape: tuple[int, ...]) -> Bounded:
    t = _terms(input, normalized_shape, None, 0.0, 0.0)
    with np.errstate(all="ignore"):
        return _summed(t, _product(_exact(t.h), _exact(t.h), t.compute), input, normalized_shape)


def rms_norm_from_stats(
    input: Tensor,
    square_sum: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    *,
    row_size: int,
) -> Bounded:
    of_whole = (square_sum, row_size)
    return rms_norm(input, normalized_shape, weight, eps, weight_offset, rounding, of_whole=of_whole)


def rms_norm_backward_stats(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Bounded, Bounded]:
    t = _terms(input, normalized_shape, weight, eps, weight_offset)
    dtype = _cast_dtype(rounding, grad_output.dtype, t.compute)
    dy = _wide(grad_output, t.compute).reshape(t.h.shape)
    with np.errstate(all="ignore"):
        # The conversion of the weight and its sum with the offset, which may cancel, and the product.
        g = _cast(_Value(dy * t.w, np.abs(dy) * t.w_magnitude * 3), dtype, t.compute)
        dot = _summed(t, _product(g, _exact(t.h), t.compute), input, normalized_shape)
    return rms_norm_stats(input, normalized_shape), dot


def rms_norm_backward_from_stats(
    grad_output: Tensor,
    input: Tensor,
    square_sum: Tensor,
    dot: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    grad_residual: Tensor | None = None,
    *,
    row_size: int,
) -> Backward:
    grad_input, grad_weight, _ = rms_norm_backward(
        grad_output,
        input,
        normalized_shape,
        weight,
        eps,
        weight_offset,
        rounding,
        grad_residual,
        of_whole=(square_sum, row_size),
        mean_of_whole=_of_rows(dot, compute_dtype(input.dtype)) / max(row_size, 1),
    )
    return Backward(grad_input, grad_weight)


class _Gate(NamedTuple):
    """An activation and its slope."""

    activation: _Value
    slope: _Value


ACTIVATION_ROUNDINGS = {"sigmoid": 5, "silu": 6}


def _gate(gate: Tensor, compute: torch.dtype, activation: str, rows: Array) -> _Gate:
    return _activated(_wide(gate, compute).reshape(rows.shape), compute, activation)


def _activated(g: Array, compute: torch.dtype, activation: str) -> _Gate:
    small = np.exp(-np.abs(g))
    larger, smaller = 1 / (1 + small), small / (1 + small)
    s, c = np.where(g < 0, smaller, larger), np.where(g < 0, larger, smaller)
    tiny = torch.finfo(compute).smallest_normal  # smaller exponentials may be flushed to zero
    roundings = ACTIVATION_ROUNDINGS[activation]
    # An exponential's error of 2 roundoffs adds at most as much to s and c. The addition, the division and, for the
    # smaller of the two, a product add one each. In the product of both, the exponential counts once.
    if activation == "sigmoid":
        return _Gate(_Value(s, s * roundings, tiny), _Value(s * c, s * c * 8, tiny))
    curved = g * s * c
    slope_roundoffs = s * (roundings) + np.abs(curved) * 10
    return _Gate(
        _Value(g * s, np.abs(g * s) * roundings, np.abs(g) * tiny),
        _Value(s + curved, slope_roundoffs, (1 + 2 * np.abs(g)) * tiny),
    )


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> Bounded:
    plain = _terms(input, normalized_shape, weight, eps, weight_offset)
    with np.errstate(all="ignore"):
        a = _gate(gate, plain.compute, activation, plain.h).activation
        dtype = _cast_dtype(rounding, input.dtype, plain.compute)
        if norm_before_gate:
            normed = _cast(_normed(plain, dtype), dtype, plain.compute)
            return _product(normed, a, plain.compute).bounded(input, plain.compute)
        u = _product(_exact(plain.h), a, plain.compute)
        t = _terms(input, normalized_shape, weight, eps, weight_offset, a.value)
        return _normed(t, dtype, ACTIVATION_ROUNDINGS[activation] + 1, u.underflow).bounded(input, t.compute)


def gated_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    gate: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> GatedBackward:
    plain = _terms(input, normalized_shape, weight, eps, weight_offset)
    compute = plain.compute
    roundings = ACTIVATION_ROUNDINGS[activation] + 1  # of a product with an activation
    dtype = _cast_dtype(rounding, input.dtype, plain.compute)
    with np.errstate(all="ignore"):
        a, slope = _gate(gate, compute, activation, plain.h)
        dy = _exact(_wide(grad_output, compute).reshape(plain.h.shape))
        x = _exact(plain.h)
        if norm_before_gate:
            t, g = plain, _cast(_product(dy, a, compute), dtype, compute)
            n = _normalized(t)
            for_input = _grad_input(t, dtype, g.value, roundings if dtype is None else 0.0, g.underflow)
            normed = _cast(_normed(t, dtype), dtype, compute)
            for_gate = _product(_product(dy, normed, compute), slope, compute)
        else:
            u = _product(x, a, compute)
            t, g = _terms(input, normalized_shape, weight, eps, weight_offset, a.value), dy
            n = _normalized(t, roundings, u.underflow)
            for_product = _grad_input(t, dtype, dy.value, h_roundings=roundings, h_underflow=u.underflow)
            for_input = _product(for_product, a, compute)
            for_gate = _product(_product(for_product, x, compute), slope, compute)
        return GatedBackward(
            for_input.bounded(input, compute),
            for_gate.bounded(gate, compute),
            None if weight is None else _grad_weight(t, dtype, g, n, weight, input),
        )


def _off(value: _Value, compute: torch.dtype) -> Array:
    """Returns the maximum error of a computed value."""
    off: Array = value.roundoffs * torch.finfo(compute).eps / 2 + value.underflow
    return off


def _shifted(t: _Terms, dtype: torch.dtype | None, bias: Tensor | None, input: Tensor) -> _Value:
    """Returns the norm plus the bias, if given: the argument of an activation."""
    normed = _normed(t, dtype)
    if bias is not None:
        n, b = _cast(normed, dtype, t.compute), _to_rows(bias, input, t.h, t.compute)
        # The conversion of the bias, and the sum.
        normed = _Value(n.value + b, n.roundoffs + np.abs(b) + np.abs(n.value + b), n.underflow)
    return normed


# The largest second derivative of either activation: silu's is 1/2 at 0, the sigmoid's is smaller.
MOST_CURVED = 0.5


def channel_rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Tensor | None = None,
    *,
    dim: int,
    activation: str = "identity",
) -> Bounded:
    rows = input.movedim(dim, -1)
    t = _terms(rows, normalized_shape, weight, eps, weight_offset)
    with np.errstate(all="ignore"):
        dtype = _cast_dtype(rounding, input.dtype, t.compute)
        z = _shifted(t, dtype, bias, rows)
        if activation != "identity":
            z = _cast(z, dtype, t.compute)
            a, slope = _activated(z.value, t.compute, activation)
            steepest = np.abs(slope.value) + MOST_CURVED * _off(z, t.compute)
            z = _Value(a.value, a.roundoffs + steepest * z.roundoffs, a.underflow + steepest * z.underflow)
        return _moved(z.bounded(rows, t.compute), dim)


def channel_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Tensor | None = None,
    *,
    dim: int,
    activation: str = "identity",
) -> BiasedBackward:
    rows = input.movedim(dim, -1)
    t = _terms(rows, normalized_shape, weight, eps, weight_offset)
    dtype = _cast_dtype(rounding, input.dtype, t.compute)
    dy = _exact(_wide(grad_output.movedim(dim, -1), t.compute).reshape(t.h.shape))
    with np.errstate(all="ignore"):
        if activation != "identity":
            z = _cast(_shifted(t, dtype, bias, rows), dtype, t.compute)
            slope = _activated(z.value, t.compute, activation).slope
            of_z = slope.underflow + MOST_CURVED * _off(z, t.compute)
            dy = _cast(_product(dy, slope._replace(underflow=of_z), t.compute), dtype, t.compute)
        grad_input = _grad_input(t, dtype, dy.value, dy_underflow=_off(dy, t.compute)).bounded(rows, t.compute)
        of_weight = None if weight is None else _grad_weight(t, dtype, dy, _normalized(t), weight, rows)
        of_bias = None if bias is None else _summed_over_rows(t, dy, bias, rows)
    return BiasedBackward(_moved(grad_input, dim), of_weight, of_bias)


def _moved(rows: Bounded, dim: int) -> Bounded:
    return Bounded(*(np.moveaxis(array, -1, dim) for array in rows))


class _Angles(NamedTuple):
    """For each column of the rows: cos, sin with the sign of its product, the other column of the pair, which sin
    multiplies, and whether the column is rotated."""

    cos: Array
    sin: Array
    other: Array
    is_rotated: Array


def _angles(
    cos: Tensor, sin: Tensor, t: _Terms, input: Tensor, interleaved: bool, rotary_dim: int | None, offset: int
) -> _Angles:
    cols = input.shape[-1]
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    column = np.arange(rotary_dim)
    half = rotary_dim // 2
    is_first = column % 2 == 0 if interleaved else column < half
    step = 1 if interleaved else half
    of_table = column
    if cos.shape[-1] != rotary_dim:
        of_table = column // 2 if interleaved else column % max(half, 1)

    def of_rows(table: Tensor, elsewhere: float) -> Array:
        full = np.full((*input.shape[:-1], cols), elsewhere, t.h.dtype)
        full[..., offset : offset + rotary_dim] = _wide(table, t.compute)[..., of_table]
        return full.reshape(t.h.shape)

    signs, other = np.ones(cols, t.h.dtype), np.arange(cols)
    signs[offset : offset + rotary_dim] = np.where(is_first, -1, 1)
    other[offset : offset + rotary_dim] = offset + np.where(is_first, column + step, column - step)
    is_rotated = (np.arange(cols) >= offset) & (np.arange(cols) < offset + rotary_dim)
    return _Angles(of_rows(cos, 1.0), of_rows(sin, 0.0) * signs, other, is_rotated)


def _turned(rows: _Value, angles: _Angles, compute: torch.dtype, back: bool = False) -> _Value:
    """Returns the rotated rows: two products and their sum, each rounded."""
    a, info = angles, torch.finfo(compute)
    cos, sin = a.cos, a.sin[:, a.other] if back else a.sin
    lost = np.broadcast_to(rows.underflow, rows.value.shape)

    def turned(of_rows: Array, cos: Array, sin: Array) -> Array:
        return of_rows * cos + of_rows[:, a.other] * sin

    size = turned(np.abs(rows.value), np.abs(cos), np.abs(sin))
    value = turned(rows.value, cos, sin)
    roundoffs = turned(rows.roundoffs, np.abs(cos), np.abs(sin)) + 2 * size
    underflow = turned(lost, np.abs(cos), np.abs(sin)) + 2 * info.smallest_normal * info.eps
    plain = (rows.value, rows.roundoffs, lost)
    return _Value(*(np.where(a.is_rotated, *pair) for pair in zip((value, roundoffs, underflow), plain, strict=True)))


def rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Bounded:
    t = _terms(input, normalized_shape, weight, eps, weight_offset)
    angles = _angles(cos, sin, t, input, interleaved, rotary_dim, rotary_offset)
    with np.errstate(all="ignore"):
        dtype = _cast_dtype(rounding, input.dtype, t.compute)
        normed = _cast(_normed(t, dtype), dtype, t.compute)
        return _turned(normed, angles, t.compute).bounded(input, t.compute)


def rms_norm_rope_backward(
    grad_output: Tensor,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Backward:
    t = _terms(input, normalized_shape, weight, eps, weight_offset)
    angles = _angles(cos, sin, t, input, interleaved, rotary_dim, rotary_offset)
    with np.errstate(all="ignore"):
        dtype = _cast_dtype(rounding, input.dtype, t.compute)
        turned = _turned(_exact(_wide(grad_output, t.compute).reshape(t.h.shape)), angles, t.compute, back=True)
        dy = _cast(turned, dtype, t.compute)
        # The two products may cancel, so their roundings count absolutely, not relative to their sum.
        off = dy.roundoffs * torch.finfo(t.compute).eps / 2 + dy.underflow
        # The columns before, in and behind the rotated range have separate sums, which are then added.
        grad_input = _grad_input(t, dtype, dy.value, dy_underflow=off, dot_roundings=2).bounded(input, t.compute)
        grad_weight = None
        if weight is not None:
            grad_weight = _grad_weight(t, dtype, dy, _normalized(t), weight, input)
    return Backward(grad_input, grad_weight)


def violation(actual: Tensor, expected: Bounded) -> str | None:
    """Returns how ``actual`` violates the bounds, or None."""
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


def assert_same_nans(actual: Tensor | None, expected: Bounded | None, name: str = "result") -> None:
    """Asserts that NaNs are at the same positions, and that both are None if one is."""
    if actual is None or expected is None:
        assert actual is None, name
        assert expected is None, name
    else:
        np.testing.assert_array_equal(actual.isnan(), np.isnan(expected.value), name)


def assert_within(actual: Tensor, expected: Bounded, name: str = "result") -> None:
    problem = violation(actual, expected)
    assert problem is None, f"{name}: {problem}"
