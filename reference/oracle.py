"""Computes the operators in wider arithmetic, with error bounds of their results: the only tolerances.

A bound is not tuned, it counts roundings: one to the result's dtype (half an ulp), plus roundoffs of the compute dtype
(2^-24 for float32, 2^-53 for float64). The latter are relative to the magnitudes of the summed terms. For 16-bit dtypes
a bound is less than one ulp unless terms cancel. docs/numerics.md explains the counts.
"""

import math
from collections.abc import Sequence
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


class BiasedBackward(NamedTuple):
    grad_input: Bounded
    grad_weight: Bounded | None
    grad_bias: Bounded | None


class GatedBackward(NamedTuple):
    grad_input: Bounded
    grad_gate: Bounded
    grad_weight: Bounded | None


class _Value(NamedTuple):
    """A value with its possible errors. ``roundoffs``: the sum of the terms' magnitudes, each times its roundings;
    ``underflow``: the additional error where a number that the value depends on is too small for the dtype."""

    value: Array
    roundoffs: Array
    underflow: Array | float = 0.0


def _exact(array: Array) -> _Value:
    return _Value(array, np.zeros_like(array))


def _wide(tensor: Tensor, compute: torch.dtype) -> Array:
    array = tensor.detach().cpu().to(torch.float64).numpy()
    return array.astype(np.longdouble) if compute == torch.float64 else array


def _half_ulp(value: Array, dtype: torch.dtype) -> Array:
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), info.tiny)))
    return np.exp2(exponent - 1) * info.eps


def _as_stored(array: Array, dtype: torch.dtype) -> Array:
    rounded: Array = torch.from_numpy(array.astype(np.float64)).to(dtype).to(torch.float64).numpy()
    return rounded.astype(array.dtype)


def _sum_roundings(cols: int, compute: torch.dtype) -> float:
    """Returns the roundings in the sum of a row: in the chain of a span, in folding chains and lanes, over spans."""
    if compute == torch.float64:
        return 32 + 5 + cols / 1024
    return 16 + 6


