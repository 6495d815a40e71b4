"""The operators as typed, documented functions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normops import _C


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    r"""Applies root mean square layer normalization over the last dimensions of the input.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + \text{weight\_offset})

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). The first four arguments are those of
    :func:`torch.nn.functional.rms_norm`. Everything is computed in float32 (float64 for float64 inputs) and rounded
    once. Differentiable in ``input`` and ``weight``; under ``torch.compile`` it stays one operator forward
    (``normops.rms_norm``) and one backward (``normops.rms_norm_backward``).

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        normalized_shape: the last dimensions of ``input``, over which the mean is taken. An ``int`` means one.
        weight: shape ``normalized_shape``, any of the four dtypes, not necessarily that of ``input``. None means 1, and
            then ``weight_offset`` does not apply.
        eps: added to the mean of squares; at least 0. None means the machine epsilon of the type computed in:
            that of float64 for float64 inputs, that of float32 otherwise.
        weight_offset: added to the weight. 1.0 is Gemma's ``1 + w``.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``.

    Raises:
        RuntimeError: the message names the argument, what was expected and what came: a wrong shape, dtype, device or
            layout, or a negative ``eps``.

    Example:
        >>> import torch, normops
        >>> normops.rms_norm(torch.tensor([[3.0, 4.0]]), 2, torch.tensor([1.0, 10.0]), eps=0.0)
        tensor([[ 0.8485, 11.3137]])
    """
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm(input, normalized_shape, weight, eps, weight_offset)
        if output is not NotImplemented:
            return output
    if isinstance(normalized_shape, (int, torch.SymInt)):
        normalized_shape = (normalized_shape,)
    return torch.ops.normops.rms_norm(input, normalized_shape, weight, eps, weight_offset=weight_offset)
