"""What is peculiar to gated_rms_norm: activations, and a gate that is written over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import same_bits
from torch import Tensor
from traced_graphs import operators, trace

import normops
from reference import cases, oracle
from reference.cases import EPS, on
from reference.operators import GATED_RMS_NORM

ops = torch.ops.normops
gated_rms_norm: Callable[..., Tensor] = normops.gated_rms_norm

over_gating = pytest.mark.parametrize("gating", GATED_RMS_NORM.flags, ids=str)

GATES = (0.0, -0.0, 1e-30, 1.0, 1.278, 5.0, 10.0, 17.0, 50.0, 87.0, 88.0, 89.0, 95.0, 103.0, 104.0, 745.0, 1e4)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@over_gating
def test_extreme_gates(gating: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Saturated either way, where exponentials over- and underflow; alone in a row, and beside others."""
    gates = torch.tensor([sign * gate for gate in GATES for sign in (1, -1)], dtype=torch.float64)
    rows = torch.cat([gates.expand(3, -1), gates.unsqueeze(1).expand(-1, len(gates))]).to(dtype)
    x, dy = (cases.values(tuple(rows.shape), dtype, seed, scale=1.0) for seed in range(2))
    w = cases.values(rows.shape[-1:], torch.float32, 3)
    tensors = [on(device, tensor) for tensor in (x, rows, w, dy)]
    output = ops.gated_rms_norm(*tensors[:2], w.shape, tensors[2], EPS, **gating)
    oracle.assert_within(output, oracle.gated_rms_norm(x, rows, tuple(w.shape), w, EPS, **gating))
    gradients = ops.gated_rms_norm_backward(tensors[3], *tensors[:2], w.shape, tensors[2], EPS, **gating)
    expected = oracle.gated_rms_norm_backward(dy, x, rows, tuple(w.shape), w, EPS, **gating)
    for name, actual, bounded in zip(expected._fields, gradients, expected, strict=True):
        assert actual.isfinite().all(), name
        assert bounded is not None
        oracle.assert_within(actual, bounded, name)


def test_subnormal_activations() -> None:
    """On CPU, where the bounds would let them be zero, too: a roundoff off, or the smallest number."""
    gate = torch.linspace(-104.0, -86.0, 4096)
    output = ops.gated_rms_norm(torch.ones(4096), gate, (4096,), None, 0.0, activation="sigmoid")
    exact = gate.double().sigmoid()
    assert ((output.double() - exact).abs() <= (exact * 2**-23).clamp(min=2**-149)).all()
    assert 0 < output.count_nonzero() < 4096


def test_swish_is_silu(device: str) -> None:
    x, gate = (cases.values((5, 64), torch.float32, seed).to(device) for seed in range(2))
    assert same_bits(gated_rms_norm(x, gate, 64, activation="swish"), gated_rms_norm(x, gate, 64))


def test_operators_that_write_compile_to_the_functional_operators(device: str) -> None:
    def write(x: Tensor, gate: Tensor, dx: Tensor, dg: Tensor, dw: Tensor) -> Tensor:
        ops.gated_rms_norm.out(x, gate, [8], None, 1e-5, activation="sigmoid", out=dx)
        ops.gated_rms_norm_backward.out(dx, x, gate, [8], dw.clone(), grad_input=x, grad_gate=dg, grad_weight=dw)
        return x + dg

    def arguments() -> list[Tensor]:
        shapes = *[(4, 8)] * 4, (8,)
        return [cases.values(shape, torch.float32, seed).to(device) for seed, shape in enumerate(shapes)]

    torch._dynamo.reset()
    eager, compiled = arguments(), arguments()
    expected = write(*eager)
    assert same_bits(torch.compile(write, fullgraph=True)(*compiled), expected)
    for actual, wanted in zip(compiled, eager, strict=True):
        assert same_bits(actual, wanted)
    ours = [name for name in operators(trace(write, *arguments()).forward) if name.startswith("normops.")]
    assert ours == ["normops.gated_rms_norm.default", "normops.gated_rms_norm_backward.default"]