class _Terms(NamedTuple):
    """The terms that forward and backward share, flattened to [rows, cols]."""

    input: Tensor
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    compute: torch.dtype
    cast_dtype: torch.dtype | None
    """The dtype that the mode rounds intermediate results to, None if that changes no computed value."""
    h: Array
    rstd: Array
    w: Array
    w_magnitude: Array
    """The magnitude of the summands of w, the weight and the offset."""
    rstd_roundings: float

    def rows(self, tensor: Tensor) -> Array:
        """Broadcasts a tensor over the rows of input, flattened like them."""
        return np.broadcast_to(_wide(tensor, self.compute), self.input.shape).reshape(self.h.shape)

    def product(self, a: _Value, b: _Value) -> _Value:
        """Returns the product with its rounding and its underflow."""
        info = torch.finfo(self.compute)
        value = a.value * b.value
        return _Value(
            value,
            np.abs(a.value) * b.roundoffs + np.abs(b.value) * a.roundoffs + np.abs(value),
            np.abs(a.value) * b.underflow + np.abs(b.value) * a.underflow + info.smallest_normal * info.eps,
        )

    def off(self, value: _Value) -> Array:
        """Returns the maximum error of a computed value."""
        off: Array = value.roundoffs * torch.finfo(self.compute).eps / 2 + value.underflow
        return off

    def _off(self, value: _Value) -> Array:
        info = torch.finfo(self.compute)
        # A product that underflows loses up to half of the smallest number of the type.
        return self.off(value) + 4 * info.smallest_normal * info.eps

    def cast(self, value: _Value) -> _Value:
        """Returns the value rounded as the mode does: without an error, unless the possible computed values round to
        different numbers."""
        dtype = self.cast_dtype
        if dtype is None:
            return value
        off = self._off(value)
        low, rounded, high = (
            _as_stored(number, dtype) for number in (value.value - off, value.value, value.value + off)
        )
        error = np.where(low == high, 0.0, np.maximum(high - rounded, rounded - low))
        return _Value(rounded, np.zeros_like(rounded), error)

    def bounded(self, value: _Value, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Bounded:
        """Returns a value with its bound, in the dtype and the shape of the input if none are given."""
        off, shape = self._off(value), self.input.shape if shape is None else shape
        bound = off + _half_ulp(np.abs(value.value) + off, dtype or self.input.dtype)
        return Bounded(value.value.reshape(shape), bound.reshape(shape))


def _terms(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    *,
    dtype: torch.dtype | None = None,
    factor: Array | None = None,
    of_whole: tuple[Tensor, int] | None = None,
) -> _Terms:
    """Returns the shared terms.

    ``dtype``: that of intermediate results in rounding mode llama, by default the input's. ``factor`` multiplies the
    input before the norm. ``of_whole``: the square sums and the size of whole rows, if the input has parts of them.
    """
    compute = compute_dtype(input.dtype)
    dtype = dtype or input.dtype
    narrower = torch.finfo(dtype).eps > torch.finfo(compute).eps
    cast_dtype = {"once": None, "llama": dtype if narrower else None}[rounding]
    cols = math.prod(normalized_shape)
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    h = _wide(input, compute).reshape(rows, cols)
    if eps is None:
        eps = torch.finfo(compute).eps
    with np.errstate(all="ignore"):
        h = h if factor is None else h * factor
        if of_whole is not None:
            mean = _wide(of_whole[0], compute).reshape(-1, 1) / max(of_whole[1], 1)
        else:
            mean = (h * h).sum(1, keepdims=True) / cols if cols else np.zeros((rows, 1))
        rstd = 1 / np.sqrt(mean + eps)
    w = w_magnitude = np.ones((1, cols), h.dtype)
    sum_roundings = 0 if of_whole is not None else _sum_roundings(cols, compute)
    t = _Terms(input, normalized_shape, weight, compute, cast_dtype, h, rstd, w, w_magnitude, sum_roundings / 2 + 3)
    if weight is None:
        return t
    w = t.rows(weight) + weight_offset
    return t._replace(w=w, w_magnitude=np.abs(w) + abs(weight_offset))


def _normalized(t: _Terms, h_roundings: float = 0.0, h_underflow: Array | float = 0.0) -> _Value:
    """Returns h * rstd. ``h_roundings``, ``h_underflow``: those of h, on which rstd depends too."""
    value = t.h * t.rstd
    underflow = t.rstd * h_underflow + np.abs(t.h) * _rstd_underflow(t, h_underflow)
    return _Value(value, np.abs(value) * (t.rstd_roundings + 1 + 2 * h_roundings), underflow)


def _normed(t: _Terms, h_roundings: float = 0.0, h_underflow: Array | float = 0.0) -> _Value:
    """Returns h * rstd * w, with h * rstd cast; for the arguments see ``_normalized``."""
    n = t.cast(_normalized(t, h_roundings, h_underflow))
    # The conversion of the weight and its sum with the offset, which may cancel, and the product.
    return t.product(n, _Value(t.w, t.w_magnitude * 2))


def _rstd_underflow(t: _Terms, h_underflow: Array | float) -> Array:
    off = t.rstd**3 * (np.abs(t.h) * h_underflow).sum(1, keepdims=True) / max(t.h.shape[1], 1)
    return np.where(t.rstd == 0, 0.0, off)  # rstd is 0 in rows with an infinity


def _grad_input(
    t: _Terms,
    dy: Array,
    dy_roundings: float = 0.0,
    dy_underflow: Array | float = 0.0,
    h_roundings: float = 0.0,
    h_underflow: Array | float = 0.0,
    dot_roundings: float = 0.0,
    mean_of_whole: Array | None = None,
) -> _Value:
    """Returns grad_input, with dy * w cast. ``dy_*`` and ``h_*`` belong to dy, h. ``dot_roundings`` are additional ones
    in the sum of dy * w * h, and ``mean_of_whole`` is its given mean."""
    cols = t.h.shape[1]

    def mean(array: Array) -> Array:
        return array.sum(1, keepdims=True) / max(cols, 1)

    g, h = dy * t.w, np.abs(t.h)
    g_magnitude = np.abs(dy) * t.w_magnitude
    of_g: Array | float = dy_underflow * t.w_magnitude
    if t.cast_dtype is not None:
        g, _, of_g = t.cast(_Value(g, g_magnitude * (3 + dy_roundings), of_g))
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


def _summed(t: _Terms, terms: _Value) -> Bounded:
    """Returns the sum of the terms over each row, in the shape of the result."""
    roundoffs = terms.roundoffs + np.abs(terms.value) * _sum_roundings(t.h.shape[1], t.compute)
    sums = (np.broadcast_to(array, t.h.shape).sum(1) for array in (terms.value, roundoffs, terms.underflow))
    return t.bounded(_Value(*sums), t.compute, t.input.shape[: t.input.dim() - len(t.normalized_shape)])


def _grad_weight(t: _Terms, dy: _Value, n: _Value) -> Bounded | None:
    """Returns grad_weight, with n and its product with dy cast. ``n``: h * rstd."""
    return _summed_over_rows(t, t.cast(t.product(dy, t.cast(n))), t.weight)


def _summed_over_rows(t: _Terms, terms: _Value, like: Tensor | None) -> Bounded | None:
    """Returns the sum over the dimensions that ``like`` broadcasts over."""
    if like is None:
        return None
    shape = (1,) * (t.input.dim() - like.dim()) + tuple(like.shape)
    dims = tuple(d for d, (size, whole) in enumerate(zip(shape, t.input.shape, strict=True)) if size != whole)
    value, size, roundoffs, underflow = (
        np.broadcast_to(array, t.h.shape).reshape(t.input.shape).sum(dims)
        for array in (terms.value, np.abs(terms.value), *terms[1:])
    )
    rows = t.input.numel() // max(like.numel(), 1)
    row_roundings = _tree_roundings(rows, t.h.shape[1]) if sums_rows_by_tree else 2 * (math.isqrt(rows) + 5)
    return t.bounded(_Value(value, roundoffs + size * (row_roundings + 1), underflow), like.dtype, like.shape)


def _tree_roundings(rows: int, cols: int) -> int:
    """Returns the most additions that a row's term goes through: those of a leaf, and the height of the tree."""
    leaf = 8
    while leaf < 64 and 2 * leaf * cols <= 16384 and 4 * leaf * leaf <= rows:
        leaf *= 2
    leaves = -(-rows // leaf)
    return min(leaf, rows) + max(leaves - 1, 0).bit_length()


# The operators. ``norm`` and ``options`` are the arguments of ``_terms``, by position and by name.
_ignore_warnings = np.errstate(all="ignore")


@_ignore_warnings
def rms_norm(
    input: Tensor, *norm: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None, **options: Any
) -> Bounded:
    """Returns the norm. ``dtype``: that of the output, by default the input's."""
    t = _terms(input, *norm, dtype=dtype, **options)
    return t.bounded(_shifted(t, bias), dtype)


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
    input: Tensor, residual: Tensor, *norm: Any, rounding: str = "once", alpha: float = 1.0, **options: Any
) -> tuple[Bounded, Bounded]:
    """Returns the norm of the rounded sum, and that sum, which must be exact."""
    h = exact_sum(input, residual, alpha, rounding)
    output = rms_norm(h, *norm, rounding=rounding, dtype=input.dtype, **options)
    return output, Bounded(_wide(h, compute_dtype(h.dtype)), np.zeros(h.shape))


@_ignore_warnings
def rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    *norm: Any,
    grad_residual: Tensor | None = None,
    bias: Tensor | None = None,
    mean_of_whole: Array | None = None,
    **options: Any,
) -> BiasedBackward:
    """Returns the gradients. ``mean_of_whole``: see ``_grad_input``."""
    t = _terms(input, *norm, dtype=grad_output.dtype, **options)
    dy = _exact(t.rows(grad_output))
    grad_input = _grad_input(t, dy.value, mean_of_whole=mean_of_whole)
    if grad_residual is not None:
        value, roundoffs, underflow = grad_input
        residual = t.rows(grad_residual)
        grad_input = _Value(value + residual, roundoffs + np.abs(residual) * 2, underflow)
    grad_weight = _grad_weight(t, dy, _normalized(t))
    return BiasedBackward(t.bounded(grad_input), grad_weight, _summed_over_rows(t, dy, bias))


