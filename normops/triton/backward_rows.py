"""The backward kernel of rms_norm, add_rms_norm, gated_rms_norm and the two steps (stats, from_stats) of rms_norm."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl

from normops.triton.activation import activate
from normops.triton.row import (
    apply_scale,
    apply_scale_backward,
    factors_of,
    load,
    load_column,
    load_scale,
    part_of_row,
    round_to,
    row_offsets,
    store,
)
from normops.triton.sums import sum_columns, sum_rows


@triton.jit
def _load_gated(
    h, g, gate, offsets, mask,
    activation: tl.constexpr, norm_before_gate: tl.constexpr, multiplied: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Converts h and g, the operator's input and gradient, to those of its norm.

    Also returns the activated gate and the gate's slope, multiplied by g if norm_before_gate, else by h.
    """
    a, slope = activate(load(gate, offsets, mask, compute), activation, compute)
    if norm_before_gate:
        return h, round_to(g * a, multiplied), a, g * slope
    else:
        return h * a, g, a, h * slope


@triton.jit
def _store_gated(
    dx, dx_offsets, dgate, dgate_offsets, dh, normalized, a, slope, mask, norm_before_gate: tl.constexpr
):  # fmt: skip
    """Stores dx and dgate, given dh, the gradient of the norm's input."""
    if dgate is not None:
        if norm_before_gate:
            store(dgate, dgate_offsets, slope * normalized, mask)
        else:
            store(dgate, dgate_offsets, slope * dh, mask)
    if dx is not None:
        if norm_before_gate:
            store(dx, dx_offsets, dh, mask)
        else:
            store(dx, dx_offsets, dh * a, mask)


