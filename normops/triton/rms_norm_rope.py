"""The Triton kernels of rms_norm_rope and rms_norm_rope_backward, and their launchers.

One block has the first columns of the pairs, another the second columns, in the same places, so that a thread holds
both columns of a pair. Columns that are not rotated are in blocks of the same shape. Triton would convert the layout of
a whole block of another shape to combine it with values of a row, such as rstd.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl
from torch import Tensor

from normops.triton.launch import (
    NestedRows,
    Rotation,
    Rounding,
    compute_type,
    index_type,
    is_overwritten,
    make_partials,
    nested_arguments,
    options,
    rotation_arguments,
    rotation_constants,
    rounding_constants,
)
from normops.triton.launch_config import backward_programs, rope_config
from normops.triton.row import (
    apply_scale,
    apply_scale_backward,
    factors_of,
    load,
    load_scale,
    nested_row_offsets,
    round_to,
    rstd_of,
    store,
)
from normops.triton.sums import sum_columns, sum_rows


@triton.jit
def _load_pairs(
    pointer, offsets, start, is_row,
    pairs: tl.constexpr, block: tl.constexpr, interleaved: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Returns the first columns of ``block`` pairs from ``start`` on, and their second columns."""
    if interleaved:
        columns = 2 * start + tl.arange(0, 2 * block)[None, :]
        both = load(pointer, offsets + columns, is_row & (columns < 2 * pairs), compute)
        first, second = tl.split(tl.reshape(both, (both.shape[0], block, 2)))
    else:
        columns = start + tl.arange(0, block)[None, :]
        mask = is_row & (columns < pairs)
        first = load(pointer, offsets + columns, mask, compute)
        second = load(pointer, offsets + pairs + columns, mask, compute)
    return first, second


@triton.jit
def _store_pairs(
    pointer, offsets, start, is_row, first, second, pairs: tl.constexpr, interleaved: tl.constexpr
):  # fmt: skip
    block: tl.constexpr = first.shape[1]
    if interleaved:
        columns = 2 * start + tl.arange(0, 2 * block)[None, :]
        store(pointer, offsets + columns, tl.interleave(first, second), is_row & (columns < 2 * pairs))
    else:
        columns = start + tl.arange(0, block)[None, :]
        mask = is_row & (columns < pairs)
        store(pointer, offsets + columns, first, mask)
        store(pointer, offsets + pairs + columns, second, mask)


