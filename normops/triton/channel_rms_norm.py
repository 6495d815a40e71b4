"""The kernels and launchers of channel_rms_norm and its backward, whose rows are the channels of each position."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl
from torch import Tensor

from normops.triton.activation import activate
from normops.triton.launch import Channels, arguments, compute_type, index_type, is_overwritten, make_partials, options
from normops.triton.launch_config import backward_programs, channel_config
from normops.triton.row import apply_scale, apply_scale_backward, factors_of, load, load_scale, rstd_of, store
from normops.triton.sums import sum_columns, sum_rows

# A tile has a line for each channel and a column for each position, as positions are contiguous in memory. A program
# loops over the channels of its positions tile by tile: first to sum, then to store, with inputs from the cache.


@triton.jit
def _position_offsets(position, positions, sample_stride, position_stride):
    """Returns the 64-bit offsets of the first channel of each position, as a line of a tile."""
    sample = position // positions
    of_sample = (position - sample * positions).to(tl.int64)
    return (sample.to(tl.int64) * sample_stride + of_sample * position_stride)[None, :]


@triton.jit
def _load_tile(
    x, offsets, channel_stride, start, cols, is_position, compute: tl.constexpr, block_cols: tl.constexpr
):  # fmt: skip
    """Returns the elements of a tile, its channels from ``start`` on, and which channels and elements exist."""
    channel = start + tl.arange(0, block_cols)
    is_channel = channel < cols
    mask = is_channel[:, None] & is_position
    return load(x, offsets + channel[:, None] * channel_stride, mask, compute), channel, is_channel, mask


@triton.jit
def _rstd_of_channels(
    x, offsets, channel_stride, cols, is_position,
    eps: tl.constexpr, compute: tl.constexpr, block_rows: tl.constexpr, block_cols: tl.constexpr,
):  # fmt: skip
    """Returns the sums of squares over channels, and rstd, as lines. Both kernels sum in the same order."""
    squares = tl.zeros((block_cols, block_rows), compute)
    for start in range(0, tl.cast(cols, tl.int64), block_cols):
        h, _channel, _is_channel, _mask = _load_tile(
            x, offsets, channel_stride, start, cols, is_position, compute, block_cols
        )
        squares += h * h
    squares = sum_rows(squares)[None, :]
    return squares, rstd_of(squares, cols, eps, compute)


@triton.jit
def _normalize(h, rstd, weight, bias, channel, is_channel, weight_offset: tl.constexpr, compute: tl.constexpr):
    """Returns h * rstd * scale + bias, and the scale as a column."""
    scale = load_scale(weight, channel, is_channel, weight_offset, compute)[:, None]
    z = apply_scale(h, rstd, scale, compute)
    if bias is not None:
        z += load(bias, channel, is_channel, compute)[:, None]
    return z, scale


@triton.jit
def channel_forward_kernel(
    x, x_sample_stride, x_channel_stride, x_position_stride,
    y, y_sample_stride, y_channel_stride, y_position_stride,
    weight, bias, rows, cols, positions,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr, index: tl.constexpr,
    activation: tl.constexpr, overwrites_parameter: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, threads: tl.constexpr,
):  # fmt: skip
    """Stores y = activation(x * rstd * scale + bias) for ``cols`` channels at ``rows`` positions of all samples."""
    position = tl.program_id(0).to(index) * block_rows + tl.arange(0, block_rows)
    is_position = (position < rows)[None, :]
    x_offsets = _position_offsets(position, positions, x_sample_stride, x_position_stride)
    y_offsets = _position_offsets(position, positions, y_sample_stride, y_position_stride)
    _, rstd = _rstd_of_channels(x, x_offsets, x_channel_stride, cols, is_position, eps, compute, block_rows, block_cols)
    for start in range(0, tl.cast(cols, tl.int64), block_cols):
        h, channel, is_channel, mask = _load_tile(
            x, x_offsets, x_channel_stride, start, cols, is_position, compute, block_cols
        )
        z, _scale = _normalize(h, rstd, weight, bias, channel, is_channel, weight_offset, compute)
        if activation is not None:
            z, _slope = activate(z, activation, compute)
        if overwrites_parameter:
            tl.debug_barrier()  # all threads read the parameters before any overwrites one
        store(y, y_offsets + channel[:, None] * y_channel_stride, z, mask)


@triton.jit
def _load_terms(
    dy, dy_offsets, dy_channel_stride, x, x_offsets, x_channel_stride, rstd, weight, bias, start, cols, is_position,
    weight_offset: tl.constexpr, activation: tl.constexpr, compute: tl.constexpr, block_cols: tl.constexpr,
):  # fmt: skip
    """Returns x, dy times the activation's slope, the scale, the channels, and which channels and elements exist."""
    h, channel, is_channel, mask = _load_tile(
        x, x_offsets, x_channel_stride, start, cols, is_position, compute, block_cols
    )
    g = load(dy, dy_offsets + channel[:, None] * dy_channel_stride, mask, compute)
    z, scale = _normalize(h, rstd, weight, bias, channel, is_channel, weight_offset, compute)
    if activation is not None:
        _z, slope = activate(z, activation, compute)
        g = tl.where(mask, g * slope, 0.0)  # padding has NaN slopes if a parameter is not finite
    return h, g, scale, channel, is_channel, mask


@triton.jit
def _store_sums(partial, channel, is_channel, so_far, tile, threads: tl.constexpr):
    """Adds the sums over this tile's positions to those so far, and stores the totals."""
    sums = so_far + tl.reshape(sum_columns(tile, threads), channel.shape)
    tl.store(partial + channel, sums, mask=is_channel)


