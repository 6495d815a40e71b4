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
