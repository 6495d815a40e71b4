"""Counts the FLOPs of the operators for :class:`torch.utils.flop_counter.FlopCounterMode`.

normops imports this module once ``torch.utils.flop_counter`` is imported. Additions and multiplications count one each,
as for PyTorch's own operators. The counts are those of the definitions in docs/derivation.md, per element of the input.
They omit operations per row (the division, eps, the reciprocal root) and per column (``weight_offset``). Operations on
an optional tensor count only if the call has it.

    rms_norm             h * h and its sum 2; h * rstd 1; times the weight 1; plus the bias 1
    add_rms_norm         the same, and input + residual 1
    rms_norm_backward    rstd, which is recomputed: 2
      for grad_input     g = grad_output * weight 1; g * h and its sum 2;
                         rstd * (g - h * c), where c is one number per row: 3; plus grad_residual 1
      for grad_weight    grad_output * h * rstd and its sum 3
      for grad_bias      the sum of grad_output 1
    gated_rms_norm       the same as rms_norm; the activation: an exponential, an addition and a division 3, for silu
                         the product with the gate 1; the product with the activation 1
    gated_rms_norm_backward
                         the same as rms_norm_backward, and the activation; its product with grad_output 1, or if the
                         gate is applied first, its products with input and with the gradient of that product 1 each
      for grad_gate      the slope 2, for silu 3; times the gated tensor and its gradient 2; if the norm is computed
                         first, that norm 1, 2 with a weight
    channel_rms_norm     the same as rms_norm; with an activation, that of the output: 3, for silu 4
    channel_rms_norm_backward
                         the same as rms_norm_backward; with an activation, its input, which is the norm without rstd;
                         the exponential, the addition and the division 3, the slope 2, for silu 3, and the product
                         with grad_output 1
    rms_norm_stats       h * h and its sum 2
    rms_norm_from_stats  the other operations of rms_norm
    rms_norm_backward_stats
                         the same as rms_norm_stats, and g and the sum of g * h as above
    rms_norm_backward_from_stats
                         the same as rms_norm_backward, without rstd and without the sum of g * h
    rms_norm_rope        the same as rms_norm; the rotation, for every rotated element, 3
    rms_norm_rope_backward
                         the same as rms_norm_backward; the rotation of grad_output the same

So a norm with a weight takes 4 operations per element forward and 11 backward.

Example:
    >>> import torch, normops.flops
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False) as counter:
    ...     y = normops.RMSNorm(64)(torch.randn(10, 64))
    >>> counter.get_total_flops() == 4 * 10 * 64
    True
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from normops._operators import FUNCTIONAL, INPLACE, Operator, by_name, results_of, wanted


def _forward(arguments: Mapping[str, Any]) -> int:
    """Returns the operations per element of a forward."""
    given = sum(arguments.get(name) is not None for name in ("weight", "bias", "residual"))
    of_norm = _sum(arguments) + 1 + given
    return of_norm + (3 + _is_silu(arguments) + ("gate" in arguments) if _is_activated(arguments) else 0)


def _backward(arguments: Mapping[str, Any], wants: Mapping[str, bool]) -> int:
    """Returns the operations per element for the requested gradients."""
    has_weight, has_gate = arguments.get("weight") is not None, "gate" in arguments
    for_input, for_gate = wants["grad_input"], wants.get("grad_gate", False)
    for_weight, for_bias = wants["grad_weight"], wants.get("grad_bias", False)
    if not (for_input or for_gate or for_weight) and not (for_bias and _is_activated(arguments)):
        return int(for_bias)
    is_gated_first = has_gate and not arguments.get("norm_before_gate", True)
    through_norm = for_input or (for_gate and is_gated_first)
    has_residual = arguments.get("grad_residual") is not None
    of_sums = for_weight * 3 + for_bias
    of_norm = _sum(arguments) + through_norm * (_sum(arguments) + 3 + has_weight + has_residual) + of_sums
    if not has_gate:
        through_activation = 1 + has_weight + (arguments.get("bias") is not None) + 3 + 2 + _is_silu(arguments) + 1
        return of_norm + (through_activation if _is_activated(arguments) else 0)
    activation = 3 + _is_silu(arguments)
    products = 1 + for_input if is_gated_first else for_input or for_weight
    normed = 0 if is_gated_first else 1 + has_weight
    return of_norm + activation + products + for_gate * (2 + _is_silu(arguments) + 2 + normed)


def _sum(arguments: Mapping[str, Any]) -> int:
    """Returns the operations per element for a sum of products over the row, 0 if it is an argument."""
    return 0 if "square_sum" in arguments else 2


def _rotation(arguments: Mapping[str, Any]) -> int:
    """Returns the operations for the rotation of all rows, 0 without one."""
    if "cos" not in arguments:
        return 0
    rotary_dim = arguments.get("rotary_dim")
    return 3 * prod(arguments["input"][:-1]) * (arguments["cos"][-1] if rotary_dim is None else rotary_dim)


def _is_activated(arguments: Mapping[str, Any]) -> bool:
    return "gate" in arguments or arguments.get("activation", "identity") != "identity"


def _is_silu(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("activation", "silu") != "sigmoid"


def _register(op: Operator) -> None:
    def count(*args: Any, **kwargs: Any) -> int:
        arguments = by_name(op, args, kwargs)
        if "square_sum" in results_of(op):
            for_dot = 2 + (arguments.get("weight") is not None) if "dot" in results_of(op) else 0
            return prod(arguments["input"]) * (2 + for_dot)
        if "grad_output" not in arguments:
            return prod(arguments["input"]) * _forward(arguments) + _rotation(arguments)
        wants = dict(zip(results_of(op), wanted(op, arguments), strict=True))
        per_element = _backward(arguments, wants)
        return prod(arguments["input"]) * per_element + (_rotation(arguments) if per_element else 0)

    register_flop_formula(op.overloadpacket)(count)


for _op in (*FUNCTIONAL, *INPLACE):
    _register(_op)
