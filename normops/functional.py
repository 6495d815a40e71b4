"""Functions that call the operators, with types and documentation."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from normops import _C
from normops._arguments import as_shape, call, check_numbers, explain

# Defaults of numbers are integers: with dynamic=True, torch.compile traces a function again for each float default.

Rounding = Literal["once", "llama"]
Activation = Literal["silu", "swish", "sigmoid"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}
"""PyTorch's activations by their names in normops."""


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    bias: Tensor | None = None,
    dim: int | None = None,
    activation: Activation | None = None,
) -> Tensor:
    r"""Applies root mean square layer normalization over the last dimensions of the input, or over one other dimension.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + \text{weight\_offset}) + b

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). The first four arguments are those of
    :func:`torch.nn.functional.rms_norm`. The function computes in float32 (in float64 for float64 inputs) and rounds
    the result once, unless ``rounding`` selects more roundings. It is differentiable in ``input``, ``weight`` and
    ``bias``.

    Under ``torch.compile`` it is one operator forward, ``normops.rms_norm``, and one backward,
    ``normops.rms_norm_backward``. If the elements of ``dim`` are not contiguous, these are ``normops.channel_rms_norm``
    and ``normops.channel_rms_norm_backward``.

    Args:
        input: shape ``[*, *normalized_shape]``, with ``dim`` ``[*, C, *]``; float16, bfloat16, float32 or float64; any
            strides.
        normalized_shape: the last dimensions of ``input``, over which the mean is taken, or the size of ``dim``. An
            ``int`` means one dimension.
        weight: shape ``normalized_shape``, or further dimensions before it that broadcast to those of ``input``: a
            weight per head, sample or token. Any of the four dtypes, not necessarily that of ``input``. None means 1;
            then ``weight_offset`` is ignored.
        eps: added to the mean of squares. None means the machine epsilon of the dtype of the computation, float32 or
            float64.
        weight_offset: added to the weight; 1.0 is Gemma's ``1 + w``.
        rounding: selects which results are rounded to the dtype of a 16-bit ``input``. ``"once"``: the output alone.
            ``"llama"``: the normalized input, and then its product with the weight, as in transformers' LlamaRMSNorm
            and older CUDA kernels of vLLM; the backward rounds as their autograd does. Liger calls these casting modes
            ``"gemma"`` and ``"llama"``. See :doc:`reproducibility`.
        bias: added after the weight; shapes and dtypes as for ``weight``. A bias with the shape of ``input`` is a
            residual that is added to the norm: its gradient is that of the output.
        dim: the dimension to normalize over, for example 1 for the channels of ``[N, C, H, W]``; None means the last
            dimensions. With ``dim``, ``weight`` and ``bias`` have one number per channel: shape ``[C]``, or a shape
            that broadcasts with ``input``, such as ``[C, 1, 1]``. The CPU has kernels for float32 and bfloat16, and
            GPUs have Triton kernels. Inputs in :data:`torch.channels_last` use the kernels for rows.
        activation: applied to the result: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``; None applies none.
            ``normops.channel_rms_norm`` applies it before the result is rounded. After ``normops.rms_norm``, PyTorch
            applies it to the rounded result.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``. If ``dim`` is innermost in the memory of
        ``input``, as in :data:`torch.channels_last` and :data:`torch.channels_last_3d`, it also is in that of the
        output: the stride of ``dim`` is 1, and that of the last dimension is not.

    Raises:
        RuntimeError: if an argument has a wrong shape, dtype, device or layout, if ``eps`` is NaN, or if ``rounding``
            or ``activation`` is unknown. The message names the argument, the expected and the actual value.
        TypeError: if an argument has another type. Also if ``eps`` or ``weight_offset`` is a bool, or a tensor that
            requires a gradient.

    Example:
        >>> import torch, normops
        >>> normops.rms_norm(torch.tensor([[3.0, 4.0]]), 2, torch.tensor([1.0, 10.0]), eps=0.0)
        tensor([[ 0.8485, 11.3137]])
        >>> query, weight = torch.randn(7, 32, 128), torch.ones(32, 128)
        >>> normops.rms_norm(query, 128, weight).shape  # a weight for each of 32 heads
        torch.Size([7, 32, 128])
        >>> scale, shift = torch.randn(2, 6 * 64).view(2, 6, 1, 64)[:, :2].unbind(1)  # for each of two samples
        >>> normops.rms_norm(torch.randn(2, 7, 64), 64, scale, weight_offset=1.0, bias=shift).shape
        torch.Size([2, 7, 64])
        >>> image = torch.randn(2, 64, 5, 5).to(memory_format=torch.channels_last)
        >>> output = normops.rms_norm(image, 64, torch.ones(64, 1, 1), dim=1, activation="silu")
        >>> output.is_contiguous(memory_format=torch.channels_last)
        True
    """
    if dim is not None or activation is not None:
        others = eps, weight_offset, rounding, bias
        try:
            return _rms_norm_over(dim, activation, input, normalized_shape, weight, *others)
        except (AttributeError, RuntimeError, TypeError):
            arguments = {"input": input, "normalized_shape": normalized_shape, "weight": weight, "dim": dim}
            numbers = {"eps": eps, "weight_offset": weight_offset, "rounding": rounding, "bias": bias}
            explain(torch.ops.normops.rms_norm.default, arguments | numbers)
            raise
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm(input, normalized_shape, weight, eps, weight_offset, rounding, bias)
        if output is not NotImplemented:
            return output
    check_numbers("rms_norm", eps=eps, weight_offset=weight_offset)
    op, shape = torch.ops.normops.rms_norm.default, as_shape(normalized_shape)
    return call(op, input, shape, weight, eps, weight_offset=weight_offset, rounding=rounding, bias=bias)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    alpha: float = 1,
) -> tuple[Tensor, Tensor]:
    r"""Adds the input to a residual and normalizes the sum, as between two sublayers of a transformer.

    .. math:: h = \text{alpha} \cdot x + r, \quad
        y = \frac{h}{\sqrt{\mathrm{mean}(h^2) + \epsilon}} \cdot (w + \text{weight\_offset})

    The forward is one pass over memory, and so is the backward: ``normops.rms_norm_backward`` with the gradient of
    ``h``. The sum is rounded once, to the dtype of ``residual``; the norm is that of the rounded sum. With
    ``rounding="llama"``, the product with ``alpha`` is rounded to the dtype of ``input`` before the addition. The
    function is differentiable in ``input``, ``residual`` and ``weight``.

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        residual: the shape of ``input``, and its dtype, or float32 if ``input`` has 16 bits; any strides.
        normalized_shape: see :func:`rms_norm`.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        alpha: multiplies ``input``, as Granite's ``residual_multiplier`` does.

    Returns:
        ``(output, residual_out)``, which are ``y`` and ``h``: contiguous tensors with the shape of ``input``.
        ``output`` has the dtype of ``input``, and ``residual_out`` that of ``residual``.

    Raises:
        RuntimeError: see :func:`rms_norm`.
        TypeError: see :func:`rms_norm`; the same holds for ``alpha``.

    Example:
        >>> import torch, normops
        >>> normops.add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), 2, eps=0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    if not torch.compiler.is_dynamo_compiling():
        outputs = _C.add_rms_norm(input, residual, normalized_shape, weight, eps, weight_offset, rounding, alpha)
        if outputs is not NotImplemented:
            return outputs
    check_numbers("add_rms_norm", eps=eps, weight_offset=weight_offset, alpha=alpha)
    op, shape = torch.ops.normops.add_rms_norm.default, as_shape(normalized_shape)
    return call(op, input, residual, shape, weight, eps, weight_offset=weight_offset, rounding=rounding, alpha=alpha)


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    activation: Activation = "silu",
    norm_before_gate: bool = True,
) -> Tensor:
    r"""Normalizes the input and multiplies it by an activated gate, as after linear attention and state space layers.

    .. math:: y = \mathrm{rms\_norm}(x) \cdot \sigma(g) \quad\text{or, gated first,}\quad
        y = \mathrm{rms\_norm}(x \cdot \sigma(g))

    where :math:`\sigma` is the activation. RetNet (Sun et al., "Retentive Network", 2023), gated linear attention and
    Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024) normalize first. Mamba-2 (Dao and Gu, "Transformers are SSMs",
    2024) gates first. The function computes everything, including the activation, in float32 (in float64 for float64
    inputs) and rounds once. It is differentiable in ``input``, ``gate`` and ``weight``. Under ``torch.compile`` it is
    one operator forward, ``normops.gated_rms_norm``, and one backward, ``normops.gated_rms_norm_backward``.

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        gate: the shape of ``input``, and its dtype, or float32 with a 16-bit ``input``, or 16 bits with a float32
            ``input``. Any strides: input and gate are usually slices of one projection.
        normalized_shape: see :func:`rms_norm`.
        weight: see :func:`rms_norm`. For the groups of Mamba-2, its shape is ``[groups, columns]``, and ``input`` and
            ``gate`` are viewed as ``[*, groups, columns]``.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        activation: the activation of the gate: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``.
        norm_before_gate: False applies the gate before the mean of squares is taken.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``.

    Raises:
        RuntimeError: see :func:`rms_norm`.
        TypeError: see :func:`rms_norm`.

    Example:
        >>> import torch, normops
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])
        >>> normops.gated_rms_norm(x, gate, 2, eps=0.0, activation="sigmoid")
        tensor([[0.4243, 1.1314]])
        >>> normops.gated_rms_norm(x, gate, 2, eps=0.0, activation="sigmoid", norm_before_gate=False)
        tensor([[0.4966, 1.3242]])
    """
    if not torch.compiler.is_dynamo_compiling():
        output = _C.gated_rms_norm(
            input, gate, normalized_shape, weight, eps, weight_offset, rounding, activation, norm_before_gate
        )
        if output is not NotImplemented:
            return output
    check_numbers("gated_rms_norm", eps=eps, weight_offset=weight_offset)
    return call(
        torch.ops.normops.gated_rms_norm.default,
        input,
        gate,
        as_shape(normalized_shape),
        weight,
        eps,
        weight_offset=weight_offset,
        rounding=rounding,
        activation=activation,
        norm_before_gate=norm_before_gate,
    )


def rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Tensor:
    r"""Normalizes each head of queries or keys and rotates it by the angles of its position, in one pass.

    With :math:`u = \mathrm{rms\_norm}(x)` and :math:`h` half the rotated columns, for :math:`i < h`

    .. math:: y_i = u_i \cos_i - u_{i+h} \sin_i \qquad y_{i+h} = u_{i+h} \cos_{i+h} + u_i \sin_{i+h}

    or, interleaved, the same of columns :math:`2i` and :math:`2i+1` (Su et al., "RoFormer: Enhanced Transformer with
    Rotary Position Embedding", 2021). The function computes everything in float32 (in float64 for float64 inputs) and
    rounds once. It is differentiable in ``input`` and ``weight``. If ``cos`` or ``sin`` requires a gradient, it falls
    back to a composition of PyTorch operators. Under ``torch.compile`` it is one operator forward,
    ``normops.rms_norm_rope``, and one backward, ``normops.rms_norm_rope_backward``.

    Args:
        input: shape ``[*, columns]``, such as ``[batch, sequence, heads, head_dim]``. Any strides: slices of a packed
            projection, or the transpose ``[batch, heads, sequence, head_dim]``, are read in place.
        cos: the cosine for each rotated column, shape ``[*, rotary_dim]``; or for each pair of columns, shape ``[*,
            rotary_dim / 2]``, which requires the argument ``rotary_dim``. The leading dimensions broadcast to those of
            ``input`` without a copy: ``[sequence, 1, rotary_dim]`` has the same angles for all samples and heads. The
            dtype of ``input``, or float32 if ``input`` has 16 bits.
        sin: the sines; shape and dtype of ``cos``.
        normalized_shape: the last dimension of ``input``, and only that.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        interleaved: True rotates pairs of adjacent columns, as in GPT-J, GLM and Cohere; False rotates column ``i`` of
            the first half with column ``i`` of the second half.
        rotary_dim: the number of rotated columns, which is even. None means all columns of ``input``. The other
            columns are only normalized.
        rotary_offset: the first rotated column.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``.

    Raises:
        RuntimeError: see :func:`rms_norm`. Also if ``normalized_shape`` is not one dimension, or if ``rotary_dim`` is
            odd or selects columns that ``input`` does not have. Also if ``cos`` or ``sin`` does not broadcast, or has
            neither ``rotary_dim`` columns nor half as many.
        TypeError: see :func:`rms_norm`.

    Example:
        >>> import torch, normops
        >>> query = torch.randn(2, 7, 4, 64)  # batch, sequence, heads, head_dim
        >>> angles = torch.outer(torch.arange(7.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)  # for all heads
        >>> normops.rms_norm_rope(query, cos, sin, 64, torch.ones(64), rotary_dim=64).shape
        torch.Size([2, 7, 4, 64])
    """
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm_rope(
            input,
            cos,
            sin,
            normalized_shape,
            weight,
            eps,
            weight_offset,
            rounding,
            interleaved,
            rotary_dim,
            rotary_offset,
        )
        if output is not NotImplemented:
            return output
    check_numbers("rms_norm_rope", eps=eps, weight_offset=weight_offset)
    return call(
        torch.ops.normops.rms_norm_rope.default,
        input,
        cos,
        sin,
        as_shape(normalized_shape),
        weight,
        eps,
        weight_offset=weight_offset,
        rounding=rounding,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
    )


def rms_norm_(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    bias: Tensor | None = None,
) -> Tensor:
    """Applies :func:`rms_norm` in place, for inference: the result replaces ``input``, which is returned.

    Args:
        input: see :func:`rms_norm`; overwritten.
        normalized_shape: see :func:`rms_norm`.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        bias: see :func:`rms_norm`.

    Returns:
        ``input``.

    Raises:
        RuntimeError: see :func:`rms_norm`. Also if an argument requires a gradient and gradients are enabled, or if
            ``input`` is an expanded tensor or partially overlaps another argument.
        TypeError: see :func:`rms_norm`.

    Example:
        >>> import torch, normops
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> normops.rms_norm_(x, 2, eps=0.0) is x
        True
        >>> x
        tensor([[0.8485, 1.1314]])
    """
    check_numbers("rms_norm_", eps=eps, weight_offset=weight_offset)
    op, shape = torch.ops.normops.rms_norm_.default, as_shape(normalized_shape)
    return call(op, input, shape, weight, eps, weight_offset=weight_offset, rounding=rounding, bias=bias)


def add_rms_norm_(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    alpha: float = 1,
) -> tuple[Tensor, Tensor]:
    """Applies :func:`add_rms_norm` in place, for inference: the norm replaces ``input``, and the sum ``residual``.

    The operator ``torch.ops.normops.add_rms_norm_`` returns nothing, because the dispatcher cannot box an operator that
    returns several of its arguments.

    Args:
        input: see :func:`add_rms_norm`; overwritten.
        residual: see :func:`add_rms_norm`; overwritten.
        normalized_shape: see :func:`rms_norm`.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`add_rms_norm`.
        alpha: see :func:`add_rms_norm`.

    Returns:
        ``(input, residual)``.

    Raises:
        RuntimeError: see :func:`add_rms_norm`. Also if an argument requires a gradient and gradients are enabled, or if
            ``input`` and ``residual`` share memory or one of them is expanded.
        TypeError: see :func:`add_rms_norm`.

    Example:
        >>> import torch, normops
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> output, total = normops.add_rms_norm_(x, residual, 2, eps=0.0)
        >>> output is x and total is residual
        True
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    check_numbers("add_rms_norm_", eps=eps, weight_offset=weight_offset, alpha=alpha)
    op, shape = torch.ops.normops.add_rms_norm_.default, as_shape(normalized_shape)
    call(op, input, residual, shape, weight, eps, weight_offset=weight_offset, rounding=rounding, alpha=alpha)
    return input, residual


def rms_norm_rope_(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0,
    rounding: Rounding = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Tensor:
    """Applies :func:`rms_norm_rope` in place, for inference: the result replaces ``input``, which is returned.

    Args:
        input: see :func:`rms_norm_rope`; overwritten.
        cos: see :func:`rms_norm_rope`.
        sin: see :func:`rms_norm_rope`.
        normalized_shape: see :func:`rms_norm_rope`.
        weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        interleaved: see :func:`rms_norm_rope`.
        rotary_dim: see :func:`rms_norm_rope`.
        rotary_offset: see :func:`rms_norm_rope`.

    Returns:
        ``input``.

    Raises:
        RuntimeError: see :func:`rms_norm_rope`. Also if an argument requires a gradient and gradients are enabled, or
            if ``input`` is an expanded tensor or partially overlaps another argument.
        TypeError: see :func:`rms_norm`.

    Example:
        >>> import torch, normops
        >>> qkv = torch.randn(7, 3, 4, 64)  # a packed projection: queries, keys and values
        >>> cos, sin = torch.ones(7, 1, 64), torch.zeros(7, 1, 64)
        >>> query = normops.rms_norm_rope_(qkv[:, 0], cos, sin, 64)
        >>> query.data_ptr() == qkv.data_ptr()
        True
    """
    check_numbers("rms_norm_rope_", eps=eps, weight_offset=weight_offset)
    return call(
        torch.ops.normops.rms_norm_rope_.default,
        input,
        cos,
        sin,
        as_shape(normalized_shape),
        weight,
        eps,
        weight_offset=weight_offset,
        rounding=rounding,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
    )


def _rms_norm_over(
    dim: int | None,
    activation: Activation | None,
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: Rounding,
    bias: Tensor | None,
) -> Tensor:
    """Applies :func:`rms_norm` over one dimension, or with an activation."""
    if activation is not None and activation not in ACTIVATIONS:
        raise RuntimeError(
            f'rms_norm: expected activation to be "silu", "swish", "sigmoid" or None, but got {activation!r}'
        )
    check_numbers("rms_norm", eps=eps, weight_offset=weight_offset)
    shape, others = tuple(as_shape(normalized_shape)), (eps, weight_offset, rounding)
    of_rows = torch.ops.normops.rms_norm.default
    if dim is None:
        return _activated(of_rows(input, shape, weight, *others, bias), activation)
    if not -input.dim() <= dim < input.dim():
        raise RuntimeError(f"rms_norm: expected dim to be one of {input.dim()} dimensions of input, but got {dim}")
    size, behind = input.shape[dim], (-1 - dim) % input.dim()
    if shape != (size,):
        raise RuntimeError(
            f"rms_norm: expected normalized_shape to be {[size]}, the size of dimension {dim} of input, but got "
            f"{[*shape]}"
        )
    weight, bias = _along("weight", weight, size, behind), _along("bias", bias, size, behind)
    if behind == 0:
        return _activated(of_rows(input, shape, weight, *others, bias), activation)
    if not input.is_nested and _is_innermost(input, dim):  # the output has the memory order of the input
        return _activated(of_rows(input.movedim(dim, -1), shape, weight, *others, bias), activation).movedim(-1, dim)
    name = "identity" if activation is None else activation
    over_channels = torch.ops.normops.channel_rms_norm.default
    return over_channels(input, shape, weight, *others, bias, dim=-1 - behind, activation=name)


def _is_innermost(input: Tensor, dim: int) -> bool:
    """Returns whether ``dim`` is innermost in memory, as the channels of channels-last tensors are, and not the last.

    The answer depends on two strides, and so does the memory order of the output: it is the same for real and fake
    tensors. Sizes that depend on data may leave a stride unknown, which then counts as another than 1.
    """
    strides = input.stride(dim), input.stride(-1)
    if torch.compiler.is_compiling() or any(isinstance(stride, torch.SymInt) for stride in strides):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(strides[0] == 1) and not guard_or_false(strides[1] == 1)
    return strides[0] == 1 != strides[1]


def _activated(output: Tensor, activation: Activation | None) -> Tensor:
    return output if activation is None else ACTIVATIONS[activation](output)


def _along(name: str, tensor: Tensor | None, size: int, behind: int) -> Tensor | None:
    """Returns a weight or a bias as ``[size]``; it may broadcast over the ``behind`` dimensions after it."""
    if tensor is None or tensor.shape == (size,):
        return tensor
    if tensor.dim() <= behind or tensor.shape[-1 - behind] != size or tensor.numel() != size:
        raise RuntimeError(
            f"rms_norm: expected {name} to have shape {[size]} or {[size, *[1] * behind]}, but got {[*tensor.shape]}"
        )
    return tensor.flatten()
