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
        weight: shape ``normalized_shape``, or ``[*groups, *normalized_shape]``, the last dimensions of ``input``: a
            weight for each head or group, which is normalized by itself. Any of the four dtypes, not necessarily that
            of ``input``. None means 1, and then ``weight_offset`` does not apply.
        eps: added to the mean of squares. None means the machine epsilon of the type computed in:
            that of float64 for float64 inputs, that of float32 otherwise.
        weight_offset: added to the weight. 1.0 is Gemma's ``1 + w``.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``.

    Raises:
        RuntimeError: the message names the argument, what was expected and what came: a wrong shape, dtype, device or
            layout, or an ``eps`` that is NaN.

    Example:
        >>> import torch, normops
        >>> normops.rms_norm(torch.tensor([[3.0, 4.0]]), 2, torch.tensor([1.0, 10.0]), eps=0.0)
        tensor([[ 0.8485, 11.3137]])
        >>> query, weight = torch.randn(7, 32, 128), torch.ones(32, 128)
        >>> normops.rms_norm(query, 128, weight).shape  # 32 heads with a weight each
        torch.Size([7, 32, 128])
    """
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm(input, normalized_shape, weight, eps, weight_offset)
        if output is not NotImplemented:
            return output
    shape = _as_shape(normalized_shape)
    return torch.ops.normops.rms_norm.default(input, shape, weight, eps, weight_offset=weight_offset)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""Adds the input to a residual stream and normalizes the sum: what stands between two sublayers of a transformer.

    .. math:: h = x + r, \quad y = \frac{h}{\sqrt{\mathrm{mean}(h^2) + \epsilon}} \cdot (w + \text{weight\_offset})

    One pass over memory forward, and one backward (``normops.rms_norm_backward`` with the gradient of ``h``). The sum
    is rounded once to the dtype of ``residual``, and normalized as rounded: ``y`` is what :func:`rms_norm` makes of
    ``h``.

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        residual: the shape of ``input``, and its dtype, or float32 if ``input`` has 16 bits; any strides.
        normalized_shape: see :func:`rms_norm`, as for ``weight``, ``eps`` and ``weight_offset``.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.

    Returns:
        ``(output, residual_out)``, that is ``y`` and ``h``: contiguous tensors with the shape of ``input``; ``output``
        has its dtype, ``residual_out`` that of ``residual``.

    Raises:
        RuntimeError: see :func:`rms_norm`.

    Example:
        >>> import torch, normops
        >>> normops.add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), 2, eps=0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    if not torch.compiler.is_dynamo_compiling():
        outputs = _C.add_rms_norm(input, residual, normalized_shape, weight, eps, weight_offset)
        if outputs is not NotImplemented:
            return outputs
    shape = _as_shape(normalized_shape)
    return torch.ops.normops.add_rms_norm.default(input, residual, shape, weight, eps, weight_offset=weight_offset)


def rms_norm_(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    """In-place :func:`rms_norm` for inference: the result replaces ``input``, which is returned.

    Raises:
        RuntimeError: as :func:`rms_norm`; if an argument requires a gradient and gradients are enabled; if ``input`` is
            an expanded tensor or overlaps ``weight`` in part.

    Example:
        >>> import torch, normops
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> normops.rms_norm_(x, 2, eps=0.0) is x
        True
        >>> x
        tensor([[0.8485, 1.1314]])
    """
    shape = _as_shape(normalized_shape)
    return torch.ops.normops.rms_norm_.default(input, shape, weight, eps, weight_offset=weight_offset)


def add_rms_norm_(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> None:
    """In-place :func:`add_rms_norm` for inference: the result replaces ``input``, the sum replaces ``residual``.

    Raises:
        RuntimeError: as :func:`add_rms_norm`; if an argument requires a gradient and gradients are enabled; if one of
            the two tensors is expanded, or they share memory.

    Example:
        >>> import torch, normops
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> normops.add_rms_norm_(x, residual, 2, eps=0.0)
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    shape = _as_shape(normalized_shape)
    torch.ops.normops.add_rms_norm_.default(input, residual, shape, weight, eps, weight_offset=weight_offset)


def _as_shape(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, (int, torch.SymInt)) else normalized_shape
