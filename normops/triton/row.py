"""What kernels share: how they reach rows and weights, and what a row is multiplied by."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """The offsets of the first elements of ``rows``, in 64 bits, as a column: one to a line of a block."""
    return (rows // inner * outer_stride + rows % inner * inner_stride)[:, None]


@triton.jit
def nested_row_offsets(rows, middle, inner, outer_stride, middle_stride, inner_stride):
    """As row_offsets, in three dimensions. Rows in 32 bits are divided by fewer instructions."""
    outer = rows // inner
    last = rows - outer * inner
    first = outer // middle
    second = outer - first * middle
    offsets = first.to(tl.int64) * outer_stride + second.to(tl.int64) * middle_stride
    return (offsets + last.to(tl.int64) * inner_stride)[:, None]


@triton.jit
def part_of_row(first, part: tl.constexpr, parts: tl.constexpr, cols):
    """The columns of a row's part, and which of them are inside the row: all, unless it is the last part."""
    columns = part * first.shape[0] + first
    if part + 1 < parts:
        return columns, tl.full(columns.shape, True, tl.int1)
    else:
        return columns, columns < cols


@triton.jit
def load(pointer, offsets, mask, compute: tl.constexpr):
    """What is there, in the type to compute in; 0 where the mask has none."""
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(compute)


@triton.jit
def load_column(pointer, offsets, mask, compute: tl.constexpr):
    """As load, of a number for each row: in one dimension, or a thread would load it once for each of its columns."""
    rows: tl.constexpr = (offsets.shape[0],)
    return load(pointer, tl.reshape(offsets, rows), tl.reshape(mask, rows), compute)[:, None]


@triton.jit
def store(pointer, offsets, numbers, mask):
    """Stores numbers, rounded to the type of what is there."""
    tl.store(pointer + offsets, numbers.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """The numbers, rounded to a type; to their own, as they are."""
    return x.to(dtype).to(x.dtype)


@triton.jit
def load_scale(weight, columns, is_column, weight_offset: tl.constexpr, compute: tl.constexpr):
    """What these columns are multiplied by: the weight and its offset, or 1."""
    if weight is None:
        scale = tl.full(columns.shape, 1.0, compute)
    else:
        scale = load(weight, columns, is_column, compute)
        if weight_offset != 0.0:  # adding 0 would change the sign of a weight that is -0
            scale += weight_offset
    return scale


# eps and weight_offset are compile-time constants, as a float argument of a kernel is a float32, which float64 inputs
# would feel; models use one or two values of each.
@triton.jit
def rstd_of(square_sum, cols, eps: tl.constexpr, compute: tl.constexpr):
    """1 / sqrt(mean + eps), rounded to nearest at each step."""
    if compute == tl.float64:
        return 1.0 / tl.sqrt(square_sum / tl.cast(cols, tl.float64) + eps)
    else:  # without it, Triton would compile these lines for float64, too, and refuse to
        return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, tl.cast(cols, tl.float32)) + eps))


@triton.jit
def factors_of(squares, dots, cols, eps: tl.constexpr, compute: tl.constexpr):
    """rstd, and c = rstd^3 * mean(dy * w * x), of sums over a row."""
    rstd = rstd_of(squares, cols, eps, compute)
    return rstd, rstd * rstd * rstd * (dots / tl.cast(cols, compute))


# A rounding mode may round on the way to two types; else these are the type computed in, and nothing is rounded.
# `normalized` is the dtype that h * rstd, and the gradient of it, are rounded to.
@triton.jit
def apply_scale(h, rstd, scale, normalized: tl.constexpr):
    """h * rstd * scale"""
    return cast(h * rstd, normalized) * scale


@triton.jit
def apply_scale_backward(g, h, scale, factor, c, normalized: tl.constexpr):
    """g * factor * h, a term of grad_weight, and g * factor * scale - h * c, where factor is rstd."""
    if normalized == h.dtype:
        g *= factor
        return g * h, g * scale - h * c
    else:
        dw = cast(g * cast(h * factor, normalized), normalized)
        return dw, cast(g * scale, normalized) * factor - h * c