@_ignore_warnings
def rms_norm_stats(input: Tensor, normalized_shape: tuple[int, ...]) -> Bounded:
    t = _terms(input, normalized_shape)
    return _summed(t, t.product(_exact(t.h), _exact(t.h)))


def rms_norm_from_stats(input: Tensor, square_sum: Tensor, *norm: Any, row_size: int, **options: Any) -> Bounded:
    return rms_norm(input, *norm, of_whole=(square_sum, row_size), **options)


@_ignore_warnings
def rms_norm_backward_stats(grad_output: Tensor, input: Tensor, *norm: Any, **options: Any) -> tuple[Bounded, Bounded]:
    t = _terms(input, *norm, dtype=grad_output.dtype, **options)
    dy = t.rows(grad_output)
    # The conversion of the weight and its sum with the offset, which may cancel, and the product.
    g = t.cast(_Value(dy * t.w, np.abs(dy) * t.w_magnitude * 3))
    return rms_norm_stats(input, t.normalized_shape), _summed(t, t.product(g, _exact(t.h)))


def rms_norm_backward_from_stats(
    grad_output: Tensor, input: Tensor, square_sum: Tensor, dot: Tensor, *norm: Any, row_size: int, **options: Any
) -> tuple[Bounded, Bounded | None]:
    mean = _wide(dot, compute_dtype(input.dtype)).reshape(-1, 1) / max(row_size, 1)
    whole: dict[str, Any] = {"of_whole": (square_sum, row_size), "mean_of_whole": mean}
    return rms_norm_backward(grad_output, input, *norm, **whole, **options)[:2]


