"""The operators that are measured. A new one is an entry in OPERATORS, and entries in the peers that have it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import oracle
from oracle import Bounded
from torch import Tensor

EPS = 1e-5

# Where outputs are: in memory that calls are given, or in memory that they allocate.
MEMORIES = ("preallocated", "fresh")

# Every other tensor has rows x cols elements.
VECTORS = ("weight", "grad_weight")


@dataclass(frozen=True)
class Operator:
    name: str
    reads: tuple[str, ...]
    """The tensors that have to be read, as often as they have to be: twice if the operator is two operators."""
    writes: tuple[str, ...]
    expected: Callable[[Mapping[str, Tensor]], tuple[Bounded, ...]]
    """The oracle's values and bounds of the results, in their order."""
    memories: tuple[str, ...] = MEMORIES

    def elements(self, rows: int, cols: int) -> int:
        return sum(cols if name in VECTORS else rows * cols for name in self.reads + self.writes)


# The same inputs are checked for several operators and memories, and the oracle takes longer than they do.
@lru_cache(maxsize=1)
def _forward(input: Tensor, weight: Tensor) -> Bounded:
    return oracle.rms_norm(input, tuple(weight.shape), weight, EPS)


@lru_cache(maxsize=1)
def _backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, grad_residual: Tensor | None = None
) -> tuple[Bounded, Bounded]:
    grad_input, grad_weight = oracle.rms_norm_backward(
        grad_output, input, tuple(weight.shape), weight, EPS, grad_residual=grad_residual
    )
    assert grad_weight is not None
    return grad_input, grad_weight


@lru_cache(maxsize=1)
def _add(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Bounded, Bounded]:
    h = input + residual
    return _forward(h, weight), Bounded(h.double().cpu().numpy(), np.zeros(h.shape))


def _expected_forward(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return (_forward(inputs["input"], inputs["weight"]),)


def _expected_backward(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return _backward(inputs["grad_output"], inputs["input"], inputs["weight"])


def _expected_add(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return _add(inputs["input"], inputs["residual"], inputs["weight"])


def _expected_add_backward(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return _backward(inputs["grad_output"], inputs["input"], inputs["weight"], inputs["grad_residual"])


@lru_cache(maxsize=1)
def _gated(input: Tensor, gate: Tensor, weight: Tensor) -> Bounded:
    return oracle.gated_rms_norm(input, gate, tuple(weight.shape), weight, EPS)


@lru_cache(maxsize=1)
def _gated_backward(grad_output: Tensor, input: Tensor, gate: Tensor, weight: Tensor) -> tuple[Bounded, ...]:
    grad_input, grad_gate, grad_weight = oracle.gated_rms_norm_backward(
        grad_output, input, gate, tuple(weight.shape), weight, EPS
    )
    assert grad_weight is not None
    return grad_input, grad_gate, grad_weight


def _expected_gated(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return (_gated(inputs["input"], inputs["gate"], inputs["weight"]),)


def _expected_gated_backward(inputs: Mapping[str, Tensor]) -> tuple[Bounded, ...]:
    return _gated_backward(inputs["grad_output"], inputs["input"], inputs["gate"], inputs["weight"])


OPERATORS = (
    Operator("rms_norm", ("input", "weight"), ("output",), _expected_forward),
    Operator(
        "rms_norm_backward", ("grad_output", "input", "weight"), ("grad_input", "grad_weight"), _expected_backward
    ),
    Operator(
        "forward_backward",
        ("input", "weight", "grad_output", "input", "weight"),
        ("output", "grad_input", "grad_weight"),
        lambda inputs: (*_expected_forward(inputs), *_expected_backward(inputs)),
        memories=("fresh",),  # autograd allocates its gradients itself
    ),
    Operator("add_rms_norm", ("input", "residual", "weight"), ("output", "residual_out"), _expected_add),
    # Of the sum, which it reads as input.
    Operator(
        "add_rms_norm_backward",
        ("grad_output", "input", "weight", "grad_residual"),
        ("grad_input", "grad_weight"),
        _expected_add_backward,
    ),
    Operator("gated_rms_norm", ("input", "gate", "weight"), ("output",), _expected_gated),
    Operator(
        "gated_rms_norm_backward",
        ("grad_output", "input", "gate", "weight"),
        ("grad_input", "grad_gate", "grad_weight"),
        _expected_gated_backward,
    ),
    Operator(
        "gated_forward_backward",
        ("input", "gate", "weight", "grad_output", "input", "gate", "weight"),
        ("output", "grad_input", "grad_gate", "grad_weight"),
        lambda inputs: (*_expected_gated(inputs), *_expected_gated_backward(inputs)),
        memories=("fresh",),
    ),
)
