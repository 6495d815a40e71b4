"""The launchers of rms_norm_stats, rms_norm_from_stats and their backwards; their kernels are rms_norm's, with sums.

They have its configurations, and so its order of sums.
"""

import triton
from torch import Tensor

from normops.triton.backward_rows import backward_kernel
from normops.triton.forward_rows import forward_kernel
from normops.triton.launch import (
    Casting,
    Rows,
    arguments,
    casting_constants,
    compute_type,
    make_partials,
    named_arguments,
    options,
)
from normops.triton.launch_config import backward_config, backward_programs, forward_config


def launch_stats(input: Rows, square_sum: Rows, rows: int, cols: int) -> None:
    """Launches rms_norm_stats. Sums are rows of one column, in the compute type."""
    compute = compute_type(input)
    config = forward_config(cols, compute.primitive_bitwidth // 8)
    forward_kernel[triton.cdiv(rows, config.block_rows),](
        *arguments(input), *arguments(None), *arguments(None), *arguments(None),
        None, 1, rows, cols,
        weight_offset=0.0, eps=0.0, compute=compute, normalized=compute, multiplied=compute,
        **named_arguments("square_sum", square_sum), **options(config, input.tensor.device),
    )  # fmt: skip


def launch_from_stats(
    input: Rows,
    square_sum: Rows,
    size: int,
    output: Rows,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    casting: Casting,
    groups: int,
    rows: int,
    cols: int,
) -> None:
    """Launches rms_norm_from_stats. ``weight`` is ``[groups, cols]``."""
    compute = compute_type(input)
    config = forward_config(cols, compute.primitive_bitwidth // 8)
    forward_kernel[groups * triton.cdiv(rows // groups, config.block_rows),](
        *arguments(input), *arguments(None), *arguments(output), *arguments(None),
        weight, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **casting_constants(casting, output, compute),
        **named_arguments("square_sum", square_sum), size=size, **options(config, input.tensor.device),
    )  # fmt: skip


def launch_backward_stats(
    grad_output: Rows,
    input: Rows,
    square_sum: Rows,
    dot: Rows,
    weight: Tensor | None,
    weight_offset: float,
    casting: Casting,
    groups: int,
    rows: int,
    cols: int,
) -> None:
    """Launches rms_norm_backward_stats."""
    compute = compute_type(input)
    config = backward_config(cols, compute.primitive_bitwidth // 8)
    backward_kernel[backward_programs(rows, groups, config, input.tensor.device),](
        *arguments(grad_output), *arguments(input), *arguments(None), *arguments(None),
        weight, None, groups, rows, cols,
        weight_offset=weight_offset, eps=0.0, compute=compute, **casting_constants(casting, grad_output, compute),
        **named_arguments("square_sum", square_sum), **named_arguments("dot", dot),
        **options(config, input.tensor.device),
    )  # fmt: skip


def launch_backward_from_stats(
    grad_output: Rows,
    input: Rows,
    square_sum: Rows,
    dot: Rows,
    size: int,
    grad_residual: Rows | None,
    grad_input: Rows | None,
    wants_weight: bool,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    casting: Casting,
    groups: int,
    rows: int,
    cols: int,
) -> Tensor | None:
    """Writes grad_input; returns grad_weight in the compute type, flat, if it is wanted."""
    compute = compute_type(input)
    config = backward_config(cols, compute.primitive_bitwidth // 8)
    programs = backward_programs(rows, groups, config, input.tensor.device)
    partials = make_partials(programs, cols, input) if wants_weight else None
    backward_kernel[programs,](
        *arguments(grad_output), *arguments(input), *arguments(grad_residual), *arguments(grad_input),
        weight, partials, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **casting_constants(casting, grad_output, compute),
        **named_arguments("square_sum", square_sum), **named_arguments("dot", dot), size=size,
        **options(config, input.tensor.device),
    )  # fmt: skip
    return None if partials is None else partials.view(-1, groups * cols).sum(0)
