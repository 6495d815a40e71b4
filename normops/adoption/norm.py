"""Describes a norm: its form, which many classes share, and the names that it has in one module."""

from collections.abc import Callable
from itertools import product
from typing import Literal, NamedTuple

import torch

from normops.adoption.guards import Guard
from normops.functional import Activation

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)

ModelRounding = Literal["once", "original"]
"""Where the operators round: once, or as the model does."""


By = Literal["source", "measurement"]
"""How a norm is recognised: by its source alone, or, if that is unknown, by its results."""


def check_rounding(rounding: object) -> None:
    """Raises a ValueError for another rounding."""
    if rounding not in ("once", "original"):
        raise ValueError(f'rounding: expected "once" or "original", but got {rounding!r}')


def check_by(by: object) -> None:
    """Raises a ValueError for another way of recognition."""
    if by not in ("source", "measurement"):
        raise ValueError(f'by: expected "source" or "measurement", but got {by!r}')


OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""The dtype that a norm returns. "promoted" is the promotion of the dtypes of input and weight, and so is the last one
unless the weight has 16 bits."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits. Twice: the normalized input, then its product with the weight, or, without a
weight, its sum with the bias. Thrice: also the product of that with a gate, or its sum with the bias."""

Order = Literal["kept", "contiguous", "unknown"]
"""The order in memory of the result's rows for an input whose strides are not in descending order."""

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""The dtypes of input, weight (without one, of the bias) and gate; None for a tensor that the norm does not have."""


class Unfit(Exception):  # noqa: N818  nothing failed
    """The reason why a module is not an RMSNorm, or is not treated as one, and the code that a user can write."""

    def __init__(self, reason: str, remedy: str = "write normops.rms_norm into its forward") -> None:
        super().__init__(f"{reason}; {remedy}")


class Gating(NamedTuple):
    """How a norm applies its gate."""

    activation: Activation
    norm_before_gate: bool


class Saved(NamedTuple):
    """A case in which a module's own forward saves a tensor itself for its backward, not a copy."""

    # bfloat16 also represents float16.

    dtype: torch.dtype
    weight_dtype: torch.dtype
    requires_grad: tuple[bool, ...]
    """True for each tensor that requires a gradient: input, weight (without one, the bias) and gate."""
    tensor: int
    """The index of the saved tensor among these."""


class Form(NamedTuple):
    """The properties that norms of one kind share. They are measured, not read from a source."""

    weight_offset: float
    eps: float | Literal["normalize"] | None
    """The value if no attribute holds it; "normalize": 1e-24 divided by the number of elements, as F.normalize has."""
    dim: int | None
    """The normalized dimension, if it is not the last one."""
    gating: Gating | None
    output_dtype: OutputDtype
    rounds: Roundings
    order: Order
    autocasts: bool
    """True if autocast may change the dtype of the computation."""
    dims: tuple[int, ...] | None
    """The supported numbers of dimensions of the input; None for all from the parameter's to five."""
    excludes: frozenset[Dtypes]
    """The dtypes that are not supported."""
    saves: frozenset[Saved]


class Norm(NamedTuple):
    """Defines how normops computes what a module computes, and the conditions for that."""

    form: Form
    arguments: tuple[str, ...]
    """The names of the forward's arguments: the input, then the gate."""
    weight: str | None
    """The name of the parameter."""
    bias: str | None
    """The name of the parameter that is added after the weight. It must have the weight's shape and dtype."""
    eps: str | float | None
    """The name of the attribute, or the value if no attribute holds it."""
    group_size: int | None
    """The number of elements that are normalized together, if fewer than in the normalized dimensions."""
    parameter_dims: int
    """The number of the parameters' dimensions. With ``dim``, all after the first have size 1."""
    normalized_dims: int
    """The number of normalized last dimensions."""
    shape: tuple[int, ...] | None
    """The required last dimensions of an input, if the norm has no parameter and holds for no others."""
    dims: tuple[int, ...]
    """The supported numbers of dimensions of the input."""
    is_measured: bool
    """True if the source is unknown."""
    guards: tuple[Guard, ...]

    @property
    def dtypes(self) -> frozenset[Dtypes]:
        """The supported dtypes."""
        has_parameter, is_gated = self.parameter_dims > 0, self.form.gating is not None
        weights: tuple[torch.dtype | None, ...] = DTYPES if has_parameter else (None,)
        gates: tuple[torch.dtype | None, ...] = DTYPES if is_gated else (None,)
        found = {
            (x, weight, gate)
            for x, weight, gate in product(DTYPES, weights, gates)
            if not is_gated or ({weight, gate} - {None} <= {x, torch.float32})
        }
        return frozenset(found) - self.form.excludes

    def __str__(self) -> str:
        """Returns one line for the table that :func:`normops.patch` prints."""
        form = self.form
        factor = "no weight" if self.weight is None else self.weight
        factor = factor if form.weight_offset == 0.0 else f"{form.weight_offset:g} + {factor}"
        factor = factor if self.bias is None else f"{factor}, {self.bias}"
        factor = factor if form.dim is None else f"{factor}, over dimension {form.dim}"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        output = "" if form.output_dtype == "input's" else f", dtype: {form.output_dtype}"
        rounding = "" if form.rounds == "once" else f", rounds {form.rounds}"
        gating = ""
        if form.gating is not None:
            place = "after" if form.gating.norm_before_gate else "before"
            gating = f", {form.gating.activation}({self.arguments[1]}) {place} the norm"
        measured = ", measured" if self.is_measured else ""
        return f"{factor}, eps: {self.eps}{groups}{gating}{output}{rounding}{measured}"


def _of_input(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return input


def _of_weight_with_16_bits(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return weight if weight in HALVES else torch.promote_types(input, weight)


OUTPUT_DTYPES: dict[OutputDtype, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    "input's": _of_input,
    "promoted": torch.promote_types,  # Llama
    "weight's, if it has 16 bits": _of_weight_with_16_bits,  # T5
}