ACTIVATION_ROUNDINGS = {"sigmoid": 5, "silu": 6}


def _activated(g: Array, compute: torch.dtype, activation: str) -> tuple[_Value, _Value]:
    """Returns an activation and its slope."""
    small = np.exp(-np.abs(g))
    larger, smaller = 1 / (1 + small), small / (1 + small)
    s, c = np.where(g < 0, smaller, larger), np.where(g < 0, larger, smaller)
    tiny = torch.finfo(compute).smallest_normal  # smaller exponentials may be flushed to zero
    roundings = ACTIVATION_ROUNDINGS[activation]
    # An exponential's error of 2 roundoffs adds at most as much to s and c. The addition, the division and, for the
    # smaller of the two, a product add one each. In the product of both, the exponential counts once.
    if activation == "sigmoid":
        return _Value(s, s * roundings, tiny), _Value(s * c, s * c * 8, tiny)
    curved = g * s * c
    slope_roundoffs = s * roundings + np.abs(curved) * 10
    return (
        _Value(g * s, np.abs(g * s) * roundings, np.abs(g) * tiny),
        _Value(s + curved, slope_roundoffs, (1 + 2 * np.abs(g)) * tiny),
    )


@_ignore_warnings
def gated_rms_norm(
    input: Tensor, gate: Tensor, *norm: Any, activation: str = "silu", norm_before_gate: bool = True, **options: Any
) -> Bounded:
    t = _terms(input, *norm, **options)
    a, _ = _activated(t.rows(gate), t.compute, activation)
    if norm_before_gate:
        return t.bounded(t.product(t.cast(_normed(t)), a))
    underflow = t.product(_exact(t.h), a).underflow
    t = _terms(input, *norm, factor=a.value, **options)
    return t.bounded(_normed(t, ACTIVATION_ROUNDINGS[activation] + 1, underflow))


@_ignore_warnings
def gated_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    gate: Tensor,
    *norm: Any,
    activation: str = "silu",
    norm_before_gate: bool = True,
    **options: Any,
) -> GatedBackward:
    t = _terms(input, *norm, **options)
    roundings = ACTIVATION_ROUNDINGS[activation] + 1  # of a product with an activation
    a, slope = _activated(t.rows(gate), t.compute, activation)
    dy, x = _exact(t.rows(grad_output)), _exact(t.h)
    if norm_before_gate:
        g, n = t.cast(t.product(dy, a)), _normalized(t)
        for_input = _grad_input(t, g.value, roundings if t.cast_dtype is None else 0.0, g.underflow)
        for_gate = t.product(t.product(dy, t.cast(_normed(t))), slope)
    else:
        u = t.product(x, a)
        t, g = _terms(input, *norm, factor=a.value, **options), dy
        n = _normalized(t, roundings, u.underflow)
        for_product = _grad_input(t, dy.value, h_roundings=roundings, h_underflow=u.underflow)
        for_input = t.product(for_product, a)
        for_gate = t.product(t.product(for_product, x), slope)
    return GatedBackward(t.bounded(for_input), t.bounded(for_gate, gate.dtype), _grad_weight(t, g, n))


