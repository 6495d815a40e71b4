"""What :class:`torch.utils.flop_counter.FlopCounterMode` counts for the operators.

normops imports this module once ``torch.utils.flop_counter`` is. As for PyTorch's own operators, additions and
multiplications count one each. They are those of the definitions in docs/derivation.md, for every element of the input;
what is done once a row (the division, eps, the reciprocal root) or once a column (``weight_offset``) is left out.

    rms_norm             h * h and its sum 2; h * rstd 1; times the weight 1, where there is one
    add_rms_norm         the same, and input + residual 1
    rms_norm_backward    rstd, as it is recomputed: 2
      for grad_input     g = grad_output * weight 1, where there is one; g * h and its sum 2;
                         rstd * (g - h * c), c being a number of the row: 3; plus grad_residual 1, where there is one
      for grad_weight    grad_output * h * rstd and its sum 3
    gated_rms_norm       the same as rms_norm; the activation: an exponential, an addition and a division 3, the product
                         with the gate 1, where it is silu; the product with the activation 1
    gated_rms_norm_backward
                         the same as rms_norm_backward, and the activation; the product with it 1, of grad_output or, if
                         the gate comes first, of input and of the gradient of that product 1 each
      for grad_gate      the slope 2, for silu 3; times what was gated and its gradient 2; and where the norm comes
                         first, that norm 1, 2 with a weight

So a norm with a weight takes 4 operations per element forward and 11 backward.

Example:
    >>> import torch, normops
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False) as counter:
    ...     y = normops.RMSNorm(64)(torch.randn(10, 64))
    >>> counter.get_total_flops() == 4 * 10 * 64
    True
"""

from collections.abc import Sequence
from math import prod

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.normops

Shape = Sequence[int]


@register_flop_formula([_ops.rms_norm, _ops.rms_norm_])
def rms_norm_flop(input: Shape, normalized_shape: Shape, weight: Shape | None = None, *_: object, **__: object) -> int:
    """Counts for the forward: 3 per element, 4 with a weight."""
    return prod(input) * (3 + (weight is not None))


@register_flop_formula([_ops.add_rms_norm, _ops.add_rms_norm_])
def add_rms_norm_flop(
    input: Shape, residual: Shape, normalized_shape: Shape, weight: Shape | None = None, *_: object, **__: object
) -> int:
    """Counts for the forward with the addition: 4 per element, 5 with a weight."""
    return prod(input) * (4 + (weight is not None))


@register_flop_formula(_ops.rms_norm_backward)
def rms_norm_backward_flop(
    grad_output: Shape,
    input: Shape,
    normalized_shape: Shape,
    weight: Shape | None = None,
    *_: object,
    grad_residual: Shape | None = None,
    output_mask: Sequence[bool] = (True, True),
    **__: object,
) -> int:
    """Counts for the gradients that are asked for: up to 12 per element."""
    has_weight = weight is not None
    for_input = output_mask[0] * (5 + has_weight + (grad_residual is not None))
    for_weight = 3 * (output_mask[1] and has_weight)
    return prod(input) * (for_input + for_weight + 2 * bool(for_input or for_weight))


@register_flop_formula(_ops.gated_rms_norm)
def gated_rms_norm_flop(
    input: Shape,
    gate: Shape,
    normalized_shape: Shape,
    weight: Shape | None = None,
    *_: object,
    activation: str = "silu",
    **__: object,
) -> int:
    """Counts for the forward with silu: 8 per element, 9 with a weight; one less with sigmoid."""
    return rms_norm_flop(input, normalized_shape, weight) + prod(input) * (4 + (activation != "sigmoid"))


@register_flop_formula(_ops.gated_rms_norm_backward)
def gated_rms_norm_backward_flop(
    grad_output: Shape,
    input: Shape,
    gate: Shape,
    normalized_shape: Shape,
    weight: Shape | None = None,
    *_: object,
    activation: str = "silu",
    norm_before_gate: bool = True,
    output_mask: Sequence[bool] = (True, True, True),
    **__: object,
) -> int:
    """Counts for the gradients that are asked for: up to 23 per element."""
    for_input, for_gate, for_weight = output_mask[0], output_mask[1], output_mask[2] and weight is not None
    if not (for_input or for_gate or for_weight):
        return 0
    is_silu = activation != "sigmoid"
    through_norm = for_input if norm_before_gate else for_input or for_gate
    of_norm = rms_norm_backward_flop(
        grad_output, input, normalized_shape, weight, output_mask=(through_norm, for_weight)
    )
    rstd = 2 * prod(input)  # for grad_gate alone, too
    per_element = 3 + is_silu + for_gate * (4 + is_silu)
    if norm_before_gate:
        per_element += (for_input or for_weight) + for_gate * (1 + (weight is not None))
    else:
        per_element += 1 + for_input
    return max(of_norm, rstd) + prod(input) * per_element
