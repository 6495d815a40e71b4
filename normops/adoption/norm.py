"""What is known of an RMSNorm that somebody else wrote."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normops.adoption.structure import Gating
from normops.adoption.watching import Global

HALVES = (torch.float16, torch.bfloat16)

SLOTS = ("_old_forward", "forward")
"""Where a module keeps a forward that it was given instead of its class's, the one that computes first: hooks of
accelerate take the place of ``forward``, and call what they found there."""

ENTRIES = (*SLOTS, "__reduce_ex__")
"""What may be among the attributes of a patched module."""

OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""Which dtype a norm returns. Promoted, and without such a weight in the last case: from those of both."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits; twice: the normalized input, then its product with the weight; thrice: then that
multiplied by a gate, too."""

Order = Literal["kept", "contiguous", "unknown"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class Gate(NamedTuple):
    """How a norm takes one."""

    argument: str
    is_optional: bool
    gating: Gating
    widens: bool
    """Whether a gate of a wider dtype than the input makes the output as wide."""


class Saved(NamedTuple):
    """That a module's own forward saves a tensor for its backward as it was given."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    """As that of the input: bfloat16 stands for float16, too."""
    requires_grad: tuple[bool, ...]
    """Of what the forward takes, and of the weight."""
    tensor: int
    """Which of these it saves."""


class Norm(NamedTuple):
    """How normops computes what a module computes, and what has to hold for that."""

    argument: str
    """The name of what its forward takes."""
    weight: str | None
    """The parameter."""
    weight_dims: int
    shape: tuple[int, ...] | None
    """That of the end of its input, where that is fixed and there is no weight."""
    normalized_dims: int
    """How many of the last dimensions are normalized: all of the weight's, or those after its groups'."""
    eps: str | float | None
    """The attribute, or the value where it has none."""
    weight_offset: float
    group_size: int | None
    """How many elements are normalized together, if it is not the whole of the normalized shape."""
    output_dtype: OutputDtype
    rounds: Roundings
    gate: Gate | None
    dims: tuple[int, ...]
    """How many dimensions its input may have."""
    dtypes: frozenset[tuple[torch.dtype, ...]] | None
    """Of input, weight and gate, as far as there are such, if not all are taken."""
    order: Order
    """How the result of an input lies in memory whose rows lie in another order than theirs."""
    autocasts: bool
    """Whether autocast may change the dtype in which it computes."""
    saves: frozenset[Saved]
    attributes: tuple[tuple[str, Any], ...]
    """What else it reads of itself."""
    globals: tuple[Global, ...]
    """What it reads of modules and classes."""

    def __str__(self) -> str:
        """For a table."""
        factor = "no weight" if self.weight is None else self.weight
        factor = factor if self.weight_offset == 0.0 else f"{self.weight_offset:g} + {factor}"
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
