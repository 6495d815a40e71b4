"""The launchers of all operators on rows except rms_norm_rope: one kernel for forwards, one for backwards."""

from typing import Any

import triton
from torch import Tensor

from normops.triton.backward_rows import backward_kernel
from normops.triton.forward_rows import forward_kernel
from normops.triton.launch import (
    Rounding,
    Rows,
    arguments,
    compute_type,
    is_overwritten,
    make_partials,
    named_arguments,
    options,
    rounding_constants,
)
from normops.triton.launch_config import backward_config, backward_programs, forward_config, gated_config


def launch_forward(
    *,
    input: Rows,
    residual: Rows | None = None,
    gate: Rows | None = None,
    bias: Rows | None = None,
    square_sum: Rows | None = None,
    output: Rows | None = None,
    residual_out: Rows | None = None,
    weight: Tensor | None = None,
    weight_offset: float,
    eps: float,
    rounding: Rounding,
    groups: int,
    rows: int,
    cols: int,
    size: int | None = None,
    alpha: float = 1.0,
    activation: str | None = None,
    norm_before_gate: bool | None = None,
) -> None:
    """Launches the forward that has these tensors: rms_norm, or another operator.

    ``weight`` is ``[groups, cols]``, ``activation`` is "silu" or "sigmoid". ``square_sum`` has one column, in the
    compute type; as an input, it is the sum over whole rows of ``size`` columns.
    """
    compute = compute_type(input)
    config = (forward_config if gate is None else gated_config)(cols, compute.primitive_bitwidth // 8)
    rest: dict[str, Any] = {}
    if residual is not None:
        rest |= {"alpha": alpha, "fuses": not rounding.multiplied}
    if gate is not None:
        rest |= {"activation": activation, "norm_before_gate": norm_before_gate}
    forward_kernel[groups * triton.cdiv(rows // groups, config.block_rows),](
        *arguments(input), *arguments(residual), *arguments(output), *arguments(residual_out),
        weight, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **rounding_constants(rounding, output or input, compute),
        overwrites_weight=is_overwritten(weight, output, residual_out),
        **named_arguments(gate=gate, bias=bias, square_sum=square_sum), size=size, **rest,
        **options(config, input.tensor.device),
    )  # fmt: skip


def launch_backward(
    *,
    grad_output: Rows,
    input: Rows,
    gate: Rows | None = None,
    square_sum: Rows | None = None,
    dot: Rows | None = None,
    grad_residual: Rows | None = None,
    grad_input: Rows | None = None,
    grad_gate: Rows | None = None,
    wants_weight: bool,
    weight: Tensor | None = None,
    weight_offset: float,
    eps: float,
    rounding: Rounding,
    groups: int,
    rows: int,
    cols: int,
    size: int | None = None,
    activation: str | None = None,
    norm_before_gate: bool | None = None,
) -> Tensor | None:
    """Writes the gradients of rows, or only sums; returns grad_weight, flat and in the compute type, if wanted."""
    compute = compute_type(input)
    config = (backward_config if gate is None else gated_config)(cols, compute.primitive_bitwidth // 8)
    programs = backward_programs(rows, groups, config, input.tensor.device)
    partials = make_partials(programs, cols, input) if wants_weight else None
    backward_kernel[programs,](
        *arguments(grad_output), *arguments(input), *arguments(grad_residual), *arguments(grad_input),
        weight, partials, groups, rows, cols,
        weight_offset=weight_offset, eps=eps, compute=compute, **rounding_constants(rounding, grad_output, compute),
        overwrites_weight=is_overwritten(weight, grad_input, grad_gate),
        **named_arguments(gate=gate, dgate=grad_gate, square_sum=square_sum, dot=dot), size=size,
        activation=activation, norm_before_gate=norm_before_gate,
        **options(config, input.tensor.device),
    )  # fmt: skip
    return None if partials is None else partials.view(-1, groups * cols).sum(0)
