"""Tests specific to gated_rms_norm: its activations where they saturate."""

from typing import Any

import pytest
import torch
from assertions import assert_within, same_bits

import normops
from reference import cases, oracle
from reference.cases import EPS, on
from reference.operators import GATED_RMS_NORM

ops = torch.ops.normops
GATES = (0.0, -0.0, 1e-30, 1.0, 1.278, 5.0, 10.0, 17.0, 50.0, 87.0, 88.0, 89.0, 95.0, 103.0, 104.0, 745.0, 1e4)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("gating", GATED_RMS_NORM.flags, ids=str)
@pytest.mark.triton_release
def test_extreme_gates(gating: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Gates saturate in both directions, where exponentials over- or underflow, in uniform and in mixed rows."""
    gates = torch.tensor([sign * gate for gate in GATES for sign in (1, -1)], dtype=torch.float64)
    rows = torch.cat([gates.expand(3, -1), gates.unsqueeze(1).expand(-1, len(gates))]).to(dtype)
    x, dy = (cases.values(tuple(rows.shape), dtype, seed, scale=1.0) for seed in range(2))
    w = cases.values(rows.shape[-1:], torch.float32, 3)
    tensors = [on(device, tensor) for tensor in (x, rows, w, dy)]
    output = ops.gated_rms_norm(*tensors[:2], w.shape, tensors[2], EPS, **gating)
    oracle.assert_within(output, oracle.gated_rms_norm(x, rows, tuple(w.shape), w, EPS, **gating))
    gradients = ops.gated_rms_norm_backward(tensors[3], *tensors[:2], w.shape, tensors[2], EPS, **gating)
    expected = oracle.gated_rms_norm_backward(dy, x, rows, tuple(w.shape), w, EPS, **gating)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_within(gradients, expected)


def test_subnormal_activations() -> None:
    """CPU errors are at most one roundoff or the smallest number; the oracle's bounds would accept zeros."""
    gate = torch.linspace(-104.0, -86.0, 4096)
    output = ops.gated_rms_norm(torch.ones(4096), gate, (4096,), None, 0.0, activation="sigmoid")
    exact = gate.double().sigmoid()
    assert ((output.double() - exact).abs() <= (exact * 2**-23).clamp(min=2**-149)).all()
    assert 0 < output.count_nonzero() < 4096


def test_swish_is_silu(device: str) -> None:
    x, gate = (cases.values((5, 64), torch.float32, seed).to(device) for seed in range(2))
    swish = normops.gated_rms_norm(x, gate, 64, activation="swish")
    assert same_bits(swish, normops.gated_rms_norm(x, gate, 64))