@triton.jit
def backward_kernel(
    dy, dy_inner, dy_outer_stride, dy_inner_stride,
    x, x_inner, x_outer_stride, x_inner_stride,
    residual, residual_inner, residual_outer_stride, residual_inner_stride,
    dx, dx_inner, dx_outer_stride, dx_inner_stride,
    weight, partials, groups, rows, cols,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, threads: tl.constexpr,
    normalized: tl.constexpr, multiplied: tl.constexpr, overwrites_weight: tl.constexpr,
    gate=None, gate_inner=1, gate_outer_stride=0, gate_inner_stride=0,
    dgate=None, dgate_inner=1, dgate_outer_stride=0, dgate_inner_stride=0,
    activation: tl.constexpr = None, norm_before_gate: tl.constexpr = None,
    square_sum=None, square_sum_inner=1, square_sum_outer_stride=0, square_sum_inner_stride=0,
    dot=None, dot_inner=1, dot_outer_stride=0, dot_inner_stride=0, size=None,
):  # fmt: skip
    """Stores dx = dy * rstd * w - x * c + residual, and this program's part of dw = sum of dy * rstd * x.

    An activated gate a, never with a residual, replaces dy by dy * a if norm_before_gate, else x by x * a. square_sum
    and dot, never with a gate, are sums over whole rows of `size` columns, of which this call has some. They are
    outputs if there is no other, otherwise inputs.
    """
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    if weight is not None:
        weight += group * cols
    if size is None:
        size = cols
    writes_sums: tl.constexpr = dx is None and dgate is None and partials is None
    is_given: tl.constexpr = square_sum is not None and not writes_sums
    first = tl.arange(0, block_cols)
    partial = partials
    if partials is not None:
        partial += program * cols
    if parts != 0:
        dw = ()
        for _ in tl.static_range(parts):
            dw += (tl.zeros((block_rows, block_cols), compute),)
    if parts == 1:
        scale = load_scale(weight, first, first < cols, weight_offset, compute)[None, :]
        if overwrites_weight:
            tl.debug_barrier()  # all threads read the weight before any overwrites it
    # Indices have 64 bits, as the last step would overflow 32 bits with nearly 2^31 rows.
    for start_sample in range(
        program // groups * block_rows, rows // groups, tl.num_programs(0) // groups * block_rows
    ):
        row = (start_sample + tl.arange(0, block_rows)) * groups + group
        is_row = (row < rows)[:, None]
        dy_offsets = row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
        x_offsets = row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
        residual_offsets = row_offsets(row, residual_inner, residual_outer_stride, residual_inner_stride)
        dx_offsets = row_offsets(row, dx_inner, dx_outer_stride, dx_inner_stride)
        if gate is not None:
            gate_offsets = row_offsets(row, gate_inner, gate_outer_stride, gate_inner_stride)
            dgate_offsets = row_offsets(row, dgate_inner, dgate_outer_stride, dgate_inner_stride)
        if square_sum is not None:
            square_sum_offsets = row_offsets(row, square_sum_inner, square_sum_outer_stride, square_sum_inner_stride)
            dot_offsets = row_offsets(row, dot_inner, dot_outer_stride, dot_inner_stride)
        if parts != 0:
            held_h = ()
            held_g = ()
            squares = tl.zeros((block_rows, block_cols), compute)
            dots = tl.zeros((block_rows, block_cols), compute)
            for part in tl.static_range(parts):
                columns, is_column = part_of_row(first, part, parts, cols)
                mask = is_row & is_column[None, :]
                h = load(x, x_offsets + columns[None, :], mask, compute)
                g = load(dy, dy_offsets + columns[None, :], mask, compute)
                held_h += (h,)
                held_g += (g,)
                if gate is not None:
                    h, g, a, slope = _load_gated(
                        h, g, gate, gate_offsets + columns[None, :], mask,
                        activation, norm_before_gate, multiplied, compute,
                    )  # fmt: skip
                if parts > 1:
                    scale = load_scale(weight, columns, is_column, weight_offset, compute)[None, :]
                squares += h * h
                dots += round_to(g * scale, normalized) * h
        elif not is_given:
            squares = tl.zeros((block_rows, block_cols), compute)
            dots = tl.zeros((block_rows, block_cols), compute)
            for start in range(0, tl.cast(cols, tl.int64), block_cols):
                columns = start + first[None, :]
                mask = is_row & (columns < cols)
                h = load(x, x_offsets + columns, mask, compute)
                g = load(dy, dy_offsets + columns, mask, compute)
                if gate is not None:
                    h, g, _, _ = _load_gated(
                        h, g, gate, gate_offsets + columns, mask, activation, norm_before_gate, multiplied, compute
                    )
                scale = load_scale(weight, start + first, start + first < cols, weight_offset, compute)[None, :]
                squares += h * h
                dots += round_to(g * scale, normalized) * h
        if is_given:
            squares = load_column(square_sum, square_sum_offsets, is_row, compute)
            dots = load_column(dot, dot_offsets, is_row, compute)
        else:
            squares, dots = sum_columns(squares, threads), sum_columns(dots, threads)
        if writes_sums:
            store(square_sum, square_sum_offsets, squares, is_row)
            store(dot, dot_offsets, dots, is_row)
        elif parts != 0:
            rstd, c = factors_of(squares, dots, size, eps, compute)
            if parts > 1:
                tl.debug_barrier()  # otherwise Triton keeps the scale and the gate in registers
            dw_so_far = dw
            dw = ()
            for part in tl.static_range(parts):
                columns, is_column = part_of_row(first, part, parts, cols)
                mask = is_row & is_column[None, :]
                h = held_h[part]
                g = held_g[part]
                if gate is not None:
                    h, g, a, slope = _load_gated(
                        h, g, gate, gate_offsets + columns[None, :], mask,
                        activation, norm_before_gate, multiplied, compute,
                    )  # fmt: skip
                if parts > 1:
                    scale = load_scale(weight, columns, is_column, weight_offset, compute)[None, :]
                # Rows past the last one have an infinite rstd if eps is 0, which would make NaNs.
                term, result = apply_scale_backward(g, h, scale, tl.where(is_row, rstd, 0.0), c, normalized)
                dw += (dw_so_far[part] + term,)
                if dx is not None or dgate is not None:
                    if residual is not None:
                        result += load(residual, residual_offsets + columns[None, :], mask, compute)
                    if gate is not None:
                        _store_gated(
                            dx, dx_offsets + columns[None, :], dgate, dgate_offsets + columns[None, :],
                            result, round_to(apply_scale(h, rstd, scale, normalized), multiplied), a, slope, mask,
                            norm_before_gate,
                        )  # fmt: skip
                    else:
                        store(dx, dx_offsets + columns[None, :], result, mask)
        else:
            rstd, c = factors_of(squares, dots, size, eps, compute)
            for start in range(0, tl.cast(cols, tl.int64), block_cols):
                columns = start + first[None, :]
                mask = is_row & (columns < cols)
                h = load(x, x_offsets + columns, mask, compute)
                g = load(dy, dy_offsets + columns, mask, compute)
                if gate is not None:
                    h, g, a, slope = _load_gated(
                        h, g, gate, gate_offsets + columns, mask, activation, norm_before_gate, multiplied, compute
                    )
                scale = load_scale(weight, start + first, start + first < cols, weight_offset, compute)[None, :]
                term, result = apply_scale_backward(g, h, scale, rstd, c, normalized)
                if dx is not None or dgate is not None:
                    if residual is not None:
                        result += load(residual, residual_offsets + columns, mask, compute)
                    if gate is not None:
                        _store_gated(
                            dx, dx_offsets + columns, dgate, dgate_offsets + columns,
                            result, round_to(apply_scale(h, rstd, scale, normalized), multiplied), a, slope, mask,
                            norm_before_gate,
                        )  # fmt: skip
                    else:
                        store(dx, dx_offsets + columns, result, mask)
                if partials is not None:
                    # The sum is accumulated in memory, as it is too wide for the registers of a program.
                    is_column = start + first < cols
                    is_added = is_column & (row != program)  # the first row is ``program``, as block_rows is 1
                    sum_so_far = tl.load(partial + start + first, mask=is_added, other=0.0)
                    tl.store(partial + start + first, sum_so_far + sum_rows(term), mask=is_column)
            tl.debug_barrier()  # before the next row loads the sums so far
    if parts != 0 and partials is not None:
        for part in tl.static_range(parts):
            columns, is_column = part_of_row(first, part, parts, cols)
            tl.store(partial + columns, sum_rows(dw[part]), mask=is_column)
