"""Activations and their slopes, in float32 and float64."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl

# tl.exp is approximate on GPUs and flushes subnormal numbers. Here, x = n * ln(2) + r, with ln(2) in two parts: n times
# the first part is exact. The Taylor series of exp(r) ends below a tenth of a roundoff. 2^n is two factors, so that
# subnormal results are rounded once. n is in the low bits of a sum that is too large to have fractions.


@triton.jit
def _exp_of_negative(x, compute: tl.constexpr):
    """Returns exp(x) for x <= 0 and NaN, within two roundoffs."""
    if compute == tl.float64:
        x = tl.where(x < -746.0, -746.0, x)  # exp(-746) rounds to 0
        shifted = x * 1.4426950408889634 + 6755399441055744.0
        n = shifted - 6755399441055744.0
        r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10
        p = r * (1.0 / 6227020800) + 1.0 / 479001600
        p = p * r + 1.0 / 39916800
        p = p * r + 1.0 / 3628800
        p = p * r + 1.0 / 362880
        p = p * r + 1.0 / 40320
        p = p * r + 1.0 / 5040
        p = p * r + 1.0 / 720
        p = p * r + 1.0 / 120
        p = p * r + 1.0 / 24
        p = p * r + 1.0 / 6
        p = p * r + 0.5
        p = p * r + 1.0
        p = p * r + 1.0
        exponent = shifted.to(tl.int64, bitcast=True) - 0x4338000000000000
        half = exponent >> 1
        first = ((half + 1023) << 52).to(tl.float64, bitcast=True)
        second = ((exponent - half + 1023) << 52).to(tl.float64, bitcast=True)
        return p * first * second
    else:
        x = tl.where(x < -104.0, -104.0, x)
        shifted = x * 1.4426950408889634 + 12582912.0
        n = shifted - 12582912.0
        r = (x - n * 0.693359375) - n * -2.12194440e-4
        p = r * (1.0 / 5040) + 1.0 / 720
        p = p * r + 1.0 / 120
        p = p * r + 1.0 / 24
        p = p * r + 1.0 / 6
        p = p * r + 0.5
        p = p * r + 1.0
        p = p * r + 1.0
        exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000
        half = exponent >> 1
        first = ((half + 127) << 23).to(tl.float32, bitcast=True)
        second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
        return p * first * second


@triton.jit
def _reciprocal(x, compute: tl.constexpr):
    if compute == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def activate(gate, activation: tl.constexpr, compute: tl.constexpr):
    """Returns the activated gate and the slope of the activation."""
    e = _exp_of_negative(-tl.abs(gate), compute)
    larger = _reciprocal(1.0 + e, compute)
    smaller = e * larger
    sigmoid = tl.where(gate < 0.0, smaller, larger)
    complement = tl.where(gate < 0.0, larger, smaller)  # 1 - sigmoid without cancellation
    if activation == "silu":
        activated = gate * sigmoid
        return activated, sigmoid + activated * complement
    else:
        return sigmoid, sigmoid * complement
