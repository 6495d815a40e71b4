"""Implements PTX arithmetic on numpy arrays and scalars; generated code calls these functions by name."""

from fractions import Fraction
from typing import Any

import numpy as np

Array = Any


def merge(mask: Any, new: Array, old: Array) -> Array:
    """Returns ``new`` in the threads that execute, and ``old`` in the others."""
    if mask is None:
        return new
    if new.ndim == 0 and old.ndim == 0 and new == old:
        return new
    return np.where(mask.bits, new, old)


def select(predicate: Array, a: Array, b: Array) -> Array:
    if predicate.ndim == 0:
        return a if predicate else b
    return np.where(predicate, a, b)


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Computes a * b + c, rounded once; the product is exact in float64.

    Rounding the sum to float64 first only matters halfway between two float32, and for subnormal results.
    """
    product, c = a.astype("f8") * b.astype("f8"), c.astype("f8")
    total = product + c
    in_doubt = (total.view("i8") & 0x1FFFFFFF == 0x10000000) | ((np.abs(total) < 2.0**-125) & (total != 0))
    if np.any(in_doubt):
        total = _to_odd(*_two_sum(product, c))
    return total.astype("f4")


def _to_odd(nearest: Array, error: Array) -> Array:
    """Rounds ``nearest`` + ``error`` to odd, so that rounding it again to fewer bits is correct."""
    bits = np.atleast_1d(nearest).view(f"i{nearest.itemsize}")
    is_even = (error != 0) & (bits & 1 == 0) & np.isfinite(nearest)
    away = (error > 0) == (nearest > 0)
    odd = np.where(is_even, np.where(away, bits + 1, bits - 1), bits).view(nearest.dtype)
    return odd if nearest.ndim else odd[0]


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the product and its rounding error, by Dekker's algorithm."""
    split = 134217729.0
    product = a * b
    t, u = a * split, b * split
    a_high, b_high = t - (t - a), u - (u - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """Computes a * b + c, rounded once (Boldo and Melquiond): adds the two small parts with rounding to odd."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    inner, inner_low = _two_sum(c, low)
    top, top_low = _two_sum(high, inner)
    result = top + _to_odd(*_two_sum(inner_low, top_low))
    is_ordinary = (a != 0) & (b != 0) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    result = np.array(np.where(is_ordinary, result, a * b + c))
    # Outside the range of exponents in which that holds, elements are computed one by one.
    is_safe = (np.abs(high) < 2.0**960) & (np.abs(high) > 2.0**-900)
    for operand in (a, b, c):
        is_safe = is_safe & (np.abs(operand) < 2.0**960)
    for at in np.argwhere(is_ordinary & ~is_safe):
        place = tuple(at)
        x, y, z = (float(operand[place]) for operand in (a, b, c))
        total = Fraction(x) * Fraction(y) + Fraction(z)
        result[place] = float(total) if abs(total) < 2**1024 else x * y + z
    return result[()]


def int_division(a: Array, b: Array) -> Array:
    """Divides, rounding towards zero."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // safe
    quotient = np.abs(a) // np.abs(safe)
    return np.where((a < 0) != (safe < 0), -quotient, quotient)


def shl(x: Array, amount: Array) -> Array:
    width = 8 * x.dtype.itemsize
    return np.where(amount < width, x << np.minimum(amount, width - 1).astype(x.dtype), x.dtype.type(0))


def shr(x: Array, amount: Array) -> Array:
    width = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(amount, width - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(amount < width, shifted, x.dtype.type(0))


def bit_field(x: Array, position: Array, length: Array) -> Array:
    """Extracts a bit field inside ``x``, sign-extended if ``x`` is signed."""
    return shr(shl(x, np.uint32(32) - position - length), np.uint32(32) - length)


def permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Selects bytes of ``a`` (0 to 3) and ``b`` (4 to 7) by the selector's hexadecimal digits, lowest first."""
    both = a.astype("u8") | b.astype("u8") << np.uint64(32)
    result = np.zeros_like(a)
    for byte in range(4):
        chosen = selector >> np.uint32(4 * byte) & np.uint32(7)
        found = both >> (chosen.astype("u8") * np.uint64(8)) & np.uint64(0xFF)
        result |= found.astype("u4") << np.uint32(8 * byte)
    return result


def bf16_of_f32(x: Array) -> Array:
    bits = x.view("u4")
    rounding = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(x == x, ((bits + rounding) >> np.uint32(16)).astype("u2"), np.uint16(0x7FFF))


def f32_of_bf16(bits: Array) -> Array:
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def pair_of(low: Array, high: Array, kind: str) -> Array:
    if kind == "bf16":
        a, b = bf16_of_f32(low), bf16_of_f32(high)
    else:
        a, b = low.astype("f2").view("u2"), high.astype("f2").view("u2")
    return a.astype("u4") | (b.astype("u4") << np.uint32(16))


def half_as_f32(x: Array, number: int, kind: str) -> Array:
    """Returns the lower (0) or upper (1) number of a pair, or a single number, as float32."""
    if x.dtype == np.float16:
        return x.astype("f4")
    half = (x >> x.dtype.type(16 * number)).astype("u2") if x.dtype.itemsize == 4 else x
    return f32_of_bf16(half) if kind == "bf16" else half.view("f2").astype("f4")


def halves(operation: str, kind: str, is_pair: bool, *operands: Array) -> Array:
    """Computes in float64, exactly or rounded to odd, and then rounds once."""
    results = []
    for number in range(2 if is_pair else 1):
        a, b, c = ([half_as_f32(x, number, kind).astype("f8") for x in operands] + [np.float64(0)] * 2)[:3]
        if operation == "fma":
            exact = _to_odd(*_two_sum(a * b, c))
        else:
            exact = {"add": a + b, "sub": a - b, "mul": a * b, "abs": np.abs(a)}[operation]
        nearest = exact.astype("f4")
        results.append(_to_odd(nearest, exact - nearest))
    if is_pair:
        return pair_of(results[0], results[1], kind)
    return bf16_of_f32(results[0]) if kind == "bf16" else results[0].astype("f2")


HELPERS = {
    function.__name__: function
    for function in (
        merge,
        select,
        fma_f32,
        fma_f64,
        int_division,
        shl,
        shr,
        bit_field,
        permuted_bytes,
        bf16_of_f32,
        f32_of_bf16,
        pair_of,
        half_as_f32,
        halves,
    )
}
