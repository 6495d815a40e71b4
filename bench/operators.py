"""Defines the measured operators. A new one needs an entry in OPERATORS, and in the peers that have it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
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


# The same inputs are checked for several peers and memories, and the oracle takes longer than the peers. The cache
# holds the results of a forward and a backward.
@lru_cache(maxsize=2)
def _expected(operator: reference.Operator, names: tuple[str, ...], *tensors: Tensor) -> tuple[Bounded, ...]:
    inputs = dict(zip(names, tensors, strict=True))
    arguments = {"normalized_shape": tuple(inputs["weight"].shape), "eps": EPS}
    return tuple(bounded for bounded in operator.expected(inputs | arguments) if bounded is not None)


def _measured(operator: reference.Operator, name: str | None = None, optional: tuple[str, ...] = ()) -> Operator:
    """Returns the operator with a weight and the named optional tensors."""
    reads = tuple(n for n in operator.inputs if n in ("weight", *optional) or not operator.is_optional(n))
    return Operator(
        name or operator.name,
        reads,
        tuple(n for n in operator.outputs if reference.of_argument(n) in reads),
        lambda inputs: _expected(operator, reads, *(inputs[name] for name in reads)),
    )


def of_samples(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views the inputs as [samples, rows of a sample, cols]."""
    samples, _, cols = inputs["scale"].shape
    return {name: t if name in MODULATIONS else t.view(samples, -1, cols) for name, t in inputs.items()}


def _modulated(operator: reference.Operator, reads: tuple[str, ...], writes: tuple[str, ...]) -> Operator:
    """Returns the operator with the weight 1 + scale and the bias shift."""

    def expected(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
        arguments: dict[str, object] = {MODULATIONS.get(n, n): t for n, t in of_samples(inputs).items() if n in reads}
        shape = (inputs["scale"].shape[-1],)
        bounded = operator.expected({**arguments, "normalized_shape": shape, "eps": EPS, "weight_offset": 1.0})
        rows = -1, *shape
        return tuple(Bounded(*(part.reshape(rows) for part in each)) for each in bounded if each is not None)

    return Operator(f"modulated_{operator.name}", reads, writes, expected)


def of_channels(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views the memory of the inputs as one sample of [channels, positions], with cols channels."""
    rows, cols = inputs["input"].shape
    return {name: t if name in VECTORS else t.view(1, cols, rows) for name, t in inputs.items()}


def _over_channels(operator: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Operator:
    """Returns the operator over channels with a bias and SiLU, as in models."""

    def expected(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
        given = of_channels({name: inputs[name] for name in reads})
        shape = tuple(inputs["weight"].shape)
        bounded = getattr(oracle, operator)(**given, normalized_shape=shape, eps=EPS, dim=-2, activation="silu")
        results = (bounded,) if isinstance(bounded, Bounded) else bounded
        rows, cols = inputs["input"].shape
        return tuple(
            each if name in VECTORS else Bounded(*(part.reshape(cols, rows) for part in each))
            for name, each in zip(writes, results, strict=True)
        )

    return Operator(operator, reads, writes, expected)


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
_OF = {operator.name: _measured(operator) for operator in reference.OPERATORS if not operator.sums}
_MODULATED = (
    _modulated(reference.RMS_NORM, ("input", "scale", "shift"), ("output",)),
    _modulated(
        reference.RMS_NORM_BACKWARD,
        ("grad_output", "input", "scale", "shift"),
        ("grad_input", "grad_scale", "grad_shift"),
    ),
)
_OVER_CHANNELS = (
    _over_channels("channel_rms_norm", ("input", "weight", "bias"), ("output",)),
    _over_channels(
        "channel_rms_norm_backward",
        ("grad_output", "input", "weight", "bias"),
        ("grad_input", "grad_weight", "grad_bias"),
    ),
)

OPERATORS = (
    *_OF.values(),
    _one_after_another("forward_backward", _OF["rms_norm"], _OF["rms_norm_backward"]),
    # Its input is the sum.
    _measured(reference.RMS_NORM_BACKWARD, "add_rms_norm_backward", ("grad_residual",)),
    _one_after_another("gated_forward_backward", _OF["gated_rms_norm"], _OF["gated_rms_norm_backward"]),
    _one_after_another("rope_forward_backward", _OF["rms_norm_rope"], _OF["rms_norm_rope_backward"]),
    *_MODULATED,
    _one_after_another("modulated_forward_backward", *_MODULATED),
    *_OVER_CHANNELS,
    _one_after_another("channel_forward_backward", *_OVER_CHANNELS),
)


def random_call(
    operator: reference.Operator,
    flags: reference.Flags,
    names: Sequence[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> partial[object]:
    """Returns a call of an operator with a weight and random tensors of these names, for an input of this shape."""
    inputs = {name: torch.randn(operator.shape_of(name, shape, flags)).to(dtype) for name in names}
    inputs["weight"] = torch.randn(shape[-1:]).to(dtype)
    return partial(operator.default, **inputs, **flags, normalized_shape=shape[-1:], eps=EPS)


def _named(name: str) -> Operator:
    return next(operator for operator in OPERATORS if operator.name == name)
