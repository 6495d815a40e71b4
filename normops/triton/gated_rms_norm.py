"""The launchers of gated_rms_norm and gated_rms_norm_backward; their kernels are rms_norm's, with a gate."""

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
from normops.triton.launch_config import backward_programs, gated_config


def launch_gated_forward(
    input: Rows,
    gate: Rows,
    output: Rows,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    casting: Casting,
    activation: str,
    norm_before_gate: bool,
    groups: int,
    rows: int,
    cols: int,
) -> None:
    """Launches gated_rms_norm. ``weight`` is ``[groups, cols]``, ``activation`` is "silu" or "sigmoid"."""
    compute = compute_type(input)
    config = gated_config(cols, compute.primitive_bitwidth // 8)
    forward_kernel[groups * triton.cdiv(rows // groups, config.block_rows),](
        *arguments(input), *arguments(None), *arguments(output), *arguments(None),
        weight, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **casting_constants(casting, output, compute),
        **named_arguments("gate", gate), activation=activation, norm_before_gate=norm_before_gate,
        **options(config, input.tensor.device),
    )  # fmt: skip


def launch_gated_backward(
    grad_output: Rows,
    input: Rows,
    gate: Rows,
    grad_input: Rows | None,
    grad_gate: Rows | None,
    wants_weight: bool,
    weight: Tensor | None,
    weight_offset: float,
    eps: float,
    casting: Casting,
    activation: str,
    norm_before_gate: bool,
    groups: int,
    rows: int,
    cols: int,
) -> Tensor | None:
    """Writes grad_input and grad_gate; returns grad_weight in the compute type, flat, if it is wanted."""
    compute = compute_type(input)
    config = gated_config(cols, compute.primitive_bitwidth // 8)
    programs = backward_programs(rows, groups, config, input.tensor.device)
    partials = make_partials(programs, cols, input) if wants_weight else None
    backward_kernel[programs,](
        *arguments(grad_output), *arguments(input), *arguments(None), *arguments(grad_input),
        weight, partials, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **casting_constants(casting, grad_output, compute),
        **named_arguments("gate", gate), **named_arguments("dgate", grad_gate),
        activation=activation, norm_before_gate=norm_before_gate,
        **options(config, input.tensor.device),
    )  # fmt: skip
    return None if partials is None else partials.view(-1, groups * cols).sum(0)
