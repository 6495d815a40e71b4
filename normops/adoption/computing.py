"""How normops computes a norm that was recognised: in one call of its operators, if dtypes allow that."""

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from normops.adoption.norm import OUTPUT_DTYPES, Dtypes, Norm, Saved
from normops.functional import ACTIVATIONS, Rounding, gated_rms_norm, rms_norm
from normops.inductor import ModelRounding
from normops.inductor.calls import HALVES

Compute = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float | None], Tensor]
"""A function of input, gate, weight, bias and eps."""


def function_of(norm: Norm, rounding: ModelRounding) -> Compute:
    """The function that computes a norm."""
    offset, size, dims, dim = norm.weight_offset, norm.group_size, norm.normalized_dims, norm.dim
    gating: Any = ("silu", True) if norm.gate is None else norm.gate.gating
    activation, norm_before_gate = gating
    widens = norm.gate is not None and norm.gate.widens
    mode = mode_of(norm, rounding)
    dtype_of = OUTPUT_DTYPES[norm.output_dtype]

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
        if widens and gate is not None:
            x = x.to(torch.promote_types(x.dtype, gate.dtype))
        parameter = bias if weight is None else weight
        if parameter is None or x.dtype == parameter.dtype:
            return call(x, gate, weight, bias, eps, mode)
        dtype = dtype_of(x.dtype, parameter.dtype)
        if mode == "once":
            return call(x.to(torch.promote_types(x.dtype, dtype)), gate, weight, bias, eps, mode).to(dtype)
        # The product with a weight of another dtype is rounded to no dtype that the operator rounds to. What it
        # multiplies has a dtype of its own.
        first = dtype if norm.output_dtype.startswith("weight") else x.dtype
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
    """The ``rounding`` of the operators that rounds as :func:`patch` was asked to."""
    return "once" if rounding == "once" or norm.rounds == "once" else "llama"


def copies_of(norm: Norm) -> dict[tuple[Dtypes, tuple[bool, ...]], tuple[bool, ...]]:
    """Which of input, weight and gate are copied before they are computed with, by dtypes and requires_grad.

    Copied is what normops saves for the backward as it is, and the module does not. A module that computes in another
    dtype saves a copy in that one, so that programs may write into the tensor itself afterwards. Compiled code gets no
    copies from here: Inductor removes the copy of an input of its graph, and would save what is there after the write.
    There the passes make copies, as they know which tensors are inputs.
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
    # It was watched only with a gate of the input's dtype.
    return gate not in (None, x) or Saved(x, x if weight is None else weight, requires, i) not in norm.saves


def gate_beside(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """The gate, cast if the operator does not take its dtype beside the input's.

    It takes the same dtype, or float32 beside one of 16 bits.
    """
    one_is_wide = (gate.dtype == torch.float32 and dtype in HALVES) or (gate.dtype in HALVES and dtype == torch.float32)
    return gate if gate.dtype == dtype or one_is_wide else gate.to(torch.promote_types(dtype, torch.float32))


def writable(view: Tensor) -> Tensor:
    """The same, which may be written to once gradients are recorded again, unlike a view made where they are not."""
    return view if torch.is_grad_enabled() else view.detach()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
