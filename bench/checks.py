"""Checks results, so that wrong ones are not timed."""

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.operators import EPS, TABLES, VECTORS, Operator
from bench.peers import Builder, Peer
from bench.problems import Tensors
from reference import oracle

# Tolerances in relative norm, against float64 values, of peers without elementwise bounds: a few roundings of products
# and sums, each of up to half the dtype's epsilon.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


# With more elements than this, the oracle takes longer than the measurement. It then checks only a sample of the rows,
# and grad_weight, a sum over all rows, is checked with a tolerance.
MOST_ELEMENTS = 1 << 25
SAMPLED_ELEMENTS = 1 << 20
LEAST_ROWS = 16


def find_error(peer: Peer, build: Builder, operator: Operator, inputs: Tensors, output: object) -> str | None:
    """Returns the error in the output of a call on the inputs, or None."""
    actual = dict(zip(operator.writes, tensors_of(output), strict=True))
    rows = inputs["input"].shape[0]
    if peer.own_definition:
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        return _first_difference(actual, dict(zip(operator.writes, tensors_of(build(wide)()), strict=True)))
    inputs = {name: _of_rows(tensor, rows) if name in TABLES else tensor for name, tensor in inputs.items()}
    are_rows = inputs.keys().isdisjoint(("scale", "bias"))  # a scale is per sample, a bias has channels
    if inputs["input"].numel() > MOST_ELEMENTS and are_rows:
        if "grad_weight" in actual:
            expected_sum = {"grad_weight": _grad_weight(inputs)}
            if error := _first_difference({"grad_weight": actual.pop("grad_weight")}, expected_sum):
                return error
        actual = {name: _sample(tensor) for name, tensor in actual.items()}
        inputs = {name: tensor if name in VECTORS else _sample_of_input(tensor) for name, tensor in inputs.items()}
    expected = dict(zip(operator.writes, operator.expected(inputs), strict=True))
    if not peer.has_bounds:
        values = {name: torch.from_numpy(bounded.value.astype("float64")) for name, bounded in expected.items()}
        return _first_difference(actual, values)
    for name, tensor in actual.items():
        if problem := oracle.violation(tensor, expected[name]):
            return f"{name}: {problem}"
    return None


def _sample(tensor: Tensor) -> Tensor:
    """Returns the first row, the last one and random rows between: the same for all tensors of one shape."""
    count = max(LEAST_ROWS, SAMPLED_ELEMENTS // tensor.shape[1])
    between = torch.randint(tensor.shape[0], (count,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, tensor.shape[0] - 1])
    return tensor[torch.cat([ends, between]).to(tensor.device)]


# All peers get the same inputs, and the oracle's results are cached by tensor.
_sample_of_input = lru_cache(maxsize=8)(_sample)


@lru_cache(maxsize=2)
def _of_rows(table: Tensor, rows: int) -> Tensor:
    return table.repeat_interleave(rows // table.shape[0], 0)


def _grad_weight(inputs: Tensors) -> Tensor:
    """Computes grad_weight by its definition, in float64, a chunk of rows at a time."""
    grad_weight = torch.zeros_like(inputs["weight"], dtype=torch.float64)
    rows = max(1, MOST_ELEMENTS // inputs["input"].shape[1])
    for begin in range(0, inputs["input"].shape[0], rows):
        part = {name: tensor[begin : begin + rows].double() for name, tensor in inputs.items() if name not in VECTORS}
        x, dy = part["input"], part["grad_output"]
        if "gate" in part:
            dy = dy * F.silu(part["gate"])
        if "cos" in part:
            first, second = (dy * part["sin"]).chunk(2, -1)
            dy = dy * part["cos"] + torch.cat((second, -first), -1)
        grad_weight += (dy * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()).sum(0)
    return grad_weight


def _first_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for name, tensor in actual.items():
        tolerance = TOLERANCES[tensor.dtype]
        value = expected[name].to(tensor.device)
        error = ((tensor.double() - value).norm() / value.norm()).item()
        if not error <= tolerance:  # also true for NaN
            return f"{name}: relative error {error:.1e}, more than {tolerance:.0e}"
    return None


def tensors_of(output: object) -> tuple[Tensor, ...]:
    """Returns the results of a call, with heads flattened into rows."""
    tensors = output if isinstance(output, tuple) else (output,)
    return tuple(tensor.detach().flatten(0, -2) if tensor.dim() > 2 else tensor.detach() for tensor in tensors)
