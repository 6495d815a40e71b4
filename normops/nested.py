"""The operators on nested tensors of jagged layout: sequences of different lengths, packed into one tensor of values.

A norm over dimensions behind the ragged one, by a weight of such dimensions, is the norm of the values. normops imports
this module once nested tensors are used; derivatives and ``torch.compile`` are those of the operators.

Example:
    >>> import torch, normops
    >>> x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    >>> [tuple(sequence.shape) for sequence in normops.rms_norm(x, 8).unbind()]
    [(2, 8), (3, 8)]
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nested._internal.ops import extract_kwargs, raggedness_matches, register_jagged_func

_ops = torch.ops.normops


def rms_norm(
    op: OpOverload,
    input: NestedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``normops.rms_norm`` of the values."""
    _check("rms_norm", input, normalized_shape, weight)
    return _like(input, op(input._values, normalized_shape, weight, *args, **kwargs))


def add_rms_norm(
    op: OpOverload,
    input: NestedTensor,
    residual: NestedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """``normops.add_rms_norm`` of the values."""
    _check("add_rms_norm", input, normalized_shape, weight, residual=residual)
    output, residual_out = op(input._values, residual._values, normalized_shape, weight, *args, **kwargs)
    return _like(input, output), _like(input, residual_out)


def gated_rms_norm(
    op: OpOverload,
    input: NestedTensor,
    gate: NestedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``normops.gated_rms_norm`` of the values."""
    _check("gated_rms_norm", input, normalized_shape, weight, gate=gate)
    return _like(input, op(input._values, gate._values, normalized_shape, weight, *args, **kwargs))


def rms_norm_backward(
    op: OpOverload,
    grad_output: NestedTensor,
    input: NestedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *args: Any,
    grad_residual: NestedTensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """``normops.rms_norm_backward`` of the values; ``grad_weight`` is the sum over all sequences."""
    others = {"grad_output": grad_output} | ({} if grad_residual is None else {"grad_residual": grad_residual})
    _check("rms_norm_backward", input, normalized_shape, weight, **others)
    kwargs["grad_residual"] = None if grad_residual is None else grad_residual._values
    grad_input, grad_weight = op(grad_output._values, input._values, normalized_shape, weight, *args, **kwargs)
    return None if grad_input is None else _like(input, grad_input), grad_weight


def gated_rms_norm_backward(
    op: OpOverload,
    grad_output: NestedTensor,
    input: NestedTensor,
    gate: NestedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """``normops.gated_rms_norm_backward`` of the values; ``grad_weight`` is the sum over all sequences."""
    _check("gated_rms_norm_backward", input, normalized_shape, weight, gate=gate, grad_output=grad_output)
    values = (tensor._values for tensor in (grad_output, input, gate))
    *of_rows, grad_weight = op(*values, normalized_shape, weight, *args, **kwargs)
    return *(None if gradient is None else _like(input, gradient) for gradient in of_rows), grad_weight


def _check(
    name: str, input: NestedTensor, normalized_shape: Sequence[int], weight: Tensor | None, **others: NestedTensor
) -> None:
    dims = input.dim() - input._ragged_idx  # from the ragged one on
    if len(normalized_shape) >= dims:
        raise RuntimeError(
            f"{name}: expected normalized_shape to be dimensions behind the ragged one of input, whose shape is "
            f"{list(input.shape)}, but got {list(normalized_shape)}"
        )
    if weight is not None and weight.dim() >= dims:
        raise RuntimeError(
            f"{name}: expected weight to have dimensions behind the ragged one of input, whose shape is "
            f"{list(input.shape)}, but got {list(weight.shape)}"
        )
    for argument, tensor in others.items():
        if not raggedness_matches(input, tensor.shape):
            raise RuntimeError(
                f"{name}: expected {argument} to have the sequences of input, whose shape is {list(input.shape)}, "
                f"but got {list(tensor.shape)}"
            )


def _like(input: NestedTensor, values: Tensor) -> Tensor:
    return NestedTensor(values, **extract_kwargs(input))


for _op, _of_values, _nested in (
    (_ops.rms_norm, rms_norm, "input: jt_all"),
    (_ops.add_rms_norm, add_rms_norm, "input: jt_all, residual: jt_all"),
    (_ops.gated_rms_norm, gated_rms_norm, "input: jt_all, gate: jt_all"),
    (_ops.rms_norm_backward, rms_norm_backward, "grad_output: jt_all, input: jt_all"),
    (_ops.gated_rms_norm_backward, gated_rms_norm_backward, "grad_output: jt_all, input: jt_all, gate: jt_all"),
):
    register_jagged_func(_op.default, f"{_nested}, normalized_shape: any, weight: t?, ...")(_of_values)
