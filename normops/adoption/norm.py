"""All that is known about an RMSNorm that somebody else wrote, once it has been recognised."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from normops.adoption.guards import Guard
from normops.adoption.structure import Gating
from normops.inductor.calls import HALVES

OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""Which dtype a norm returns. "promoted" is made of the dtypes of input and weight, and so is the last one unless the
weight has 16 bits."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits. Twice: the normalized input, then its product with the weight, or without one its
sum with the bias. Thrice: then the product of that with a gate, or its sum with the bias, too."""

Order = Literal["kept", "contiguous", "unknown", "raises"]
"""How the result lies in memory if the input's rows lie in another order than that of its dimensions.

"raises": the forward takes no inputs between whose rows something else lies, as it views them in another shape.
"""

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""Those of input, weight (or without one the bias) and gate, as far as a norm has these."""


class Gate(NamedTuple):
    """How a norm takes a gate."""

    argument: str
    gating: Gating
    widens: bool
    """Whether a gate of a wider dtype than the input makes the output as wide."""


class Saved(NamedTuple):
    """A case in which a module's own forward saves a tensor for its backward as it was given, not a copy of it."""

    # bfloat16 stands for float16, too.

    dtype: torch.dtype
    weight_dtype: torch.dtype
    requires_grad: tuple[bool, ...]
    """Whether they require a gradient: input, weight (or without one the bias) and gate."""
    tensor: int
    """The index of the saved one among these."""


class Norm(NamedTuple):
    """How normops computes what a module computes, and what has to hold for that."""

    arguments: tuple[str, ...]
    """The names of the arguments of its forward."""
    weight: str | None
    """The name of the parameter."""
    bias: str | None
    """The name of the parameter that is added after the weight. It must have the weight's shape and dtype."""
    dim: int | None
    """The dimension that is normalized, if it is not the last one."""
    parameter_dims: int
    """How many the parameters have; those of a norm over another dimension have ones behind the first."""
    shape: tuple[int, ...] | None
    """The last dimensions that an input must have, if it is not known what the forward computes for others."""
    takes_empty: bool
    """Whether it takes an input without elements."""
    normalized_dims: int
    """How many of the last dimensions are normalized: as many as the parameters have, without those of its groups."""
    eps: str | float | None
    """The name of the attribute, or the value if it is in no attribute."""
    weight_offset: float
    group_size: int | None
    """How many elements are normalized together, if these are fewer than the normalized dimensions have."""
    output_dtype: OutputDtype
    rounds: Roundings
    gate: Gate | None
    dims: tuple[int, ...]
    """How many dimensions its input may have."""
    dtypes: frozenset[Dtypes]
    """Those that it takes."""
    order: Order
    autocasts: bool
    """Whether autocast may change the dtype in which it computes."""
    saves: frozenset[Saved]
    guards: tuple[Guard, ...]
    """What its forward reads besides."""

    def __str__(self) -> str:
        """In a line, for the table that :func:`normops.patch` prints."""
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
