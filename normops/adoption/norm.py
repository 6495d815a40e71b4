"""Describes a recognised RMSNorm."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from normops.adoption.guards import Guard
from normops.adoption.structure import Gating
from normops.inductor.calls import HALVES

OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""The dtype that a norm returns. "promoted" is the promotion of the dtypes of input and weight, and so is the last one
unless the weight has 16 bits."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits. Twice: the normalized input, then its product with the weight, or, without a
weight, its sum with the bias. Thrice: also the product of that with a gate, or its sum with the bias."""

Order = Literal["kept", "contiguous", "unknown", "raises"]
"""The order in memory of the result's rows for an input whose strides are not in descending order.

"raises": the forward views its input in another shape, and raises an error if rows are not adjacent.
"""

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""The dtypes of input, weight (without one, of the bias) and gate; None for a tensor that the norm does not have."""


class Gate(NamedTuple):
    """The gate of a norm."""

    argument: str
    gating: Gating
    widens: bool
    """True if the output has the gate's dtype when that is wider than the input's."""


class Saved(NamedTuple):
    """A case in which a module's own forward saves a tensor itself for its backward, not a copy."""

    # bfloat16 also represents float16.

    dtype: torch.dtype
    weight_dtype: torch.dtype
    requires_grad: tuple[bool, ...]
    """True for each tensor that requires a gradient: input, weight (without one, the bias) and gate."""
    tensor: int
    """The index of the saved tensor among these."""


class Norm(NamedTuple):
    """Defines how normops computes what a module computes, and the conditions for that."""

    arguments: tuple[str, ...]
    """The names of the forward's arguments."""
    weight: str | None
    """The name of the parameter."""
    bias: str | None
    """The name of the parameter that is added after the weight. It must have the weight's shape and dtype."""
    dim: int | None
    """The normalized dimension, if it is not the last one."""
    parameter_dims: int
    """The number of the parameters' dimensions. With ``dim``, all after the first have size 1."""
    shape: tuple[int, ...] | None
    """The required last dimensions of an input, if the forward was not verified for others."""
    takes_empty: bool
    """True if the forward accepts an input without elements."""
    normalized_dims: int
    """The number of normalized last dimensions: the parameters' dimensions without dimensions of groups."""
    eps: str | float | None
    """The name of the attribute, or the value if no attribute holds it."""
    weight_offset: float
    group_size: int | None
    """The number of elements that are normalized together, if fewer than in the normalized dimensions."""
    output_dtype: OutputDtype
    rounds: Roundings
    gate: Gate | None
    dims: tuple[int, ...]
    """The supported numbers of dimensions of the input."""
    dtypes: frozenset[Dtypes]
    """The supported dtypes."""
    order: Order
    autocasts: bool
    """True if autocast may change the dtype of the computation."""
    saves: frozenset[Saved]
    guards: tuple[Guard, ...]
    """The other values that the forward reads."""

    def __str__(self) -> str:
        """Returns one line for the table that :func:`normops.patch` prints."""
        factor = "no weight" if self.weight is None else self.weight
        factor = factor if self.weight_offset == 0.0 else f"{self.weight_offset:g} + {factor}"
        factor = factor if self.bias is None else f"{factor}, {self.bias}"
        factor = factor if self.dim is None else f"{factor}, over dimension {self.dim}"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        output = "" if self.output_dtype == "input's" else f", dtype: {self.output_dtype}"
        rounding = "" if self.rounds == "once" else f", rounds {self.rounds}"
        gating = ""
        if self.gate is not None:
            activation, norm_before_gate = self.gate.gating
            gating = f", {activation}({self.gate.argument}) {'after' if norm_before_gate else 'before'} the norm"
        return f"{factor}, eps: {self.eps}{groups}{gating}{output}{rounding}"


def _of_input(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return input


def _of_weight_with_16_bits(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return weight if weight in HALVES else torch.promote_types(input, weight)


OUTPUT_DTYPES: dict[OutputDtype, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    "input's": _of_input,
    "promoted": torch.promote_types,  # Llama
    "weight's, if it has 16 bits": _of_weight_with_16_bits,  # T5
}
