"""The forward kernel of rms_norm, add_rms_norm, gated_rms_norm and the two steps (stats, from_stats) of rms_norm."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl

from normops.triton.activation import activate
from normops.triton.row import (
    apply_scale,
    load,
    load_column,
    load_scale,
    part_of_row,
    round_to,
    row_offsets,
    rstd_of,
    store,
)
from normops.triton.sums import sum_columns


@triton.jit
def _load_sum(
    x, residual, offsets, residual_offsets, mask,
    alpha: tl.constexpr, fuses: tl.constexpr, multiplied: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Returns the values to normalize: x, or alpha * x + residual, rounded to the residual's dtype."""
    h = load(x, offsets, mask, compute)
    if residual is not None:
        r = load(residual, residual_offsets, mask, compute)
        if alpha == 1.0:
            h += r
        elif fuses:
            h = tl.fma(h, tl.full(h.shape, alpha, compute), r)
        else:
            h = round_to(h * alpha, multiplied) + r
        h = h.to(residual.dtype.element_ty).to(compute)
    return h


@triton.jit
def _load_activated(gate, offsets, mask, activation: tl.constexpr, compute: tl.constexpr):
    activated, _ = activate(load(gate, offsets, mask, compute), activation, compute)
    return activated


@triton.jit
def forward_kernel(
    x, x_inner, x_outer_stride, x_inner_stride,
    residual, residual_inner, residual_outer_stride, residual_inner_stride,
    y, y_inner, y_outer_stride, y_inner_stride,
    residual_out, out_inner, out_outer_stride, out_inner_stride,
    weight, groups, rows, cols,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, threads: tl.constexpr,
    normalized: tl.constexpr, multiplied: tl.constexpr, overwrites_weight: tl.constexpr,
    gate=None, gate_inner=1, gate_outer_stride=0, gate_inner_stride=0,
    alpha: tl.constexpr = 1.0, fuses: tl.constexpr = True,
    activation: tl.constexpr = None, norm_before_gate: tl.constexpr = None,
    square_sum=None, square_sum_inner=1, square_sum_outer_stride=0, square_sum_inner_stride=0, size=None,
    bias=None, bias_inner=1, bias_outer_stride=0, bias_inner_stride=0,
):  # fmt: skip
    """Stores y = h * rstd * w, where h is x or alpha * x + residual. Row r uses the weight of group r % groups.

    An activated gate, never with a residual, multiplies y if norm_before_gate, else h. square_sum, with neither gate
    nor residual, is the sum over whole rows of `size` columns, of which this call has some. It is the only output if
    y is None, otherwise an input. A bias is added to y.
    """
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    row = (program // groups * block_rows + tl.arange(0, block_rows)) * groups + group
    if weight is not None:
        weight += group * cols
    if size is None:
        size = cols
    is_row = (row < rows)[:, None]
    x_offsets = row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
    residual_offsets = row_offsets(row, residual_inner, residual_outer_stride, residual_inner_stride)
    out_offsets = row_offsets(row, out_inner, out_outer_stride, out_inner_stride)
    y_offsets = row_offsets(row, y_inner, y_outer_stride, y_inner_stride)
    if gate is not None:
        gate_offsets = row_offsets(row, gate_inner, gate_outer_stride, gate_inner_stride)
    if square_sum is not None:
        sum_offsets = row_offsets(row, square_sum_inner, square_sum_outer_stride, square_sum_inner_stride)
    if bias is not None:
        bias_offsets = row_offsets(row, bias_inner, bias_outer_stride, bias_inner_stride)
    is_given: tl.constexpr = square_sum is not None and y is not None
    first = tl.arange(0, block_cols)

    if parts != 0:
        held = ()
        held_a = ()
        squares = tl.zeros((block_rows, block_cols), compute)
        for part in tl.static_range(parts):
            columns, is_column = part_of_row(first, part, parts, cols)
            columns, mask = columns[None, :], is_row & is_column[None, :]
            h = _load_sum(
                x, residual, x_offsets + columns, residual_offsets + columns, mask, alpha, fuses, multiplied, compute
            )
            if gate is not None:
                a = _load_activated(gate, gate_offsets + columns, mask, activation, compute)
                if norm_before_gate:
                    held_a += (a,)
                else:
                    h *= a
            held += (h,)
            squares += h * h
        if residual is not None:  # after all loads, as a load after a store would wait for it
            for part in tl.static_range(parts):
                columns, is_column = part_of_row(first, part, parts, cols)
                store(residual_out, out_offsets + columns[None, :], held[part], is_row & is_column[None, :])
    elif not is_given:
        squares = tl.zeros((block_rows, block_cols), compute)
        for start in range(0, tl.cast(cols, tl.int64), block_cols):
            columns = start + first[None, :]
            mask = is_row & (columns < cols)
            h = _load_sum(
                x, residual, x_offsets + columns, residual_offsets + columns, mask, alpha, fuses, multiplied, compute
            )
            if residual is not None:
                store(residual_out, out_offsets + columns, h, mask)
            if gate is not None and not norm_before_gate:
                a = _load_activated(gate, gate_offsets + columns, mask, activation, compute)
                h *= a
            squares += h * h
    squares = load_column(square_sum, sum_offsets, is_row, compute) if is_given else sum_columns(squares, threads)
    if y is None:
        store(square_sum, sum_offsets, squares, is_row)
    elif parts != 0:
        rstd = rstd_of(squares, size, eps, compute)
        for part in tl.static_range(parts):
            columns, is_column = part_of_row(first, part, parts, cols)
            scale = load_scale(weight, columns, is_column, weight_offset, compute)[None, :]
            if overwrites_weight:
                tl.debug_barrier()  # all threads read the weight before any overwrites it
            result = apply_scale(held[part], rstd, scale, normalized)
            if gate is not None and norm_before_gate:
                result = round_to(result, multiplied) * held_a[part]
            if bias is not None:
                result = round_to(result, multiplied) + load(
                    bias, bias_offsets + columns[None, :], is_row & is_column[None, :], compute
                )
            store(y, y_offsets + columns[None, :], result, is_row & is_column[None, :])
    else:
        rstd = rstd_of(squares, size, eps, compute)
        tl.debug_barrier()  # before threads read parts of residual_out that others wrote
        for start in range(0, tl.cast(cols, tl.int64), block_cols):
            columns = start + first[None, :]
            mask = is_row & (columns < cols)
            if residual is not None:
                h = load(residual_out, out_offsets + columns, mask, compute)
            else:
                h = load(x, x_offsets + columns, mask, compute)
            scale = load_scale(weight, start + first, start + first < cols, weight_offset, compute)[None, :]
            if gate is not None:
                a = _load_activated(gate, gate_offsets + columns, mask, activation, compute)
                if not norm_before_gate:
                    h *= a
            result = apply_scale(h, rstd, scale, normalized)
            if gate is not None and norm_before_gate:
                result = round_to(result, multiplied) * a
            if bias is not None:
                result = round_to(result, multiplied) + load(bias, bias_offsets + columns, mask, compute)
            store(y, y_offsets + columns, result, mask)
