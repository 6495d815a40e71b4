"""Computes a recognised norm with normops: in one call of an operator, if dtypes allow it."""

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from normops.adoption.norm import HALVES, OUTPUT_DTYPES, Dtypes, ModelRounding, Norm, Saved
from normops.functional import ACTIVATIONS, Rounding, gated_rms_norm, rms_norm

Compute = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float | None], Tensor]
"""A function of input, gate, weight, bias and eps."""


def function_of(norm: Norm, rounding: ModelRounding) -> Compute:
    """Returns the function that computes a norm."""
    form, size, dims = norm.form, norm.group_size, norm.normalized_dims
    offset, dim = form.weight_offset, form.dim
    gating: Any = form.gating or ("silu", True)
    activation, norm_before_gate = gating
    mode = mode_of(norm, rounding)
    dtype_of = OUTPUT_DTYPES[form.output_dtype]

    def call(
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
        rounding: Rounding,
    ) -> Tensor:
        shape = x.size(-1 if dim is None else dim) if dims == 1 else x.shape[-dims:]
        if size is not None:
            x = x.unflatten(-1, (-1, size))
            gate, weight, bias = (
                each if each is None else each.unflatten(-1, (-1, size)) for each in (gate, weight, bias)
            )
            shape = size
        if gate is None:
            y = rms_norm(x, shape, weight, eps, weight_offset=offset, rounding=rounding, bias=bias, dim=dim)
        else:
            y = gated_rms_norm(
                x,
                gate_beside(gate, x.dtype),
                shape,
                weight,
                eps,
                weight_offset=offset,
                rounding=rounding,
                activation=activation,
                norm_before_gate=norm_before_gate,
            )
        return y if size is None else writable(y.flatten(-2))

    def compute(
        x: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float | None
    ) -> Tensor:
        parameter = bias if weight is None else weight
        if parameter is None or x.dtype == parameter.dtype:
            return call(x, gate, weight, bias, eps, mode)
        dtype = dtype_of(x.dtype, parameter.dtype)
        if mode == "once":
            return call(x.to(torch.promote_types(x.dtype, dtype)), gate, weight, bias, eps, mode).to(dtype)
        # The operator cannot round to the dtype of the product with a weight of another dtype. The factor, the
        # normalized input, is rounded to the output's or the input's dtype.
        first = dtype if form.output_dtype.startswith("weight") else x.dtype
        is_gated_after = gate is not None and norm_before_gate
        y = call(x.to(torch.promote_types(x.dtype, first)), None if is_gated_after else gate, None, None, eps, "once")
        y = y.to(first)
        if weight is not None:
            y = (weight if offset == 0.0 else _widened(weight) + offset) * y
        if gate is not None and is_gated_after:
            y = y * ACTIVATIONS[activation](_widened(gate))
        return y.to(dtype)

    return compute


def mode_of(norm: Norm, rounding: ModelRounding) -> Rounding:
    """Returns the operators' ``rounding`` that corresponds to that of :func:`patch`."""
    return "once" if rounding == "once" or norm.form.rounds == "once" else "llama"


def copies_of(norm: Norm) -> dict[tuple[Dtypes, tuple[bool, ...]], tuple[bool, ...]]:
    """Returns which of input, weight and gate must be copied before the computation, by dtypes and requires_grad.

    A tensor is copied if normops would save it for the backward, and the module saves a copy in another dtype: a
    program may then write to the tensor. Compiled code makes no copies, because Inductor would remove the copy of a
    graph input, and save the overwritten tensor.
    """
    needed = {
        (dtypes, requires): tuple(_is_copied(norm, dtypes, requires, i) for i in range(3))
        for dtypes in norm.dtypes
        for requires in product((False, True), repeat=3)
        if any(requires)
    }
    return {case: which for case, which in needed.items() if any(which)}


def _is_copied(norm: Norm, dtypes: Dtypes, requires: tuple[bool, ...], i: int) -> bool:
    x, weight, gate = (cast(torch.dtype, torch.bfloat16 if dtype in HALVES else dtype) for dtype in dtypes)
    # normops saves the weight only for the gradients of the other tensors, and no bias.
    if dtypes[i] is None or (i == 1 and (norm.weight is None or not (requires[0] or requires[2]))):
        return False
    # The experiments had a gate of the input's dtype.
    return gate not in (None, x) or Saved(x, x if weight is None else weight, requires, i) not in norm.form.saves


def gate_beside(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the gate, cast unless the operator supports its dtype with the input's.

    The operator supports the input's dtype, and float32 combined with a 16-bit dtype.
    """
    one_is_wide = (gate.dtype == torch.float32 and dtype in HALVES) or (gate.dtype in HALVES and dtype == torch.float32)
    return gate if gate.dtype == dtype or one_is_wide else gate.to(torch.promote_types(dtype, torch.float32))


def writable(view: Tensor) -> Tensor:
    """Returns a tensor that may be written to once gradients are enabled; a view made without gradients may not."""
    return view if torch.is_grad_enabled() else view.detach()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
