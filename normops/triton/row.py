"""Functions that kernels share: offsets of rows, loads and stores, the scale and rstd."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """Returns the 64-bit offsets of the first elements of ``rows``, as a column: one for each line of a block."""
    return (rows // inner * outer_stride + rows % inner * inner_stride)[:, None]


@triton.jit
def nested_row_offsets(rows, middle, inner, outer_stride, middle_stride, inner_stride):
    """Returns offsets like row_offsets, in three dimensions. 32-bit ``rows`` take fewer instructions to divide."""
    outer = rows // inner
    last = rows - outer * inner
    first = outer // middle
    second = outer - first * middle
    offsets = first.to(tl.int64) * outer_stride + second.to(tl.int64) * middle_stride
    return (offsets + last.to(tl.int64) * inner_stride)[:, None]


@triton.jit
def part_of_row(first, part: tl.constexpr, parts: tl.constexpr, cols):
    """Returns the columns of a row's part, and which are inside the row: all, unless it is the last part."""
    columns = part * first.shape[0] + first
    if part + 1 < parts:
        return columns, tl.full(columns.shape, True, tl.int1)
    else:
        return columns, columns < cols


@triton.jit
def load(pointer, offsets, mask, compute: tl.constexpr):
    """Returns the elements in the compute type, and 0 for those outside the mask."""
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(compute)


@triton.jit
def load_column(pointer, offsets, mask, compute: tl.constexpr):
    """Loads one number for each row: in one dimension, or a thread would load it once for each of its columns."""
    rows: tl.constexpr = (offsets.shape[0],)
    return load(pointer, tl.reshape(offsets, rows), tl.reshape(mask, rows), compute)[:, None]


@triton.jit
def store(pointer, offsets, numbers, mask):
    """Stores numbers, rounded to the type of the tensor."""
    tl.store(pointer + offsets, numbers.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Returns x rounded to a type, but still in its original type."""
    return x.to(dtype).to(x.dtype)


@triton.jit
def load_scale(weight, columns, is_column, weight_offset: tl.constexpr, compute: tl.constexpr):
    """Returns the scale of these columns: the weight plus its offset, or 1 without a weight."""
    if weight is None:
        scale = tl.full(columns.shape, 1.0, compute)
    else:
        scale = load(weight, columns, is_column, compute)
        if weight_offset != 0.0:  # adding 0 would change the sign of a weight that is -0
            scale += weight_offset
    return scale


# eps and weight_offset are compile-time constants, as Triton passes float arguments as float32, which is too imprecise
# for float64 inputs. Models use one or two values of each.
@triton.jit
def rstd_of(square_sum, cols, eps: tl.constexpr, compute: tl.constexpr):
    """Returns 1 / sqrt(mean + eps), rounded to nearest at each step."""
    if compute == tl.float64:
        return 1.0 / tl.sqrt(square_sum / tl.cast(cols, tl.float64) + eps)
    else:  # without else, Triton would also compile this line for float64, and fail
        return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, tl.cast(cols, tl.float32)) + eps))


@triton.jit
def factors_of(squares, dots, cols, eps: tl.constexpr, compute: tl.constexpr):
    """Returns rstd, and c = rstd^3 * mean(dy * w * x), given the sums over a row."""
    rstd = rstd_of(squares, cols, eps, compute)
    return rstd, rstd * rstd * rstd * (dots / tl.cast(cols, compute))


# Some rounding modes round intermediate results to two dtypes, `normalized` and `multiplied`. With the compute type,
# nothing is rounded. `normalized` is the dtype to which h * rstd and its gradient are rounded.
@triton.jit
def apply_scale(h, rstd, scale, normalized: tl.constexpr):
    """Returns h * rstd * scale."""
    return round_to(h * rstd, normalized) * scale


@triton.jit
def apply_scale_backward(g, h, scale, factor, c, normalized: tl.constexpr):
    """Returns a term of grad_weight, g * factor * h, and grad_input, g * factor * scale - h * c; factor is rstd."""
    if normalized == h.dtype:
        g *= factor
        return g * h, g * scale - h * c
    else:
        dw = round_to(g * round_to(h * factor, normalized), normalized)
        return dw, round_to(g * scale, normalized) * factor - h * c
