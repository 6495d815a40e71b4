"""The launchers of rms_norm, add_rms_norm and rms_norm_backward."""

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
    options,
)
from normops.triton.launch_config import backward_config, backward_programs, forward_config


def launch_forward(
    input: Rows,
    residual: Rows | None,
    output: Rows,
    residual_out: Rows | None,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    casting: Casting,
    alpha: float,
    groups: int,
    rows: int,
    cols: int,
) -> None:
    """Launches rms_norm, or with a residual add_rms_norm. ``weight`` is ``[groups, cols]``."""
    compute = compute_type(input)
    config = forward_config(cols, compute.primitive_bitwidth // 8)
    forward_kernel[groups * triton.cdiv(rows // groups, config.block_rows),](
        *arguments(input), *arguments(residual), *arguments(output), *arguments(residual_out),
        weight, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **casting_constants(casting, output, compute),
        alpha=alpha, fuses=not casting.multiplied, **options(config, input.tensor.device),
    )  # fmt: skip


def launch_backward(
    grad_output: Rows,
    input: Rows,
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
        **options(config, input.tensor.device),
    )  # fmt: skip
    return None if partials is None else partials.view(-1, groups * cols).sum(0)