def _shifted(t: _Terms, bias: Tensor | None) -> _Value:
    """Returns the norm plus the bias, if given: the argument of an activation."""
    normed = _normed(t)
    if bias is not None:
        n, b = t.cast(normed), t.rows(bias)
        # The conversion of the bias, and the sum.
        normed = _Value(n.value + b, n.roundoffs + np.abs(b) + np.abs(n.value + b), n.underflow)
    return normed


# The largest second derivative of either activation: silu's is 1/2 at 0, the sigmoid's is smaller.
MOST_CURVED = 0.5


@_ignore_warnings
def channel_rms_norm(
    input: Tensor, *norm: Any, dim: int, bias: Tensor | None = None, activation: str = "identity", **options: Any
) -> Bounded:
    t = _terms(input.movedim(dim, -1), *norm, **options)
    z = _shifted(t, bias)
    if activation != "identity":
        z = t.cast(z)
        a, slope = _activated(z.value, t.compute, activation)
        steepest = np.abs(slope.value) + MOST_CURVED * t.off(z)
        z = _Value(a.value, a.roundoffs + steepest * z.roundoffs, a.underflow + steepest * z.underflow)
    return _moved(t.bounded(z), dim)


@_ignore_warnings
def channel_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    *norm: Any,
    dim: int,
    bias: Tensor | None = None,
    activation: str = "identity",
    **options: Any,
) -> BiasedBackward:
    t = _terms(input.movedim(dim, -1), *norm, **options)
    dy = _exact(t.rows(grad_output.movedim(dim, -1)))
    if activation != "identity":
        z = t.cast(_shifted(t, bias))
        _, slope = _activated(z.value, t.compute, activation)
        of_z = slope.underflow + MOST_CURVED * t.off(z)
        dy = t.cast(t.product(dy, slope._replace(underflow=of_z)))
    grad_input = t.bounded(_grad_input(t, dy.value, dy_underflow=t.off(dy)))
    return BiasedBackward(_moved(grad_input, dim), _grad_weight(t, dy, _normalized(t)), _summed_over_rows(t, dy, bias))


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
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *norm: Any,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    **options: Any,
) -> tuple[_Terms, _Angles]:
    t = _terms(input, *norm, **options)
    cols = t.input.shape[-1]
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    rotated = slice(rotary_offset, rotary_offset + rotary_dim)
    column = np.arange(rotary_dim)
    half = rotary_dim // 2
    is_first = column % 2 == 0 if interleaved else column < half
    step = 1 if interleaved else half
    of_table = column
    if cos.shape[-1] != rotary_dim:
        of_table = column // 2 if interleaved else column % max(half, 1)

    def of_rows(table: Tensor, elsewhere: float) -> Array:
        full = np.full((*t.input.shape[:-1], cols), elsewhere, t.h.dtype)
        full[..., rotated] = _wide(table, t.compute)[..., of_table]
        return full.reshape(t.h.shape)

    signs, other, is_rotated = np.ones(cols, t.h.dtype), np.arange(cols), np.zeros(cols, bool)
    signs[rotated] = np.where(is_first, -1, 1)
    other[rotated] += np.where(is_first, step, -step)
    is_rotated[rotated] = True
    return t, _Angles(of_rows(cos, 1.0), of_rows(sin, 0.0) * signs, other, is_rotated)


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


@_ignore_warnings
def rms_norm_rope(input: Tensor, cos: Tensor, sin: Tensor, *norm: Any, **options: Any) -> Bounded:
    t, angles = _angles(input, cos, sin, *norm, **options)
    return t.bounded(_turned(t.cast(_normed(t)), angles, t.compute))


@_ignore_warnings
def rms_norm_rope_backward(
    grad_output: Tensor, input: Tensor, cos: Tensor, sin: Tensor, *norm: Any, **options: Any
) -> tuple[Bounded, Bounded | None]:
    t, angles = _angles(input, cos, sin, *norm, **options)
    dy = t.cast(_turned(_exact(t.rows(grad_output)), angles, t.compute, back=True))
    # The two products may cancel, so their roundings count absolutely, not relative to their sum.
    # The columns before, in and behind the rotated range have separate sums, which are then added.
    grad_input = _grad_input(t, dy.value, dy_underflow=t.off(dy), dot_roundings=2)
    return t.bounded(grad_input), _grad_weight(t, dy, _normalized(t))


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