@triton.jit
def channel_backward_kernel(
    dy, dy_sample_stride, dy_channel_stride, dy_position_stride,
    x, x_sample_stride, x_channel_stride, x_position_stride,
    dx, dx_sample_stride, dx_channel_stride, dx_position_stride,
    weight, bias, partials, rows, cols, positions,
    weight_offset: tl.constexpr, eps: tl.constexpr, compute: tl.constexpr, index: tl.constexpr,
    activation: tl.constexpr, overwrites_parameter: tl.constexpr,
    wants_weight: tl.constexpr, wants_bias: tl.constexpr,
    block_rows: tl.constexpr, block_cols: tl.constexpr, parts: tl.constexpr, threads: tl.constexpr,
):  # fmt: skip
    """Stores dx = g * rstd * scale - x * c, where g is dy times the slope of the activation.

    Also stores this program's parts of dw = sum of g * rstd * x, and of db = sum of g, in its line of ``partials``.
    """
    program = tl.program_id(0).to(tl.int64)
    if partials is not None:
        dw_partial = partials + program * cols * (wants_weight + wants_bias)
        db_partial = dw_partial
        if wants_weight:
            db_partial += cols
    # Indices have 64 bits, as the last step may exceed 2^31.
    for first in range(program * block_rows, rows, tl.num_programs(0).to(tl.int64) * block_rows):
        position = (first + tl.arange(0, block_rows)).to(index)
        is_position = (position < rows)[None, :]
        dy_offsets = _position_offsets(position, positions, dy_sample_stride, dy_position_stride)
        x_offsets = _position_offsets(position, positions, x_sample_stride, x_position_stride)
        dx_offsets = _position_offsets(position, positions, dx_sample_stride, dx_position_stride)
        squares, rstd = _rstd_of_channels(
            x, x_offsets, x_channel_stride, cols, is_position, eps, compute, block_rows, block_cols
        )
        # Padding has an infinite rstd if eps is 0, which would make NaNs.
        rstd = tl.where(is_position, rstd, 0.0)
        dots = tl.zeros((block_cols, block_rows), compute)
        if dx is not None:
            for start in range(0, tl.cast(cols, tl.int64), block_cols):
                h, g, scale, _channel, _is_channel, _mask = _load_terms(
                    dy, dy_offsets, dy_channel_stride, x, x_offsets, x_channel_stride, rstd, weight, bias,
                    start, cols, is_position, weight_offset, activation, compute, block_cols,
                )  # fmt: skip
                dots += g * scale * h
        _rstd, c = factors_of(squares, sum_rows(dots)[None, :], cols, eps, compute)
        for start in range(0, tl.cast(cols, tl.int64), block_cols):
            h, g, scale, channel, is_channel, mask = _load_terms(
                dy, dy_offsets, dy_channel_stride, x, x_offsets, x_channel_stride, rstd, weight, bias,
                start, cols, is_position, weight_offset, activation, compute, block_cols,
            )  # fmt: skip
            term, result = apply_scale_backward(g, h, scale, rstd, c, compute)
            is_added = is_channel & (first != program * block_rows)
            if wants_weight:
                dw_so_far = tl.load(dw_partial + channel, mask=is_added, other=0.0)
            if wants_bias:
                db_so_far = tl.load(db_partial + channel, mask=is_added, other=0.0)
            if partials is not None or overwrites_parameter:
                tl.debug_barrier()  # all threads read parameters and sums before any overwrites them
            if wants_weight:
                _store_sums(dw_partial, channel, is_channel, dw_so_far, term, threads)
            if wants_bias:
                _store_sums(db_partial, channel, is_channel, db_so_far, g, threads)
            if dx is not None:
                store(dx, dx_offsets + channel[:, None] * dx_channel_stride, result, mask)
        tl.debug_barrier()  # before the next tile loads the sums so far


def launch_channel_forward(
    *,
    input: Channels,
    output: Channels,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    eps: float,
    activation: str | None,
) -> None:
    """Launches channel_rms_norm; ``activation`` is "silu", "sigmoid" or None."""
    samples, cols, positions = input.tensor.shape
    rows, config = samples * positions, channel_config(cols)
    channel_forward_kernel[triton.cdiv(rows, config.block_rows),](
        *input, *output, weight, bias, rows, cols, positions,
        weight_offset=weight_offset, eps=eps, compute=compute_type(input), index=index_type(rows + config.block_rows),
        activation=activation,
        overwrites_parameter=is_overwritten(weight, output) or is_overwritten(bias, output),
        **options(config, input.tensor.device),
    )  # fmt: skip


def launch_channel_backward(
    *,
    grad_output: Channels,
    input: Channels,
    grad_input: Channels | None,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    eps: float,
    activation: str | None,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes grad_input; returns grad_weight and grad_bias in the compute type, each None unless it is wanted."""
    samples, cols, positions = input.tensor.shape
    rows, config = samples * positions, channel_config(cols)
    programs = backward_programs(rows, 1, config, input.tensor.device)
    sums = wants_weight + wants_bias
    partials = make_partials(programs, sums * cols, input) if sums else None
    channel_backward_kernel[programs,](
        *grad_output, *input, *arguments(grad_input), weight, bias, partials, rows, cols, positions,
        weight_offset=weight_offset, eps=eps, compute=compute_type(input), index=index_type(rows + config.block_rows),
        activation=activation,
        overwrites_parameter=is_overwritten(weight, grad_input) or is_overwritten(bias, grad_input),
        wants_weight=wants_weight, wants_bias=wants_bias,
        **options(config, input.tensor.device),
    )  # fmt: skip
    if partials is None:
        return None, None
    totals = partials.sum(0)
    return totals[:cols] if wants_weight else None, totals[-cols:] if wants_bias else None
