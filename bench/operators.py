"""Defines the measured operators. A new one needs an entry in OPERATORS, and in the peers that have it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

import normops  # noqa: F401  registers the operators
from reference import operators as reference
from reference import oracle
from reference.oracle import Bounded

EPS = 1e-5

# Outputs are in memory that calls are given, or in memory that they allocate.
MEMORIES = ("preallocated", "fresh")

# Tensors with cols elements. Those in neither of these tuples nor in MODULATIONS have rows x cols.
VECTORS = ("weight", "grad_weight", "bias", "grad_bias")
TABLES = ("cos", "sin")
HEADS = 16
# Tensors with a row for each sample, and the arguments that take them. Samples divide the rows.
MODULATIONS = {"scale": "weight", "shift": "bias", "grad_scale": "grad_weight", "grad_shift": "grad_bias"}
SAMPLES = 2


def heads_of(rows: int) -> int:
    """Returns how many rows share a row of a table."""
    return HEADS if rows % HEADS == 0 else 1


def samples_of(rows: int) -> int:
    return SAMPLES if rows % SAMPLES == 0 else 1


@dataclass(frozen=True)
class Operator:
    name: str
    reads: tuple[str, ...]
    """The tensors that must be read, repeated if two combined operators both read them."""
    writes: tuple[str, ...]
    expected: Callable[[Mapping[str, Tensor]], tuple[Bounded, ...]]
    """The oracle's values and bounds of the results, in their order."""
    memories: tuple[str, ...] = MEMORIES

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the operator by its name, as lambdas cannot be sent to another process."""
        return _named, (self.name,)

    def elements(self, rows: int, cols: int) -> int:
        counts = dict.fromkeys(VECTORS, cols) | dict.fromkeys(TABLES, rows // heads_of(rows) * cols)
        counts |= dict.fromkeys(MODULATIONS, samples_of(rows) * cols)
        return sum(counts.get(name, rows * cols) for name in self.reads + self.writes)


def in_shape(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views the inputs in the operator's shape: by samples, by channels, or by heads that share tables."""
    rows, cols = inputs["input"].shape
    if "scale" in inputs:
        samples = inputs["scale"].shape[0]
        return {name: t if name in MODULATIONS else t.view(samples, -1, cols) for name, t in inputs.items()}
    if "bias" in inputs:  # the memory is one sample of [channels, positions]
        return {name: t if name in VECTORS else t.view(1, cols, rows) for name, t in inputs.items()}
    if "cos" in inputs:
        heads = rows // inputs["cos"].shape[0]
        heads_of_tensors = dict.fromkeys(inputs, heads) | dict.fromkeys(TABLES, 1)
        views = {name: t.view(-1, heads_of_tensors[name], cols) for name, t in inputs.items() if name not in VECTORS}
        return {**inputs, **views}
    return dict(inputs)


# The same inputs are checked for several peers and memories, and the oracle takes longer than the peers. The cache
# holds the results of a forward and a backward.
@lru_cache(maxsize=2)
def _expected(
    compute: Callable[..., Any], options: tuple[tuple[str, object], ...], names: tuple[str, ...], *tensors: Tensor
) -> tuple[Bounded, ...]:
    inputs = in_shape(dict(zip(names, tensors, strict=True)))
    arguments = {MODULATIONS.get(name, name): tensor for name, tensor in inputs.items()}
    shape = tuple(arguments["weight"].shape[-1:])
    results = compute(**arguments, normalized_shape=shape, eps=EPS, **dict(options))
    results = (results,) if isinstance(results, Bounded) else results
    return tuple(
        Bounded(*(part.reshape(-1, part.shape[-1]) if part.ndim > 2 else part for part in result))
        for result in results
        if result is not None
    )


def _measured(
    name: str, compute: Callable[..., Any], reads: tuple[str, ...], writes: tuple[str, ...], **options: object
) -> Operator:
    """Returns an operator, which the oracle's function computes with these options."""
    given = tuple(options.items())
    return Operator(name, reads, writes, lambda inputs: _expected(compute, given, reads, *(inputs[n] for n in reads)))


def _described(operator: reference.Operator, name: str | None = None, optional: tuple[str, ...] = ()) -> Operator:
    """Returns the operator with a weight and the named optional tensors."""
    reads = tuple(n for n in operator.inputs if n in ("weight", *optional) or not operator.is_optional(n))
    writes = tuple(n for n in operator.outputs if reference.of_argument(n) in reads)
    return _measured(name or operator.name, operator.oracle, reads, writes)


def _one_after_another(name: str, *operators: Operator) -> Operator:
    """Returns a sequence of operators that autograd calls; it allocates the gradients, so outputs are fresh."""
    return Operator(
        name,
        tuple(read for operator in operators for read in operator.reads),
        tuple(output for operator in operators for output in operator.writes),
        lambda inputs: tuple(bounded for operator in operators for bounded in operator.expected(inputs)),
        memories=("fresh",),
    )


# Without the operators in two steps: each step reads the same tensors as the operator in one step.
_OF = {operator.name: _described(operator) for operator in reference.OPERATORS if not operator.sums}
_MODULATED_READS, _CHANNEL_READS = ("input", "scale", "shift"), ("input", "weight", "bias")
_OFFSET: dict[str, object] = {"weight_offset": 1.0}
_CHANNELS: dict[str, object] = {"dim": -2, "activation": "silu"}  # as in models
_MODULATED = (
    _measured("modulated_rms_norm", oracle.rms_norm, _MODULATED_READS, ("output",), **_OFFSET),
    _measured(
        "modulated_rms_norm_backward",
        oracle.rms_norm_backward,
        ("grad_output", *_MODULATED_READS),
        ("grad_input", "grad_scale", "grad_shift"),
        **_OFFSET,
    ),
)
_OVER_CHANNELS = (
    _measured("channel_rms_norm", oracle.channel_rms_norm, _CHANNEL_READS, ("output",), **_CHANNELS),
    _measured(
        "channel_rms_norm_backward",
        oracle.channel_rms_norm_backward,
        ("grad_output", *_CHANNEL_READS),
        ("grad_input", "grad_weight", "grad_bias"),
        **_CHANNELS,
    ),
)

OPERATORS = (
    *_OF.values(),
    _one_after_another("forward_backward", _OF["rms_norm"], _OF["rms_norm_backward"]),
    # Its input is the sum.
    _described(reference.RMS_NORM_BACKWARD, "add_rms_norm_backward", ("grad_residual",)),
    _one_after_another("gated_forward_backward", _OF["gated_rms_norm"], _OF["gated_rms_norm_backward"]),
    _one_after_another("rope_forward_backward", _OF["rms_norm_rope"], _OF["rms_norm_rope_backward"]),
    *_MODULATED,
    _one_after_another("modulated_forward_backward", *_MODULATED),
    *_OVER_CHANNELS,
    _one_after_another("channel_forward_backward", *_OVER_CHANNELS),
)


def _named(name: str) -> Operator:
    return next(operator for operator in OPERATORS if operator.name == name)