@triton.jit
def _load_angles(
    table, offsets, start, is_row,
    pairs: tl.constexpr, block: tl.constexpr,
    interleaved: tl.constexpr, angle_of_pair: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Returns a row of cos or sin, for the first columns of pairs and for the second columns."""
    if angle_of_pair:
        columns = start + tl.arange(0, block)[None, :]
        first = load(table, offsets + columns, is_row & (columns < pairs), compute)
        return first, first
    else:
        return _load_pairs(table, offsets, start, is_row, pairs, block, interleaved, compute)


@triton.jit
def _load_scale_of_pairs(
    weight, start, is_row, weight_offset: tl.constexpr,
    pairs: tl.constexpr, block: tl.constexpr, interleaved: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Returns the scales of pairs, the same for each row. ``weight`` starts at the first column that is rotated."""
    if weight is None:
        first = tl.full((is_row.shape[0], block), 1.0, compute)
        return first, first
    else:
        offsets = tl.zeros(is_row.shape, tl.int32)
        first, second = _load_pairs(weight, offsets, start, is_row, pairs, block, interleaved, compute)
        if weight_offset != 0.0:
            first += weight_offset
            second += weight_offset
        return first, second


@triton.jit
def _rest(start, block: tl.constexpr, cols: tl.constexpr, offset: tl.constexpr, pairs: tl.constexpr):
    """Returns ``block`` columns that are not rotated, from the ``start``-th one on, and which of them exist."""
    columns = start + tl.arange(0, block)[None, :]
    is_column = columns < cols - 2 * pairs
    if offset == 0:
        columns += 2 * pairs
    elif offset + 2 * pairs < cols:
        columns += tl.where(columns < offset, 0, 2 * pairs)
    return columns, is_column


@triton.jit
def _load_rotated_back(
    dy, offsets, cos, sin, angles, start, is_row,
    pairs: tl.constexpr, block: tl.constexpr,
    interleaved: tl.constexpr, angle_of_pair: tl.constexpr, multiplied: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    g1, g2 = _load_pairs(dy, offsets, start, is_row, pairs, block, interleaved, compute)
    c1, c2 = _load_angles(cos, angles, start, is_row, pairs, block, interleaved, angle_of_pair, compute)
    s1, s2 = _load_angles(sin, angles, start, is_row, pairs, block, interleaved, angle_of_pair, compute)
    return round_to(g1 * c1 + g2 * s2, multiplied), round_to(g2 * c2 - g1 * s1, multiplied)


@triton.jit
def rope_forward_kernel(
    x, x_middle, x_inner, x_outer_stride, x_middle_stride, x_inner_stride,
    y, y_middle, y_inner, y_outer_stride, y_middle_stride, y_inner_stride,
    cos, sin, table_middle, table_inner, table_outer_stride, table_middle_stride, table_inner_stride,
    weight, groups, rows,
    cols: tl.constexpr, offset: tl.constexpr, pairs: tl.constexpr,
    interleaved: tl.constexpr, angle_of_pair: tl.constexpr,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr, index: tl.constexpr,
    normalized: tl.constexpr, multiplied: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, rest_parts: tl.constexpr,
    threads: tl.constexpr,
):  # fmt: skip
    """Stores y = x * rstd * w, with 2 * pairs columns from ``offset`` on rotated."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    row = (program // groups * block_rows + tl.arange(0, block_rows)) * groups + group
    rotated_weight = None
    if weight is not None:
        weight += group * cols
        rotated_weight = weight + offset
    is_row = (row < rows)[:, None]
    row = row.to(index)
    x_offsets = nested_row_offsets(row, x_middle, x_inner, x_outer_stride, x_middle_stride, x_inner_stride)
    y_offsets = nested_row_offsets(row, y_middle, y_inner, y_outer_stride, y_middle_stride, y_inner_stride)
    angles = nested_row_offsets(
        row, table_middle, table_inner, table_outer_stride, table_middle_stride, table_inner_stride
    )

    if parts != 0:
        h1, h2 = _load_pairs(x + offset, x_offsets, 0, is_row, pairs, block_cols, interleaved, compute)
        c1, c2 = _load_angles(cos, angles, 0, is_row, pairs, block_cols, interleaved, angle_of_pair, compute)
        s1, s2 = _load_angles(sin, angles, 0, is_row, pairs, block_cols, interleaved, angle_of_pair, compute)
        w1, w2 = _load_scale_of_pairs(rotated_weight, 0, is_row, weight_offset, pairs, block_cols, interleaved, compute)
        squares = h1 * h1 + h2 * h2
        held = ()
        for part in tl.static_range(rest_parts):
            columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
            h = load(x, x_offsets + columns, is_row & is_column, compute)
            held += (h,)
            squares += h * h
        rstd = rstd_of(sum_columns(squares, threads), cols, eps, compute)
        u1 = round_to(apply_scale(h1, rstd, w1, normalized), multiplied)
        u2 = round_to(apply_scale(h2, rstd, w2, normalized), multiplied)
        _store_pairs(y + offset, y_offsets, 0, is_row, u1 * c1 - u2 * s1, u2 * c2 + u1 * s2, pairs, interleaved)
        for part in tl.static_range(rest_parts):
            columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
            of_rows = tl.broadcast_to(columns, (block_rows, block_cols))  # like _load_scale_of_pairs
            w = load_scale(weight, of_rows, is_row & is_column, weight_offset, compute)
            store(y, y_offsets + columns, apply_scale(held[part], rstd, w, normalized), is_row & is_column)
    else:
        squares = tl.zeros((block_rows, block_cols), compute)
        for start in range(0, tl.cast(pairs, tl.int64), block_cols):
            h1, h2 = _load_pairs(x + offset, x_offsets, start, is_row, pairs, block_cols, interleaved, compute)
            squares += h1 * h1 + h2 * h2
        for start in range(0, tl.cast(cols - 2 * pairs, tl.int64), block_cols):
            columns, is_column = _rest(start, block_cols, cols, offset, pairs)
            h = load(x, x_offsets + columns, is_row & is_column, compute)
            squares += h * h
        rstd = rstd_of(sum_columns(squares, threads), cols, eps, compute)
        for start in range(0, tl.cast(pairs, tl.int64), block_cols):
            h1, h2 = _load_pairs(x + offset, x_offsets, start, is_row, pairs, block_cols, interleaved, compute)
            c1, c2 = _load_angles(cos, angles, start, is_row, pairs, block_cols, interleaved, angle_of_pair, compute)
            s1, s2 = _load_angles(sin, angles, start, is_row, pairs, block_cols, interleaved, angle_of_pair, compute)
            w1, w2 = _load_scale_of_pairs(
                rotated_weight, start, is_row, weight_offset, pairs, block_cols, interleaved, compute
            )
            u1 = round_to(apply_scale(h1, rstd, w1, normalized), multiplied)
            u2 = round_to(apply_scale(h2, rstd, w2, normalized), multiplied)
            _store_pairs(y + offset, y_offsets, start, is_row, u1 * c1 - u2 * s1, u2 * c2 + u1 * s2, pairs, interleaved)
        for start in range(0, tl.cast(cols - 2 * pairs, tl.int64), block_cols):
            columns, is_column = _rest(start, block_cols, cols, offset, pairs)
            h = load(x, x_offsets + columns, is_row & is_column, compute)
            w = load_scale(weight, columns, is_column, weight_offset, compute)
            store(y, y_offsets + columns, apply_scale(h, rstd, w, normalized), is_row & is_column)


@triton.jit
def _in_any_layout(x):
    """Returns a column unchanged, but stops Triton from propagating its layout. Otherwise, with more than two blocks to
    multiply, a thread would hold a whole row of each block, and spill most of it.
    """
    return tl.gather(x, tl.zeros(x.shape, tl.int32), 1)


@triton.jit
def rope_backward_kernel(
    dy, dy_middle, dy_inner, dy_outer_stride, dy_middle_stride, dy_inner_stride,
    x, x_middle, x_inner, x_outer_stride, x_middle_stride, x_inner_stride,
    dx, dx_middle, dx_inner, dx_outer_stride, dx_middle_stride, dx_inner_stride,
    cos, sin, table_middle, table_inner, table_outer_stride, table_middle_stride, table_inner_stride,
    weight, partials, groups, rows,
    cols: tl.constexpr, offset: tl.constexpr, pairs: tl.constexpr,
    interleaved: tl.constexpr, angle_of_pair: tl.constexpr,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr, index: tl.constexpr,
    normalized: tl.constexpr, multiplied: tl.constexpr, overwrites_weight: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, rest_parts: tl.constexpr,
    threads: tl.constexpr,
):  # fmt: skip
    """Stores dx = g * rstd * w - x * c, and this program's part of dw = sum of g * rstd * x; g is dy rotated back."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    rotated_weight = None
    if weight is not None:
        weight += group * cols
        rotated_weight = weight + offset
    partial = partials
    if partials is not None:
        partial += program * cols
    one_row = tl.full((1, 1), True, tl.int1)
    if parts != 0:
        each_row = tl.full((block_rows, 1), True, tl.int1)
        w1, w2 = _load_scale_of_pairs(
            rotated_weight, 0, each_row, weight_offset, pairs, block_cols, interleaved, compute
        )
        dw1 = tl.zeros((block_rows, block_cols), compute)
        dw2 = tl.zeros((block_rows, block_cols), compute)
        w = ()
        dw = ()
        for part in tl.static_range(rest_parts):
            columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
            of_rows = tl.broadcast_to(columns, (block_rows, block_cols))
            w += (load_scale(weight, of_rows, each_row & is_column, weight_offset, compute),)
            dw += (tl.zeros((block_rows, block_cols), compute),)
        if overwrites_weight:
            tl.debug_barrier()  # all threads read the weight before any overwrites it
    for start_sample in range(
        program // groups * block_rows, rows // groups, tl.num_programs(0) // groups * block_rows
    ):
        row = (start_sample + tl.arange(0, block_rows)) * groups + group
        is_row = (row < rows)[:, None]
        is_added = (row != program)[:, None]
        row = row.to(index)
        dy_offsets = nested_row_offsets(row, dy_middle, dy_inner, dy_outer_stride, dy_middle_stride, dy_inner_stride)
        x_offsets = nested_row_offsets(row, x_middle, x_inner, x_outer_stride, x_middle_stride, x_inner_stride)
        dx_offsets = nested_row_offsets(row, dx_middle, dx_inner, dx_outer_stride, dx_middle_stride, dx_inner_stride)
        angles = nested_row_offsets(
            row, table_middle, table_inner, table_outer_stride, table_middle_stride, table_inner_stride
        )
        if parts != 0:
            h1, h2 = _load_pairs(x + offset, x_offsets, 0, is_row, pairs, block_cols, interleaved, compute)
            g1, g2 = _load_rotated_back(
                dy + offset, dy_offsets, cos, sin, angles, 0, is_row,
                pairs, block_cols, interleaved, angle_of_pair, multiplied, compute,
            )  # fmt: skip
            squares = h1 * h1 + h2 * h2
            dots = round_to(g1 * w1, normalized) * h1 + round_to(g2 * w2, normalized) * h2
            held_h = ()
            held_g = ()
            for part in tl.static_range(rest_parts):
                columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
                h = load(x, x_offsets + columns, is_row & is_column, compute)
                g = load(dy, dy_offsets + columns, is_row & is_column, compute)
                held_h += (h,)
                held_g += (g,)
                squares += h * h
                dots += round_to(g * w[part], normalized) * h
            squares, dots = sum_columns(squares, threads), sum_columns(dots, threads)
            rstd, c = factors_of(squares, dots, cols, eps, compute)
            if rest_parts > 0:
                rstd, c = _in_any_layout(rstd), _in_any_layout(c)
            # Rows past the last one have an infinite rstd if eps is 0, which would make NaNs.
            factor = tl.where(is_row, rstd, 0.0)
            term1, dx1 = apply_scale_backward(g1, h1, w1, factor, c, normalized)
            term2, dx2 = apply_scale_backward(g2, h2, w2, factor, c, normalized)
            dw1 += term1
            dw2 += term2
            if dx is not None:
                _store_pairs(dx + offset, dx_offsets, 0, is_row, dx1, dx2, pairs, interleaved)
            dw_so_far = dw
            dw = ()
            for part in tl.static_range(rest_parts):
                columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
                term, of_x = apply_scale_backward(held_g[part], held_h[part], w[part], factor, c, normalized)
                dw += (dw_so_far[part] + term,)
                if dx is not None:
                    store(dx, dx_offsets + columns, of_x, is_row & is_column)
        else:
            squares = tl.zeros((block_rows, block_cols), compute)
            dots = tl.zeros((block_rows, block_cols), compute)
            for start in range(0, tl.cast(pairs, tl.int64), block_cols):
                h1, h2 = _load_pairs(x + offset, x_offsets, start, is_row, pairs, block_cols, interleaved, compute)
                g1, g2 = _load_rotated_back(
                    dy + offset, dy_offsets, cos, sin, angles, start, is_row,
                    pairs, block_cols, interleaved, angle_of_pair, multiplied, compute,
                )  # fmt: skip
                w1, w2 = _load_scale_of_pairs(
                    rotated_weight, start, is_row, weight_offset, pairs, block_cols, interleaved, compute
                )
                squares += h1 * h1 + h2 * h2
                dots += round_to(g1 * w1, normalized) * h1 + round_to(g2 * w2, normalized) * h2
            for start in range(0, tl.cast(cols - 2 * pairs, tl.int64), block_cols):
                columns, is_column = _rest(start, block_cols, cols, offset, pairs)
                h = load(x, x_offsets + columns, is_row & is_column, compute)
                g = load(dy, dy_offsets + columns, is_row & is_column, compute)
                w = load_scale(weight, columns, is_column, weight_offset, compute)
                squares += h * h
                dots += round_to(g * w, normalized) * h
            squares, dots = sum_columns(squares, threads), sum_columns(dots, threads)
            rstd, c = factors_of(squares, dots, cols, eps, compute)
            for start in range(0, tl.cast(pairs, tl.int64), block_cols):
                h1, h2 = _load_pairs(x + offset, x_offsets, start, is_row, pairs, block_cols, interleaved, compute)
                g1, g2 = _load_rotated_back(
                    dy + offset, dy_offsets, cos, sin, angles, start, is_row,
                    pairs, block_cols, interleaved, angle_of_pair, multiplied, compute,
                )  # fmt: skip
                w1, w2 = _load_scale_of_pairs(
                    rotated_weight, start, is_row, weight_offset, pairs, block_cols, interleaved, compute
                )
                term1, dx1 = apply_scale_backward(g1, h1, w1, rstd, c, normalized)
                term2, dx2 = apply_scale_backward(g2, h2, w2, rstd, c, normalized)
                if dx is not None:
                    _store_pairs(dx + offset, dx_offsets, start, is_row, dx1, dx2, pairs, interleaved)
                if partials is not None:
                    # The sum is accumulated in memory, as it is too wide for the registers of a program.
                    dw1, dw2 = _load_pairs(
                        partial + offset, 0, start, is_added, pairs, block_cols, interleaved, compute
                    )
                    dw1, dw2 = dw1 + term1, dw2 + term2
                    _store_pairs(partial + offset, 0, start, is_row, dw1, dw2, pairs, interleaved)
            for start in range(0, tl.cast(cols - 2 * pairs, tl.int64), block_cols):
                columns, is_column = _rest(start, block_cols, cols, offset, pairs)
                h = load(x, x_offsets + columns, is_row & is_column, compute)
                g = load(dy, dy_offsets + columns, is_row & is_column, compute)
                w = load_scale(weight, columns, is_column, weight_offset, compute)
                term, of_x = apply_scale_backward(g, h, w, rstd, c, normalized)
                if dx is not None:
                    store(dx, dx_offsets + columns, of_x, is_row & is_column)
                if partials is not None:
                    dw = load(partial, columns, is_added & is_column, compute)
                    store(partial, columns, dw + term, is_column)
            tl.debug_barrier()  # before the next row loads the sums so far
    if parts != 0 and partials is not None:
        dw1, dw2 = sum_rows(dw1)[None, :], sum_rows(dw2)[None, :]
        _store_pairs(partial + offset, 0, 0, one_row, dw1, dw2, pairs, interleaved)
        for part in tl.static_range(rest_parts):
            columns, is_column = _rest(part * block_cols, block_cols, cols, offset, pairs)
            store(partial, columns, sum_rows(dw[part])[None, :], is_column)


def launch_rope_forward(
    *,
    input: NestedRows,
    rotation: Rotation,
    output: NestedRows,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    rounding: Rounding,
    groups: int,
    rows: int,
    cols: int,
) -> None:
    """Launches rms_norm_rope. ``weight`` is ``[groups, cols]``."""
    compute = compute_type(input)
    config, rest_parts = rope_config(cols, rotation.pairs, compute.primitive_bitwidth // 8)
    rope_forward_kernel[groups * triton.cdiv(rows // groups, config.block_rows),](
        *nested_arguments(input), *nested_arguments(output), *rotation_arguments(rotation), weight, groups, rows,
        **rotation_constants(rotation), cols=cols, weight_offset=weight_offset, eps=eps,
        compute=compute, index=index_type(rows), **rounding_constants(rounding, output, compute),
        rest_parts=rest_parts, **options(config, input.tensor.device),
    )  # fmt: skip


def launch_rope_backward(
    *,
    grad_output: NestedRows,
    input: NestedRows,
    rotation: Rotation,
    grad_input: NestedRows | None,
    wants_weight: bool,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    rounding: Rounding,
    groups: int,
    rows: int,
    cols: int,
) -> Tensor | None:
    """Writes grad_input; returns grad_weight, flat and in the compute type, if wanted."""
    compute = compute_type(input)
    config, rest_parts = rope_config(cols, rotation.pairs, compute.primitive_bitwidth // 8)
    programs = backward_programs(rows, groups, config, input.tensor.device)
    partials = make_partials(programs, cols, input) if wants_weight else None
    rope_backward_kernel[programs,](
        *nested_arguments(grad_output), *nested_arguments(input), *nested_arguments(grad_input),
        *rotation_arguments(rotation), weight, partials, groups, rows,
        **rotation_constants(rotation), cols=cols, weight_offset=weight_offset, eps=eps,
        compute=compute, index=index_type(rows), **rounding_constants(rounding, grad_output, compute),
        overwrites_weight=is_overwritten(weight, grad_input), rest_parts=rest_parts,
        **options(config, input.tensor.device),
    )  # fmt: skip
    return None if partials is None else partials.view(-1, groups * cols).sum(0)
