"""Whether a result is right: what is wrong is not timed."""

import oracle
import torch
from torch import Tensor

from bench.operators import Operator
from bench.peers import Builder, Peer
from bench.problems import Tensors

# How far from the float64 values, in relative norm, a peer may be that promises no elementwise bounds: a few roundings
# of products and sums, each of up to half the dtype's epsilon.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def find_error(peer: Peer, build: Builder, operator: Operator, inputs: Tensors, output: object) -> str | None:
    """What is wrong with the output of a call on the inputs, or None."""
    actual = _tensors(output)
    if peer.own_definition:
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        return _first_error(operator, actual, _tensors(build(wide)()))
    expected = operator.expected(inputs)
    if not peer.has_bounds:
        return _first_error(operator, actual, tuple(torch.from_numpy(e.value.astype("float64")) for e in expected))
    for name, tensor, bounded in zip(operator.writes, actual, expected, strict=True):
        if problem := oracle.violation(tensor, bounded):
            return f"{name}: {problem}"
    return None


def _first_error(operator: Operator, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
    for name, tensor, value in zip(operator.writes, actual, expected, strict=True):
        tolerance = TOLERANCES[tensor.dtype]
        value = value.to(tensor.device)
        error = ((tensor.double() - value).norm() / value.norm()).item()
        if not error <= tolerance:  # also where it is NaN
            return f"{name}: relative error {error:.1e}, more than {tolerance:.0e}"
    return None


def _tensors(output: object) -> tuple[Tensor, ...]:
    tensors = output if isinstance(output, tuple) else (output,)
    return tuple(tensor.detach() for tensor in tensors)
